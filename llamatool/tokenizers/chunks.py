r"""Where a text can be cut so that the ids of the parts, put together, are those of the whole.

    (?<=[^\s\u2581])(?= )            between a visible character and a space
    (?<=\n)(?=[^\s/\u2581])          after a newline, before a visible character other than /

Byte-pair tokenizers of the Llama 3 kind first split the text by a regular expression. None of its
alternatives has white space after a visible character, except newlines (and, in Llama 4, slashes)
that follow punctuation; none looks behind; the one that looks ahead ends in white space. So a
match always ends at these places, and what stands before or after does not change it.
SentencePiece has no split, but no piece of Llama 2 has a space after another character, or a
newline: no merge crosses the cut (sentencepiece.py checks this for every model it loads).

GPT-2's expression has no alternative for newlines, so a newline at the end of a part would be
matched differently; there only the first place is safe.

A text that has no such place (a megabyte of one letter) is not cut: exactness comes first.
"""

import re
from collections.abc import Iterable, Iterator
from enum import Enum

# U+2581 is SentencePiece's space: a literal one in the text is white space to it.
SPACES_AND_LINES = re.compile(r"(?<=[^\s\u2581])(?= )|(?<=\n)(?=[^\s/\u2581])")
SPACES = re.compile(r"(?<=[^\s\u2581])(?= )")

CHUNK_CHARACTERS = 2**19  # of a streamed text: large enough that the cost of a cut vanishes


class CutRule(Enum):
    """How far a tokenizer allows its text to be cut."""

    NEVER = "never"
    SPACES = "spaces"
    SPACES_AND_LINES = "spaces and lines"

    @property
    def pattern(self) -> re.Pattern[str] | None:
        """The expression that matches, with no width, where a cut is safe."""
        return _PATTERNS[self]


_PATTERNS = {
    CutRule.NEVER: None,
    CutRule.SPACES: SPACES,
    CutRule.SPACES_AND_LINES: SPACES_AND_LINES,
}


class Chunker:
    """Takes a text in any pieces and gives it back in parts that can be encoded one by one.

    Each part ends at the first safe place at or after `size` characters (the last may be less), so
    memory holds one part. With CutRule.NEVER the one part is the whole text.
    """

    def __init__(self, rule: CutRule, *, size: int = CHUNK_CHARACTERS) -> None:
        self._pattern = rule.pattern
        self._size = size
        self._pending: list[str] = []
        self._num_pending = 0
        self._last = ""  # the character before the next piece: a cut depends on its neighbours

    def push(self, text: str) -> Iterator[str]:
        """The parts that are complete with this piece."""
        start = 0
        while self._pattern is not None:
            missing = self._size - self._num_pending
            cut = _cut(self._pattern, self._last, text, start, missing)
            if cut is None:
                break
            part = "".join(self._pending) + text[start:cut]
            self._pending, self._num_pending, start = [], 0, cut
            yield part
        self._pending.append(text[start:] if start else text)
        self._num_pending += len(text) - start
        self._last = text[-1:] or self._last

    def rest(self) -> str:
        """The last part; empty if nothing is left."""
        return "".join(self._pending)


def safe_chunks(
    texts: Iterable[str], rule: CutRule, *, size: int = CHUNK_CHARACTERS
) -> Iterator[str]:
    """The concatenation of `texts` in parts of at least `size` characters (the last may be less).

    Example: `["one two", " three"]`, SPACES, size 1 -> `one`, ` two`, ` three`.
    """
    chunker = Chunker(rule, size=size)
    for text in texts:
        yield from chunker.push(text)
    if rest := chunker.rest():
        yield rest


def _cut(pattern: re.Pattern[str], last: str, text: str, start: int, at_least: int) -> int | None:
    """Offset in `text` of the first safe place at or after `start + at_least`, None if none."""
    begin = start + max(at_least, 0 if start == 0 else 1)
    if begin >= len(text):
        return None
    if begin == 0:
        if last and pattern.search(last + text[:1], 1, 2):
            return 0
        begin = 1
    match = pattern.search(text, begin)
    return match.start() if match else None


def cut_points(text: str, rule: CutRule, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the parts of `text`, each cut at the first safe place after `size`."""
    pattern = rule.pattern
    start, length = 0, len(text)
    while start < length:
        match = pattern.search(text, start + size) if pattern and start + size < length else None
        end = match.start() if match else length
        yield start, end
        start = end
