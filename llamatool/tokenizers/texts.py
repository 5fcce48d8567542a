"""Text for counting: bytes from a file or a pipe, decoded piece by piece, with what is odd noted.

Nothing is changed in silence. Line ends stay as they are, nothing is normalised; a byte order mark
is left out and said; bytes that are no UTF-8 become U+FFFD and are counted.
"""

import codecs
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from llamatool.config.model import Note
from llamatool.tokenizers.base import without_surrogates
from llamatool.tokenizers.chunks import CutRule, safe_chunks

PIECE_BYTES = 2**20
_REPLACEMENT = "\ufffd".encode()

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Han, kana, Thai, Lao, Tibetan, Burmese and Khmer, which are written without spaces.
_NO_SPACES = re.compile(
    "[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff]+"
)
MOST_UNSPACED = 0.1  # share of such characters from which on words are not counted


class Readable(Protocol):
    """What text can be read from: an open file, a pipe, or anything that counts along."""

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes; none at the end."""


@dataclass(slots=True)
class TextFacts:
    """What is known of a text when it has been read to its end."""

    num_characters: int = 0
    num_bytes: int = 0  # in UTF-8
    num_words: int = 0  # stretches between white space
    num_unspaced: int = 0  # characters of scripts that are written without spaces
    num_invalid: int = 0  # places where the bytes are no text
    num_nul: int = 0
    num_crlf: int = 0
    num_surrogates: int = 0
    nfc: bool = True
    encoding: str = "utf-8"
    has_bom: bool = False
    _ends_in_word: bool = field(default=False, repr=False)
    _ends_in_cr: bool = field(default=False, repr=False)
    _tail: str = field(default="", repr=False)

    def add(self, piece: str) -> None:
        """Take note of the next piece of the text."""
        if not piece:
            return
        self.add_briefly(piece)
        self.num_bytes += len(piece) if piece.isascii() else len(piece.encode("utf-8", "replace"))
        self.num_words += len(piece.split()) - (self._ends_in_word and not piece[0].isspace())
        self._ends_in_word = not piece[-1].isspace()
        if not piece.isascii():
            self.num_unspaced += sum(len(run) for run in _NO_SPACES.findall(piece))
            self.nfc = self.nfc and unicodedata.is_normalized("NFC", self._tail + piece)
        self._tail = piece[-1]

    def add_briefly(self, piece: str) -> None:
        """Take note of the length, NUL characters and line ends only."""
        if not piece:
            return
        self.num_characters += len(piece)
        self.num_nul += piece.count("\0")
        self.num_crlf += piece.count("\r\n") + (self._ends_in_cr and piece[0] == "\n")
        self._ends_in_cr = piece[-1] == "\r"

    @property
    def words(self) -> int | None:
        """Number of words; None for scripts that do not put spaces between them."""
        if self.num_unspaced > MOST_UNSPACED * self.num_characters:
            return None
        return self.num_words

    def notes(self) -> tuple[Note, ...]:
        """One sentence for everything about the bytes that a reader should know."""
        found = []
        if not self.num_characters:
            found.append(Note("text_empty", "the text is empty"))
        if self.has_bom:
            kind = "" if self.encoding == "utf-8" else f" ({self.encoding.upper()} text)"
            message = f"begins with a byte order mark{kind}, which is not counted"
            found.append(Note("text_bom", message))
        if self.num_invalid:
            kind, places = self.encoding.upper(), _counted(self.num_invalid, "place")
            message = f"no {kind} in {places}, each counted as U+FFFD"
            found.append(Note("text_invalid", message))
        if self.num_surrogates:
            message = f"{_counted(self.num_surrogates, 'lone surrogate')}, counted as U+FFFD"
            found.append(Note("text_surrogates", message))
        if self.num_nul:
            message = f"{_counted(self.num_nul, 'NUL character')}: perhaps a binary file, not text"
            found.append(Note("text_nul", message))
        if self.num_crlf:
            message = (
                f"{_counted(self.num_crlf, 'line end')} CR LF, counted as it stands in the file"
            )
            found.append(Note("text_crlf", message))
        return tuple(found)


def decoded(stream: Readable, facts: TextFacts, *, briefly: bool = False) -> Iterator[str]:
    """The text of a binary stream in pieces of about PIECE_BYTES, noting what it meets in `facts`.

    A byte order mark chooses the encoding; without one it is UTF-8.

    Args: briefly: note only what is wrong with the bytes, and the number of characters; words and
    composition take a third of the time of a count.
    """
    note = facts.add_briefly if briefly else facts.add
    head = stream.read(PIECE_BYTES)
    for mark, encoding in _BOMS:
        if head.startswith(mark):
            facts.encoding, facts.has_bom = encoding, True
            head = head[len(mark) :]
            break
    decoder = codecs.getincrementaldecoder(facts.encoding)("replace")
    tail = b""
    while head:
        piece = decoder.decode(head)
        # What is U+FFFD in the text but not in the bytes stands for bytes that are no text.
        facts.num_invalid += piece.count("\ufffd") - (tail + head).count(_REPLACEMENT)
        tail = head[-2:]
        note(piece)
        yield piece
        head = stream.read(PIECE_BYTES)
    last = decoder.decode(b"", final=True)
    facts.num_invalid += len(last)
    note(last)
    if last:
        yield last


def composed(texts: Iterable[str]) -> Iterator[str]:
    """The text in composed form (NFC), in pieces that end where nothing composes across."""
    for part in safe_chunks(texts, CutRule.SPACES_AND_LINES):
        yield unicodedata.normalize("NFC", part)


def pieces(texts: Iterable[str], facts: TextFacts) -> Iterator[str]:
    """Text that is already decoded, with lone surrogates replaced and everything noted."""
    for text in texts:
        clean = without_surrogates(text)
        if clean is not text:
            facts.num_surrogates += clean.count("\ufffd") - text.count("\ufffd")
        facts.add(clean)
        yield clean


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
