"""The cut rule: parts encoded one by one give the ids of the whole."""

import random
import re
from pathlib import Path

import pytest

from llamatool.tokenizers import chunks, sentencepiece
from llamatool.tokenizers.base import Tokenizer
from llamatool.tokenizers.chunks import Chunker, CutRule, cut_points, safe_chunks
from llamatool.tokenizers.huggingface import HuggingFaceTokenizer
from llamatool.tokenizers.load import from_bytes, load
from llamatool.tokenizers.modelproto import SentencePieceModel
from llamatool.tokenizers.sentencepiece import SentencePieceTokenizer, can_be_cut
from tests.tokenizers.conftest import load_fetched, random_text, smollm_file

NUM_STRINGS = 100_000


def _pieces(text: str, generator: random.Random) -> list[str]:
    """The text as a stream might bring it."""
    pieces, start = [], 0
    while start < len(text):
        end = start + generator.randint(1, 9)
        pieces.append(text[start:end])
        start = end
    return pieces


def _mismatches(tokenizer: Tokenizer, num_strings: int, seed: int) -> int:
    generator = random.Random(seed)
    bad = 0
    for _ in range(num_strings):
        text = random_text(generator)
        size = generator.choice((1, 2, 5, 13))
        ids: list[int] = []
        for chunk in safe_chunks(_pieces(text, generator), tokenizer.cut_rule, size=size):
            ids += tokenizer._encode(chunk, first=not ids)
        bad += ids != tokenizer.encode(text)
    return bad


def test_no_mismatch_in_random_strings(tokenizer: Tokenizer) -> None:
    assert tokenizer.cut_rule is CutRule.SPACES_AND_LINES
    assert _mismatches(tokenizer, NUM_STRINGS, seed=1) == 0


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("llama3", r"(?= )"),  # before any space
        ("llama4", r"(?<=[^\s\u2581])(?= )|(?<=\n)(?=\S)"),  # Llama 4 takes slashes after newlines
        ("small", r"(?<=\S)(?= )|(?<=\n)(?=[^\s/])"),  # U+2581 taken for a visible character
    ],
)
def test_a_rule_that_is_a_little_wrong_is_noticed(
    name: str, pattern: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    monkeypatch.setitem(chunks._PATTERNS, CutRule.SPACES_AND_LINES, re.compile(pattern))
    assert _mismatches(tokenizer, 5_000, seed=1) > 0


@pytest.mark.parametrize("name", ["qwen3", "mistral-as-llama2", "smollm"])
def test_no_mismatch_with_the_tokenizers_library(name: str) -> None:
    if name == "smollm":
        from llamatool.cli.tokens import _gguf_metadata

        tokenizer = load(smollm_file(), read_gguf=_gguf_metadata)
        assert tokenizer.cut_rule is CutRule.SPACES  # GPT-2's expression: not after newlines
    else:
        tokenizer = load_fetched(f"{name}/tokenizer.json")
        assert tokenizer.cut_rule is CutRule.SPACES_AND_LINES
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert _mismatches(tokenizer, 3_000, seed=2) == 0


def test_long_texts_are_cut_exactly_by_the_tokenizers_library() -> None:
    tokenizer = load_fetched("mistral-as-llama2/tokenizer.json")
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    text = " ".join(random_text(random.Random(i)) for i in range(2_000))
    assert len(text) > 20_000
    whole = tokenizer._engine.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == whole


def test_an_unknown_pre_tokenizer_is_not_cut(small_json: bytes) -> None:
    import json

    content = json.loads(small_json)
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+\s*|\W"
    tokenizer = from_bytes(json.dumps(content).encode(), where="changed")
    assert tokenizer.cut_rule is CutRule.NEVER
    text = "one two\nthree " * 100
    assert [i for part in tokenizer.encode_stream(text) for i in part] == tokenizer.encode(text)


@pytest.mark.parametrize(
    "piece", ["a\u2581b", "\u2581a\u2581", "\n\n", "a b"], ids=["inner", "last", "lines", "space"]
)
def test_a_model_whose_pieces_cross_a_cut_is_not_cut(piece: str) -> None:
    ordinary = ["<unk>", "<s>", "</s>", "\u2581", "\u2581\u2581", "\u2581a", "b"]
    types = [2, 3, 3, 1, 1, 1, 1]
    assert can_be_cut(SentencePieceModel(ordinary, [0.0] * 7, types))
    assert not can_be_cut(SentencePieceModel([*ordinary, piece], [0.0] * 8, [*types, 1]))


def test_chunks_add_up_and_hold_their_size() -> None:
    text = "one two\nthree  four\u2581 five six\n/seven " * 50
    for size in (1, 7, 100, 10_000):
        for rule in CutRule:
            parts = list(safe_chunks(_pieces(text, random.Random(size)), rule, size=size))
            assert "".join(parts) == text
            assert all(len(chunk) >= size for chunk in parts[:-1])
            spans = list(cut_points(text, rule, size))
            assert [text[a:b] for a, b in spans] == parts
    assert list(safe_chunks(["one two", " three"], CutRule.SPACES, size=1)) == [
        "one",
        " two",
        " three",
    ]


def test_the_parts_of_a_stream_stay_small() -> None:
    chunker = Chunker(CutRule.SPACES_AND_LINES, size=1000)
    longest = 0
    for _ in range(10_000):
        for part in chunker.push("word after word and so on\n"):
            longest = max(longest, len(part))
    assert longest < 1100


def test_a_text_without_a_cut_is_one_part(llama3: Tokenizer) -> None:
    texts = ["a" * 1000] * 500
    assert len(list(safe_chunks(texts, CutRule.SPACES_AND_LINES, size=1000))) == 1
    assert llama3.count(texts) == len(llama3.encode("a" * 500_000))


def test_memory_of_a_long_stream_is_constant(tmp_path: Path) -> None:
    # The count of 24 MB must not need more memory than that of 4 MB.
    import subprocess
    import sys

    from tests.tokenizers.conftest import meta_file

    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from llamatool.tokenizers.load import load\n"
        "line = 'The river wakes before the town does, at five in the morning.\\n'\n"
        f"tokenizer = load(Path({str(meta_file('llama3'))!r}))\n"
        "print(tokenizer.count(line * 1000 for _ in range(int(sys.argv[1]))))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    used = []
    for num_pieces in (64, 384):
        command = [sys.executable, "-c", code, str(num_pieces)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert int(out[0]) == 14 * 1000 * num_pieces
        used.append(int(out[1]) / 1024)  # MiB
    assert used[1] - used[0] < 20


@pytest.mark.parametrize("name", ["small", "llama2"])
def test_words_and_parts_of_sentencepiece(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short texts made to go the way of long ones: word by word, and in parts."""
    tokenizer: SentencePieceTokenizer = request.getfixturevalue(name)
    monkeypatch.setattr(sentencepiece, "SHORT", 0)
    monkeypatch.setattr(sentencepiece, "BLOCK", 20)
    generator = random.Random(8)
    for long in (0, 10**9):  # words are remembered, or not
        monkeypatch.setattr(sentencepiece, "LONG", long)
        for enough in (0, 10**9):  # the next blocks go in parts, or not
            monkeypatch.setattr(sentencepiece, "ENOUGH_WORDS", enough)
            for _ in range(3_000):
                text = random_text(generator)
                assert tokenizer.encode(text) == tokenizer._whole.encode(text), ascii(text)
