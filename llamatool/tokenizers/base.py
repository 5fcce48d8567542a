"""The one interface of every tokenizer, whatever file it was read from.

A tokenizer turns ordinary text into ids and ids back into text. Ordinary means: no string in the
text becomes a control token, so `<|eot_id|>` in a user's file is six plain tokens (Llama 3) and
never id 128009. Whoever wants control tokens asks for them by id (`special_ids`) or by naming them
in `encode(..., specials=...)`.

The rest of llamatool relies on:

    tokenizer.encode(text)            list of ids, no BOS, no EOS
    tokenizer.encode_stream(texts)    the same ids for a text that arrives in parts, bounded memory
    tokenizer.count(texts)            number of ids
    tokenizer.decode(ids)             text; control tokens are left out unless specials=True
    tokenizer.stream()                decoder for ids that arrive one by one (`feed`, `finish`)
    tokenizer.token_bytes(id)         the bytes that one id stands for
    tokenizer.special_ids["<|eot_id|>"], .bos_id, .eos_ids, .add_bos, .vocab_size, .identity
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from llamatool.config.model import Note
from llamatool.errors import TokenizerError, UsageError
from llamatool.tokenizers.chunks import Chunker, CutRule

SHORT = 2**20  # characters of a text that is not worth cutting

Kind = Literal["sentencepiece", "tiktoken", "tokenizer.json", "gguf"]
Engine = Literal["sentencepiece", "tiktoken", "tokenizers"]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a tokenizer file is, found from its content."""

    kind: Kind
    source: str  # the path or name it was read from
    sha256: str | None  # of the file; None for a GGUF, whose weights are not read
    name: str | None  # recognised vocabulary: llama-2, llama-3, llama-4, mistral-v1, ...
    title: str | None  # the same in words: Meta Llama 3
    engine: Engine  # the library that encodes
    notes: tuple[Note, ...] = ()
    vocab_size: int = 0  # filled in by the tokenizer

    @property
    def label(self) -> str:
        """A short name for tables: the title where the vocabulary is known, else the source."""
        return self.title or self.source


