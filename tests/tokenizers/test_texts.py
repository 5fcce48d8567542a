"""Reading text: nothing changed in silence, everything odd said in one line."""

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamatool.tokenizers import texts
from llamatool.tokenizers.texts import TextFacts, composed, decoded, pieces


def _read(data: bytes, size: int = 3) -> tuple[str, TextFacts]:
    facts = TextFacts()

    class Slow(io.BytesIO):
        def read(self, _size: int | None = -1) -> bytes:
            return super().read(size if self.tell() else 8)

    return "".join(decoded(Slow(data), facts)), facts


@pytest.mark.parametrize(
    ("data", "text", "notes"),
    [
        (b"", "", ["the text is empty"]),
        (b"plain", "plain", []),
        ("caf\u00e9 \U0001f999".encode(), "caf\u00e9 \U0001f999", []),
        (b"\xef\xbb\xbfhi", "hi", ["begins with a byte order mark, which is not counted"]),
        ("hi\u4e2d".encode("utf-16"), "hi\u4e2d",
         ["begins with a byte order mark (UTF-16-LE text), which is not counted"]),
        ("hi".encode("utf-32"), "hi",
         ["begins with a byte order mark (UTF-32-LE text), which is not counted"]),
        (b"caf\xe9 x", "caf\ufffd x", ["no UTF-8 in 1 place, each counted as U+FFFD"]),
        (b"x\xf0\x9f\xa6", "x\ufffd", ["no UTF-8 in 1 place, each counted as U+FFFD"]),
        ("\ufffd".encode(), "\ufffd", []),
        (b"a\0b\0", "a\0b\0", ["2 NUL characters: perhaps a binary file, not text"]),
        (b"a\r\nb\r\n", "a\r\nb\r\n",
         ["2 line ends CR LF, counted as it stands in the file"]),
    ],
)  # fmt: skip
def test_bytes(data: bytes, text: str, notes: list[str]) -> None:
    found, facts = _read(data)
    assert found == text
    assert [note.message for note in facts.notes()] == notes
    assert facts.num_characters == len(text)
    assert facts.num_bytes == len(text.encode())


@given(st.binary(max_size=60), st.integers(1, 7))
def test_any_bytes_as_python_decodes_them(data: bytes, size: int) -> None:
    found, facts = _read(b"x" * 8 + data, size)
    assert found == "x" * 8 + data.decode("utf-8", "replace")
    assert facts.num_invalid == found.count("\ufffd") - data.count("\ufffd".encode())


@given(st.lists(st.text(max_size=8)))
def test_facts_do_not_depend_on_the_pieces(parts: list[str]) -> None:
    whole = "".join(parts)
    facts = TextFacts()
    assert "".join(pieces(parts, facts)) == texts.without_surrogates(whole)
    assert facts.num_characters == len(whole)
    assert facts.num_words == len(whole.split())
    assert facts.num_crlf == whole.count("\r\n")
    assert facts.num_nul == whole.count("\0")
    if len(parts) == 1:
        assert facts.nfc == unicodedata.is_normalized("NFC", whole)


def test_a_mark_at_the_beginning_of_a_piece_is_seen() -> None:
    facts = TextFacts()
    list(pieces(["cafe", "\u0301 noir"], facts))
    assert not facts.nfc
    assert "".join(composed(["cafe", "\u0301 noir"])) == "caf\u00e9 noir"


def test_words_only_for_scripts_with_spaces() -> None:
    for text, words in (
        ("one two three", 3),
        ("\ud55c\uad6d\uc5b4 \ub2e8\uc5b4", 2),
        ("\u6cb3\u6d41\u6bd4\u5c0f\u9547", None),
        ("\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0e04\u0e23\u0e31\u0e1a", None),
        ("\u1019\u103c\u1014\u103a\u1019\u102c", None),
    ):
        facts = TextFacts()
        facts.add(text)
        assert facts.words == words


def test_surrogates_are_counted() -> None:
    facts = TextFacts()
    assert list(pieces(["a\ud800b"], facts)) == ["a\ufffdb"]
    assert [note.message for note in facts.notes()] == ["1 lone surrogate, counted as U+FFFD"]
