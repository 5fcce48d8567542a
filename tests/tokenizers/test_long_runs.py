"""One million characters of one kind: exact, and no panic of a library."""

import pytest

from llamatool.tokenizers.base import Tokenizer
from llamatool.tokenizers.tiktoken import LONG_RUN, TiktokenTokenizer

MILLION = 1_000_000
INPUTS = {
    "a": "a" * MILLION,
    "A": "A" * MILLION,
    "^": "^" * MILLION,
    "newlines": "\n" * MILLION,
    "han": "\u4e2d" * MILLION,
    "digits": "7" * MILLION,
    "base64": ("QUJDRGVmZ2hpamts" * (MILLION // 16 + 1))[:MILLION],
    "spaces": " " * MILLION,
    "spaces and x": " " * MILLION + "x",
}
# Counts for Llama 2, 3, 4, measured with the libraries themselves where they can do it.
COUNTS = {
    "a": (250_002, 125_000, 62_500),
    "A": (250_002, 125_000, 62_500),
    "^": (500_001, 250_000, 125_000),
    "newlines": (1_000_001, 31_250, 62_500),
    "han": (1_000_001, 1_000_000, 1_000_000),
    "digits": (1_000_001, 333_334, 333_334),
    "base64": (625_001, 625_000, 625_000),
    "spaces": (62_501, 7_813, 15_625),
    "spaces and x": (62_501, 7_814, 15_626),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("generation", ["llama2", "llama3", "llama4"])
def test_a_million_characters(
    generation: str,
    name: str,
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(generation)
    ids = tokenizer.encode(INPUTS[name])
    assert len(ids) == COUNTS[name][("llama2", "llama3", "llama4").index(generation)]
    assert tokenizer.decode(ids) == INPUTS[name]
    assert capfd.readouterr().err == ""


def _raw(tokenizer: TiktokenTokenizer, text: str) -> list[int]:
    return tokenizer._encoding.encode_ordinary(text)


BLANKS = [" ", "\t", "\xa0", "\u3000", " \t", "\u2028", "\x0b \x0c"]
AFTER = ["", "x", "7", "!", "\n", "\r\n", "\x1c", "\u200b", "'s", " \n", "/", "\u0301"]


@pytest.mark.parametrize("blank", BLANKS, ids=ascii)
@pytest.mark.parametrize("generation", ["llama3", "llama4"])
def test_long_blank_runs_equal_the_library(
    generation: str, blank: str, request: pytest.FixtureRequest
) -> None:
    """Long enough to be cut out, short enough for the library to do it by itself."""
    tokenizer: TiktokenTokenizer = request.getfixturevalue(generation)
    run = (blank * (2 * LONG_RUN))[: LONG_RUN + 100]
    for after in AFTER:
        for before in ("", "x", "!", "\n", "x\r\n", "!\n", "7", "/\n"):
            text = f"{before}{run}{after}"
            assert tokenizer.encode(text) == _raw(tokenizer, text), ascii((before, after))
    several = f"a{run}b{run}\n{run}c{run}"
    assert tokenizer.encode(several) == _raw(tokenizer, several)


@pytest.mark.parametrize("generation", ["llama3", "llama4"])
def test_a_million_blanks_of_other_kinds(generation: str, request: pytest.FixtureRequest) -> None:
    tokenizer: TiktokenTokenizer = request.getfixturevalue(generation)
    for text in ("\t" * MILLION, "\xa0 " * (MILLION // 2) + "!", " " * MILLION + "\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_lone_surrogates_on_every_path(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
    assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("\U0001f600")
    assert tokenizer.count(["a\ud800", "b"]) == len(tokenizer.encode("a\ufffdb"))


def test_lone_surrogate_in_llama3(llama3: TiktokenTokenizer) -> None:
    assert llama3.encode("a\ud800b") == [64, 5809, 65]


@pytest.mark.parametrize("text", ["a\0b", "\ufeffx", "a\r\nb", "\0", "\x7f\x80\x9f", "\uffff"])
def test_odd_characters_come_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