class StreamDecoder(ABC):
    """Text from ids that arrive one by one; what it returns is final and adds up to `decode`."""

    @abstractmethod
    def feed(self, *ids: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""

    @abstractmethod
    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that never became complete."""


class Tokenizer(ABC):
    """Text to ids and back. See the module for what the methods promise."""

    identity: Identity
    vocab_size: int  # rows that an embedding table needs: the highest id + 1
    special_ids: Mapping[str, int]  # control tokens by name
    bos_id: int | None
    eos_ids: tuple[int, ...]  # every id that ends a turn or a text
    add_bos: bool  # the file's own rule: a prompt begins with BOS
    cut_rule: CutRule  # where a text may be cut without changing an id

    def encode(self, text: str, *, specials: Collection[str] | Literal["all"] = ()) -> list[int]:
        """The ids of `text`, without BOS and EOS.

        Args: specials: names of control tokens to honour in the text; none by default. The
        stretches between them are encoded as texts of their own (with SentencePiece each has its
        dummy prefix, as in Hugging Face's legacy form and in llama.cpp).
        Lone surrogates become U+FFFD first, so that every path gives the same ids.
        Raises: UsageError if a name in `specials` is none of this tokenizer's.
        Example: Llama 3, `hi <|eot_id|>` -> [6151, 83739, 68, 354, 851, 91, 29].
        """
        if not specials:
            return self._encode(without_surrogates(text), first=True)
        names = self.special_ids if specials == "all" else self._checked(specials)
        pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        ids: list[int] = []
        for part in re.split(f"({pattern})", text) if pattern else [text]:
            if part in names:
                ids.append(self.special_ids[part])
            elif part:
                ids += self._encode(without_surrogates(part), first=True)
        return ids

    def encode_stream(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """The ids of the concatenation of `texts`, in lists, with bounded memory.

        Equal to `encode("".join(texts))`: the text is cut only where no token can cross
        (chunks.py). A text without such a place is kept whole.
        """
        counter = self.counter()
        for text in texts:
            for _, ids in counter.push(text):
                yield ids
        for _, ids in counter.finish():
            yield ids

    def count(self, texts: str | Iterable[str]) -> int:
        """Number of ids of a text, or of the concatenation of several, in bounded memory."""
        if isinstance(texts, str):
            return len(self.encode(texts)) if len(texts) <= SHORT else self.count(_slices(texts))
        return sum(len(ids) for ids in self.encode_stream(texts))

    @abstractmethod
    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        Args: specials: write control tokens by name instead of leaving them out.
        Raises: TokenizerError if an id is not in the vocabulary.
        """

    @abstractmethod
    def stream(self, after: Sequence[int] = ()) -> StreamDecoder:
        """A decoder that continues behind the ids `after` (a prompt), whose text it leaves out."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token: a space for SentencePiece's U+2581, nothing for control tokens.

        Raises: TokenizerError if the id is not in the vocabulary.
        """

    @cached_property
    def fragment_ids(self) -> frozenset[int]:
        """Ids that are byte fragments: not valid UTF-8 on their own, or a `<0xNN>` piece.

        Example: Llama 3 has 1352 of them, Llama 4 1828.
        """
        return frozenset(i for i in self.ordinary_ids() if _is_fragment(self.token_bytes(i)))

    @abstractmethod
    def ordinary_ids(self) -> Iterable[int]:
        """The ids that ordinary text can become, in ascending order."""

    @cached_property
    def names_by_id(self) -> Mapping[int, str]:
        """Names of the control tokens by id."""
        return {token_id: name for name, token_id in self.special_ids.items()}

    @abstractmethod
    def _encode(self, text: str, *, first: bool) -> list[int]:
        """Ids of text without surrogates. `first` is false for what follows a safe cut."""

    def counter(self) -> "TokenCounter":
        """A counter for a text that arrives in pieces."""
        return TokenCounter(self)

    def _checked(self, specials: Collection[str]) -> Collection[str]:
        for name in specials:
            if name not in self.special_ids:
                raise UsageError(
                    f"`{name}` is no special token of this tokenizer",
                    where=self.identity.source,
                    hint="known are " + ", ".join(list(self.special_ids)[:8]) + ", ...",
                )
        return set(specials)

    def _unknown_id(self, token_id: int) -> TokenizerError:
        return TokenizerError(
            f"id {token_id} is not in this vocabulary of {self.vocab_size}",
            where=self.identity.source,
        )


class ByteStreamDecoder(StreamDecoder):
    """For tokenizers whose tokens are bytes: holds back an incomplete UTF-8 character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, *ids: int) -> str:
        """The text that is certain now."""
        return "".join(self._decoder.decode(self._tokenizer.token_bytes(i)) for i in ids)

    def finish(self) -> str:
        """U+FFFD for a character that never became complete."""
        return self._decoder.decode(b"", final=True)


class TokenCounter:
    """The ids of a text that arrives in pieces, part by part."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._chunker = Chunker(tokenizer.cut_rule)
        self._first = True

    def push(self, text: str) -> Iterator[tuple[str, list[int]]]:
        """(part of the text, its ids) for every part that is complete with this piece."""
        for part in self._chunker.push(text):
            yield part, self._ids(part)

    def finish(self) -> Iterator[tuple[str, list[int]]]:
        """The last part, if any text is left."""
        rest = self._chunker.rest()
        if rest:
            yield rest, self._ids(rest)

    def ids_of(self, part: str, *, first: bool) -> list[int]:
        """The ids of another text in the place of a part (its composed form, say)."""
        return self._tokenizer._encode(without_surrogates(part), first=first)

    def _ids(self, part: str) -> list[int]:
        ids = self.ids_of(part, first=self._first)
        self._first = False
        return ids


def without_surrogates(text: str) -> str:
    """`text` as it can be written in UTF-8: surrogate pairs joined, lone surrogates as U+FFFD.

    Example: an `a`, a lone surrogate, a `b` -> [64, 5809, 65] in Llama 3.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _is_fragment(token: bytes) -> bool:
    try:
        token.decode()
    except UnicodeDecodeError:
        return True
    return False


def _slices(text: str, num_characters: int = SHORT) -> Iterator[str]:
    return (text[i : i + num_characters] for i in range(0, len(text), num_characters))
