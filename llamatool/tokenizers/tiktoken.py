"""Meta's `tokenizer.model` of Llama 3 and 4: byte-pair ranks, encoded by the tiktoken library.

The file has one line for each token, `base64 rank`. The regular expression that first splits the
text, and the control tokens, are not in the file; they come from Meta's code (llama-models 0.3.0).

Ids are those of the whole text, as Hugging Face and llama.cpp have them. Meta's own code cuts a
text at 400,000 characters and in runs of 25,000, which changes ids: 30,000 spaces and an `x` are
237 tokens there and 236 uncut.
"""

import binascii
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from llamatool.errors import TokenizerError
from llamatool.tokenizers.base import ByteStreamDecoder, Identity, StreamDecoder, Tokenizer
from llamatool.tokenizers.chunks import CutRule
from llamatool.tokenizers.special import bos_and_stops

if TYPE_CHECKING:
    from tiktoken import Encoding

Ranks = Mapping[bytes, int]

# llama-models 0.3.0, llama3/tokenizer.py
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama-models 0.3.0, llama4/tokenizer.py
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
LLAMA4_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_SUFFIX}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Runs of white space from this length on are taken out of the library's hands (see `_encode`).
LONG_RUN = 8_192
# Unicode's White_Space without the line ends: `\s` of the Rust expressions, unlike Python's `\s`,
# does not hold U+001C to U+001F.
_BLANKS = "\t\x0b\x0c \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_BLANK_RUN = re.compile(f"[{_BLANKS}]+")


class TiktokenTokenizer(Tokenizer):
    """Byte-pair encoding by rank, after a split by `pattern`."""

    cut_rule = CutRule.SPACES_AND_LINES

    def __init__(
        self, ranks: Ranks, *, pattern: str, specials: Mapping[str, int], identity: Identity
    ) -> None:
        self.ranks = ranks
        self.pattern = pattern
        self.special_ids = specials
        self.bos_id, self.eos_ids = bos_and_stops(specials)
        self.add_bos = self.bos_id is not None
        self.vocab_size = max(len(ranks), max(specials.values(), default=-1) + 1)
        self.identity = replace(identity, vocab_size=self.vocab_size)
        self._encoding = _encoding(ranks, pattern)

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        names = self.names_by_id
        parts = []
        for token_id in ids:
            if token_id not in names:
                parts.append(self.token_bytes(token_id))
            elif specials:
                parts.append(names[token_id].encode())
        return b"".join(parts).decode("utf-8", "replace")

    def stream(self, after: Sequence[int] = ()) -> StreamDecoder:
        """A decoder of ids that arrive one by one; what stands before has no influence."""
        return ByteStreamDecoder(self)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; nothing for a control token."""
        if 0 <= token_id < len(self._tokens):
            return self._tokens[token_id]
        if token_id in self.names_by_id or len(self._tokens) <= token_id < self.vocab_size:
            return b""
        raise self._unknown_id(token_id)

    def ordinary_ids(self) -> Iterable[int]:
        """The ids that ordinary text can become."""
        return range(len(self.ranks))

    def _encode(self, text: str, *, first: bool) -> list[int]:
        r"""Ids of `text`.

        tiktoken's expression engine keeps a stack for `\s+(?!\S)` and ends in a Rust panic at
        about a million spaces, so long runs of blanks are cut out by the rule of the expression:
        a run without line ends that no line end follows is one token sequence without its last
        character, which belongs to what comes next. (Before the run a match always ends: no
        alternative has a blank after a visible character or after a line end.)
        """
        runs = _long_runs(text)
        if not runs:
            return self._encoding.encode_ordinary(text)
        ids: list[int] = []
        start = 0
        for begin, end in runs:
            # At the end of the text the whole run is one match, else all but its last character.
            stop = end if end == len(text) else end - 1
            ids += self._encoding.encode_ordinary(text[start:begin])
            ids += self._unsplit.encode_ordinary(text[begin:stop])
            start = stop
        return ids + self._encoding.encode_ordinary(text[start:])

    @cached_property
    def _tokens(self) -> list[bytes]:
        return list(self.ranks)

    @cached_property
    def _unsplit(self) -> "Encoding":
        """The same ranks without a split: the whole text is one piece. Made when first needed."""
        return _encoding(self.ranks, r"(?s:.+)")


def parse_ranks(data: bytes, *, where: str) -> dict[bytes, int]:
    """The tokens of a tiktoken file, in the order of their ranks 0, 1, 2, ...

    Raises: TokenizerError for a line that is not `base64 rank`, ranks that are not consecutive,
    a token that occurs twice, or a missing byte.
    Example: Llama 3 -> 128000 tokens.
    """
    fields = data.split()
    try:
        tokens = list(map(_from_base64, fields[::2]))
        numbers = list(map(int, fields[1::2]))
    except (binascii.Error, ValueError):
        raise TokenizerError(
            f"expected lines of `base64 rank`, {_bad_line(data)}", where=where
        ) from None
    if numbers != list(range(len(tokens))):
        raise TokenizerError("the ranks are not 0, 1, 2, ... in order", where=where)
    ranks = dict(zip(tokens, numbers, strict=True))
    if len(ranks) != len(tokens):
        raise TokenizerError(f"{len(tokens) - len(ranks)} tokens occur twice", where=where)
    check_bytes(ranks, where=where)
    return ranks


def check_bytes(ranks: Ranks, *, where: str) -> None:
    """Raise TokenizerError unless every one of the 256 bytes is a token: else text is lost."""
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing:
        raise TokenizerError(
            f"{len(missing)} of the 256 bytes are no tokens, first 0x{missing[0]:02X}", where=where
        )


def ranks_file(ranks: Ranks) -> bytes:
    """The bytes of a tiktoken file: one line `base64 rank` for each token, by rank.

    Example: Llama 3's vocabulary -> 2183982 bytes with sha256 82e9d319...
    """
    in_order = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(
        binascii.b2a_base64(token, newline=False) + b" %d\n" % rank for token, rank in in_order
    )


def _from_base64(text: bytes) -> bytes:
    return binascii.a2b_base64(text, strict_mode=True)


def _encoding(ranks: Ranks, pattern: str) -> "Encoding":
    from tiktoken import Encoding

    return Encoding("llamatool", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={})


def _long_runs(text: str) -> list[tuple[int, int]]:
    """(start, end) of the runs of at least LONG_RUN blanks that no line end follows.

    Every such run holds a character whose offset is a multiple of LONG_RUN / 2, so only these are
    looked at first: the test costs nothing on ordinary text.
    """
    stride = LONG_RUN // 2
    if len(text) < LONG_RUN or not _BLANK_RUN.search(text[::stride]):
        return []
    runs: list[tuple[int, int]] = []
    end = 0  # of the last run that was looked at
    for probe in range(0, len(text), stride):
        if probe < end or text[probe] not in _BLANKS:
            continue
        before = text[max(end, probe - stride) : probe]
        start = probe - len(before) + len(before.rstrip(_BLANKS))
        match = _BLANK_RUN.match(text, start)
        assert match is not None
        end = match.end()
        if end - start >= LONG_RUN and text[end : end + 1] not in ("\r", "\n"):
            runs.append((start, end))
    return runs


def _bad_line(data: bytes) -> str:
    for number, line in enumerate(data.splitlines(), 1):
        if not re.fullmatch(rb"[A-Za-z0-9+/=]+ \d{1,9}", line) and line:
            return f"found {line[:40]!r} in line {number}"
    return "found an incomplete line"
