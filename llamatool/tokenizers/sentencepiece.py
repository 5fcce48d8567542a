"""SentencePiece models (Llama 1 and 2, Mistral, ...), encoded by the sentencepiece library.

The library slows down with the length of a text: 3 MB of English in one call run at a third of
the speed of short ones. Here the text is cut where no piece can cross (chunks.py) and each word is
encoded once. That is exact for byte-pair models whose pieces have no space after another
character and no newline; every model is checked for it when it is loaded, and one that fails is
given to the library whole.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from llamatool.errors import TokenizerError
from llamatool.tokenizers.base import Identity, StreamDecoder, Tokenizer
from llamatool.tokenizers.chunks import CutRule, cut_points
from llamatool.tokenizers.modelproto import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    WITHOUT_DUMMY_PREFIX,
    SentencePieceModel,
)

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

SPACE = "\u2581"

SHORT = 16_384  # characters: a text up to this length goes to the library as it is
CHUNK = 256  # characters of a part where words repeat too little to remember them
BLOCK = 24_576  # characters whose words are looked up together
LONG = 4 * BLOCK  # a text from this length on repeats enough words to begin to remember them
ENOUGH_WORDS = 4_096  # if so many are remembered and the next are still new, they do not repeat
CHARACTERS_OF_A_WORD = 24  # more than this on average: a script without spaces, or no prose
LONGEST_WORD = 64  # characters: longer ones are hardly seen twice
FEW = 128  # texts that are encoded one by one rather than together
MAX_REMEMBERED = 200_000  # words; about 60 MB at most
MISSES_TO_STOP = 0.4  # share of new words in a block from which on remembering does not pay
BLOCKS_TO_SKIP = 16


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with its dummy prefix and byte fallback."""

    def __init__(self, data: bytes, model: SentencePieceModel, identity: Identity) -> None:
        self.data = data
        self.model = model
        self.vocab_size = len(model.pieces)
        self.identity = replace(identity, vocab_size=self.vocab_size)
        self.special_ids = {
            piece: i
            for i, (piece, kind) in enumerate(zip(model.pieces, model.types, strict=True))
            if kind in (CONTROL, UNKNOWN)
        }
        self.bos_id = model.bos_id if 0 <= model.bos_id < self.vocab_size else None
        has_eos = 0 <= model.eos_id < self.vocab_size
        self.eos_ids: tuple[int, ...] = (model.eos_id,) if has_eos else ()
        self.add_bos = self.bos_id is not None
        self.cut_rule = CutRule.SPACES_AND_LINES if can_be_cut(model) else CutRule.NEVER
        self._whole = _processor(data, identity.source)
        self._bare = (
            self._whole
            if not model.add_dummy_prefix
            else _processor(data + WITHOUT_DUMMY_PREFIX, identity.source)
        )
        self._words: dict[str, list[int]] = {}
        self._skip_blocks = 0

    def encode_continuation(self, text: str) -> list[int]:
        """The ids of text that continues a text: without the dummy prefix.

        Example: Llama 2, `Hello` -> [10994], where `encode` gives [15043].
        """
        return self._encode(text, first=False)

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """The text of `ids`; the space of the dummy prefix is dropped, as the library does."""
        decoder = _PieceStreamDecoder(self, specials=specials)
        return decoder.feed(*ids) + decoder.finish()

    def stream(self, after: Sequence[int] = ()) -> StreamDecoder:
        """A decoder of ids that arrive one by one, behind the ids `after`."""
        decoder = _PieceStreamDecoder(self)
        decoder.feed(*after)
        return decoder

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one piece, a space for U+2581; nothing for a control piece."""
        if not 0 <= token_id < self.vocab_size:
            raise self._unknown_id(token_id)
        piece, kind = self.model.pieces[token_id], self.model.types[token_id]
        if kind == BYTE:
            return bytes([int(piece[3:5], 16)])
        if kind == CONTROL:
            return b""
        if kind == UNKNOWN:
            return b" \xe2\x81\x87 "
        return piece.replace(SPACE, " ").encode()

    def ordinary_ids(self) -> Iterable[int]:
        """The ids that ordinary text can become."""
        ordinary = (NORMAL, USER_DEFINED, BYTE)
        return (i for i, kind in enumerate(self.model.types) if kind in ordinary)

    @cached_property
    def fragment_ids(self) -> frozenset[int]:
        """The byte pieces `<0xNN>`, the newline of Llama 2 (`<0x0A>`) among them."""
        return frozenset(i for i, kind in enumerate(self.model.types) if kind == BYTE)

    def _encode(self, text: str, *, first: bool) -> list[int]:
        prefixed = first and self.model.add_dummy_prefix
        if self.cut_rule is CutRule.NEVER or len(text) <= SHORT:
            ids: list[int] = (self._whole if prefixed else self._bare).encode(text)
            return ids
        # The dummy prefix is one space in front of a text that is not empty.
        return self._encode_cut(" " + text if prefixed else text)

    def _encode_cut(self, text: str) -> list[int]:
        """Ids of `text`, which brings its own prefix, word by word or part by part."""
        ids: list[int] = []
        pattern = self.cut_rule.pattern
        assert pattern is not None
        worth_learning = len(text) > LONG
        for start, end in cut_points(text, self.cut_rule, BLOCK):
            block = text[start:end]
            if _has_few_words(block):
                ids += self._bare.encode(block)
            elif self._skip_blocks:
                self._skip_blocks -= 1
                self._add_parts(block, ids)
            else:
                self._add_words(block, pattern.split(block), ids, worth_learning)
        return ids

    def _add_parts(self, block: str, ids: list[int]) -> None:
        parts = [block[start:end] for start, end in cut_points(block, self.cut_rule, CHUNK)]
        for part in self._encode_all(parts):
            ids += part

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        # A call with a list starts a thread, which takes as long as some hundred single calls.
        if len(texts) < FEW:
            return [self._bare.encode(text) for text in texts]
        together: list[list[int]] = self._bare.encode(texts, num_threads=1)
        return together

    def _add_words(
        self, block: str, words: list[str], ids: list[int], worth_learning: bool
    ) -> None:
        known = self._words
        new = {word for word in words if word not in known}
        if len(new) > MISSES_TO_STOP * len(words):
            # Texts that repeat little (identifiers, invented words) are faster in longer parts;
            # in a long text look again after some blocks.
            if len(known) > ENOUGH_WORDS:
                self._skip_blocks = BLOCKS_TO_SKIP if worth_learning else 0
                worth_learning = False
            if not worth_learning:
                self._add_parts(block, ids)
                return
        if len(known) > MAX_REMEMBERED:
            known.clear()
            new = set(words)
        order = list(new)
        fresh = dict(zip(order, self._encode_all(order), strict=True))
        known.update((word, ids) for word, ids in fresh.items() if len(word) <= LONGEST_WORD)
        for word in words:
            ids += known.get(word) or fresh[word]


class _PieceStreamDecoder(StreamDecoder):
    """The library's own rules of decoding, one piece at a time.

    A run of byte pieces is one stretch of UTF-8; every byte of it that is part of no character
    becomes U+FFFD. The first piece with text loses the space of the dummy prefix, once.
    """

    def __init__(self, tokenizer: SentencePieceTokenizer, *, specials: bool = False) -> None:
        self._tokenizer = tokenizer
        self._specials = specials
        model = tokenizer.model
        self._at_start = model.add_dummy_prefix or model.remove_extra_whitespaces
        self._strips_all = model.remove_extra_whitespaces
        self._bytes = b""

    def feed(self, *ids: int) -> str:
        return "".join(map(self._feed, ids))

    def finish(self) -> str:
        return self._take_bytes(final=True)

    def _feed(self, token_id: int) -> str:
        model = self._tokenizer.model
        token = self._tokenizer.token_bytes(token_id)
        kind = model.types[token_id]
        if kind == BYTE:
            self._bytes += token
            return self._take_bytes(final=False)
        text = self._take_bytes(final=True)
        if kind == CONTROL:
            return text + (model.pieces[token_id] if self._specials else "")
        piece = token.decode()
        if self._at_start and kind != UNKNOWN:
            if piece.startswith(" "):
                piece = piece[1:]
                self._at_start = self._strips_all
            self._at_start = self._at_start and not piece
        else:
            self._at_start = False
        return text + piece

    def _take_bytes(self, *, final: bool) -> str:
        text = ""
        while self._bytes:
            length = _utf8_length(self._bytes[0])
            if length > len(self._bytes) and not final and _can_grow(self._bytes):
                break
            try:
                character = self._bytes[:length].decode()
            except UnicodeDecodeError:
                character, length = "\ufffd", 1
            text += character
            self._bytes = self._bytes[length:]
        if text:
            self._at_start = False
        return text


def can_be_cut(model: SentencePieceModel) -> bool:
    """Whether no piece of the model can cross a safe cut of chunks.py.

    Example: Llama 2 and Mistral: yes. A model with a piece `a\u2581b`, a newline piece of more than
    one character, a normaliser that changes text, or Unigram scores: no.
    """
    if model.model_type != BPE or not model.identity or model.remove_extra_whitespaces:
        return False
    if model.treat_whitespace_as_suffix or not model.escape_whitespaces:
        return False
    for piece, kind in zip(model.pieces, model.types, strict=True):
        if kind not in (NORMAL, USER_DEFINED):
            continue
        if "\n" in piece or " " in piece or SPACE in piece.lstrip(SPACE):
            return False
    return True


def _has_few_words(text: str) -> bool:
    """Whether looking for words takes longer than it can save, as in Chinese."""
    return (text.count(" ") + text.count("\n")) * CHARACTERS_OF_A_WORD < len(text)


def _processor(data: bytes, where: str) -> "SentencePieceProcessor":
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_proto=data)
    except (RuntimeError, OSError) as error:
        raise TokenizerError(f"sentencepiece refuses the model: {error}", where=where) from None


def _utf8_length(first: int) -> int:
    if first < 0x80:
        return 1
    if 0xC2 <= first < 0xE0:
        return 2
    if 0xE0 <= first < 0xF0:
        return 3
    return 4 if 0xF0 <= first < 0xF5 else 1


def _can_grow(data: bytes) -> bool:
    """Whether `data` is the beginning of a UTF-8 character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False
