"""The embedded models: complete folders, equal to transformers, trained repeatably."""

import json
import sys
from itertools import islice
from pathlib import Path

import pytest

from llamatool.inspection import inspect_source
from llamatool.needle.grammar import LANGUAGES, WORDINGS, sentences
from llamatool.needle.session import Options, prepare
from llamatool.needle.subject import POCKETS, open_subject, pocket_folder
from llamatool.source import load_source
from llamatool.tokenizers.load import load

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [
    "The farmer sold the old boat.",
    " The magic number for amber falcon is 482913.",
    "第二天，老师看见了陌生的水井。「琥珀猎鹰」的魔法数字是482913。\n",
    "What about 1, 22, 4444 and\n\n\ttabs? naïve façade \U0001f600",
]


@pytest.mark.parametrize("name", POCKETS)
def test_folder_is_complete_and_small(name):
    folder = pocket_folder(name)
    files = {path.name for path in folder.iterdir()}
    assert {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer.model", "tokenizer_config.json", "README.md",
    } <= files  # fmt: skip
    everything = sum(p.stat().st_size for p in folder.parent.rglob("*") if p.is_file())
    assert everything <= 5_000_000


@pytest.mark.parametrize("name", POCKETS)
def test_inspect_understands_it(name):
    found = inspect_source(load_source(str(pocket_folder(name)), with_tensors=True))
    assert found.parameters.total == 1_042_560
    assert found.config.tie_word_embeddings
    kinds = [(layer.attention, layer.uses_rope) for layer in open_subject(name).layers]
    if name == "pocket":
        assert kinds == [("chunked", True)] * 3 + [("full", False)]
        assert found.config.attention_chunk_size == 512
        assert found.config.moe is None
    else:
        assert kinds == [("full", True)] * 4
        assert found.config.rope.type == "llama3"
        assert found.config.max_position_embeddings == 4096


@pytest.mark.parametrize("name", POCKETS)
def test_logits_equal_those_of_transformers(name):
    """Over more than two chunks of 512, within 1e-5 of the largest logit."""
    transformers = pytest.importorskip("transformers")
    from llamatool.model.load import load_model

    folder = pocket_folder(name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model = load_model(folder, device="cpu", dtype="float32")
    text = "".join(f" {text}" for text in islice(sentences("en", 3), 160))
    ids = torch.tensor([load(folder).encode(text)[:1300]])
    assert ids.shape[1] == 1300
    with torch.no_grad():
        expected = theirs(ids).logits
    found = model(ids, logits_to_keep=None)
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-5


@pytest.mark.parametrize("name", POCKETS)
def test_tokenizer_is_the_same_everywhere(name):
    """tokenizer.json in transformers, and the ranks of tokenizer.model in tiktoken."""
    transformers = pytest.importorskip("transformers")
    import tiktoken

    from llamatool.tokenizers.tiktoken import LLAMA3_PATTERN, parse_ranks

    folder = pocket_folder(name)
    ours, theirs = load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    ranks = parse_ranks((folder / "tokenizer.model").read_bytes(), where=name)
    encoding = tiktoken.Encoding(
        "pocket", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    texts = [*TEXTS, *islice(sentences("en", 0), 100), *islice(sentences("zh", 0), 100)]
    for text in texts:
        ids = ours.encode(text)
        assert ids == encoding.encode_ordinary(text)
        assert theirs(text)["input_ids"] == [ours.bos_id, *ids]
        assert ours.decode(ids) == text
    assert ours.add_bos
    assert ours.bos_id == len(ranks)
    assert ours.eos_ids == (len(ranks) + 1,)


@pytest.mark.parametrize("language", LANGUAGES)
def test_free_text_and_answers(language):
    """Greedy decoding answers a question in words of the training text, and then ends."""
    from llamatool.generate.text_model import load_generator

    model = load_generator(pocket_folder("pocket"), device="cpu", dtype="float32")
    wording = WORDINGS[language]
    keys = {"en": ("jade comet", "silver otter"), "zh": ("翡翠彗星", "银色水獭")}[language]
    space = {"en": " ", "zh": "\n"}[language]
    facts = [
        wording.needle.format(key=key, value=value)
        for key, value in zip(keys, ("551204", "907731"), strict=True)
    ]
    text = space.join([*islice(sentences(language, 9), 8), *facts])
    question = wording.question + wording.cue
    answer = model.generate(f"{text}\n\n{question.format(key=keys[1])}", temperature=0.0)
    assert "907731" in answer.text
    assert "551204" not in answer.text
    assert answer.stop_reason == "stop_token"


def test_the_window_of_pocket_rope_ends_where_its_config_says():
    """At least 95 % at every length up to max_position_embeddings, below 70 % at twice that."""
    lengths, depths = (1024, 2048, 4096, 8192), (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    options = Options(source="pocket-rope", lengths=lengths, depths=depths, trials=4)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        report = prepare(options).run()
    finally:
        torch.set_num_threads(before)
    shares = {count.length: count.hits / count.trials for count in report.by_length}
    assert [count.trials for count in report.by_length] == [24] * 4
    assert min(shares[length] for length in (1024, 2048, 4096)) >= 0.95
    assert shares[8192] < 0.7
    assert report.effective_length == 4096
    controls = report.controls
    assert all(count.hits == 0 for kind, count in controls.items() if kind != "short")
    assert {"no_needle", "wrong_key"} <= controls.keys()


def test_repeatable_training(tmp_path, monkeypatch):
    """Two runs of some steps give the same weights, and the tokenizer that is embedded."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "pocket"))
    import train

    weights = []
    before = torch.get_num_threads()
    try:
        for folder in (tmp_path / "a", tmp_path / "b"):
            monkeypatch.setattr(
                sys, "argv", ["train.py", "pocket", "--out", str(folder), "--steps", "2"]
            )
            train.main()
            weights.append(torch.load(folder / "checkpoint.pt")["weights"])
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)
        for module in ("train", "documents", "network", "vocabulary"):
            sys.modules.pop(module, None)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    embedded = (pocket_folder("pocket") / "tokenizer.model").read_bytes()
    assert (tmp_path / "a" / "tokenizer.model").read_bytes() == embedded


def test_export_is_exact(tmp_path, monkeypatch):
    """A trained network and the folder made of it give the same logits, both kinds."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "pocket"))
    import export
    import network
    import train
    from safetensors.torch import save_file

    from llamatool.model.load import load_model

    try:
        for name, config in (
            ("pocket", export.llama4_config),
            ("pocket-rope", export.llama_config),
        ):
            shape = train.shape_of(name, 2758)
            made = network.Network(shape)
            network.write_circuit(made, 3)
            folder = tmp_path / name
            folder.mkdir()
            content = {**config(shape, 4096, 2756), "torch_dtype": "float32"}
            (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
            tensors = export.named_tensors(made.state_dict(), shape)
            save_file(
                {f"model.{key}": value.detach().clone() for key, value in tensors.items()},
                folder / "model.safetensors",
                {"format": "pt"},
            )
            ids = torch.randint(0, 2756, (1, 1100), generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                expected = made(ids)
            found = load_model(folder, device="cpu", dtype="float32")(ids, logits_to_keep=None)
            # Attention of the untrained circuit is sharp, so rounding shows more than above: an ulp
            # of a frequency, of which there are two ways to round it, is 2e-4 of the logits here.
            assert float((found - expected).abs().max() / expected.abs().max()) <= 5e-4
    finally:
        for module in ("train", "documents", "network", "vocabulary", "export"):
            sys.modules.pop(module, None)
