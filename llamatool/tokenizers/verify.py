"""Do two tokenizers give the same ids? And if not: where first, and why most likely."""

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from llamatool.tokenizers.base import Tokenizer
from llamatool.tokenizers.huggingface import HuggingFaceTokenizer
from llamatool.tokenizers.tiktoken import TiktokenTokenizer

NEAR = 12  # tokens shown on each side of the first difference


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two tokenizers part."""

    text: str  # name of the text
    index: int  # in the ids
    character: int  # offset in the text where the differing token begins
    left: tuple[int, ...]  # ids from there on, the first few
    right: tuple[int, ...]
    left_tokens: tuple[bytes, ...]
    right_tokens: tuple[bytes, ...]
    cause: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of two tokenizers on some texts."""

    left: str
    right: str
    num_texts: int
    num_characters: int
    num_tokens: tuple[int, int]
    num_different: int  # texts
    first: Difference | None
    remarks: tuple[str, ...] = ()  # differences that change no id of ordinary text

    @property
    def same(self) -> bool:
        """Whether every text has the same ids."""
        return self.first is None


def compare_ids(left: Tokenizer, right: Tokenizer, texts: Iterable[tuple[str, str]]) -> Verdict:
    """Both tokenizers on every (name, text).

    Example: Llama 3's tokenizer.model and its tokenizer.json -> the same, whatever the text.
    """
    num_texts = num_characters = num_left = num_right = num_different = 0
    first: Difference | None = None
    for name, text in texts:
        a, b = left.encode(text), right.encode(text)
        num_texts += 1
        num_characters += len(text)
        num_left += len(a)
        num_right += len(b)
        if a != b:
            num_different += 1
            first = first or _difference(left, right, name, text, a, b)
    return Verdict(
        left.identity.source,
        right.identity.source,
        num_texts,
        num_characters,
        (num_left, num_right),
        num_different,
        first,
        tuple(_remarks(left, right)),
    )


def _difference(
    left: Tokenizer, right: Tokenizer, name: str, text: str, a: list[int], b: list[int]
) -> Difference:
    index = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    near_a, near_b = tuple(a[index : index + NEAR]), tuple(b[index : index + NEAR])
    return Difference(
        name,
        index,
        len(left.decode(a[:index])),
        near_a,
        near_b,
        tuple(map(left.token_bytes, near_a)),
        tuple(map(right.token_bytes, near_b)),
        _cause(left, right, text, a, b),
    )


def _cause(left: Tokenizer, right: Tokenizer, text: str, a: list[int], b: list[int]) -> str:
    """The most likely cause, tried from the most specific to the least."""
    for one, other, x, y in ((left, right, a, b), (right, left, b, a)):
        if text[:1] == " " and other.encode(" " + text) == x and one.encode(text[1:]) == y:
            return (
                f"{other.identity.source} drops the first space of a text (a Metaspace "
                "pre-tokenizer with `prepend_scheme` first); the legacy normaliser keeps it"
            )
        if other.encode(" " + text) == x:
            return f"{one.identity.source} puts a space in front of a text (dummy prefix)"
        if any(note.code == "ignore_merges_false" for note in other.identity.notes):
            return f"`ignore_merges` is false in {other.identity.source}"
        if one.bos_id is not None and y == [one.bos_id, *x]:
            return f"{other.identity.source} adds BOS to ordinary text"
        if set(y) & set(getattr(other, "added_ids", {}).values()):
            return f"{other.identity.source} matches added tokens that are not special in the text"
    normalises = any(_composes(tokenizer) for tokenizer in (left, right))
    if normalises and not unicodedata.is_normalized("NFC", text):
        return "one of the two composes the text first (NFC), and the text is decomposed"
    clash = _vocabulary_clash(left, right, {*a, *b})
    if clash:
        return clash
    patterns = {t.pattern for t in (left, right) if isinstance(t, TiktokenTokenizer)}
    if len(patterns) == 2:
        return "same vocabulary, but different expressions split the text first"
    return "same vocabulary; the split of the text or the order of the merges differs"


def _vocabulary_clash(left: Tokenizer, right: Tokenizer, used: set[int]) -> str | None:
    shared = min(left.vocab_size, right.vocab_size)
    for token_id in sorted(i for i in used if i < shared):
        x, y = left.token_bytes(token_id), right.token_bytes(token_id)
        if x != y:
            return f"different vocabularies: id {token_id} is {x!r} in one and {y!r} in the other"
    return None


def _composes(tokenizer: Tokenizer) -> bool:
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return False
    return tokenizer.content.get("normalizer") == {"type": "NFC"}


def _remarks(left: Tokenizer, right: Tokenizer) -> Iterable[str]:
    if left.vocab_size != right.vocab_size:
        yield f"vocabulary sizes: {left.vocab_size:,} and {right.vocab_size:,}"
    if left.add_bos != right.add_bos:
        with_bos = left if left.add_bos else right
        yield f"only {with_bos.identity.source} puts BOS in front of a prompt by itself"
    ids = left.names_by_id.keys() & right.names_by_id.keys()
    renamed = [i for i in sorted(ids) if left.names_by_id[i] != right.names_by_id[i]]
    if renamed:
        i = renamed[0]
        yield (
            f"{len(renamed)} control tokens have other names, first id {i}: "
            f"{left.names_by_id[i]} and {right.names_by_id[i]}"
        )


# Strings on which wrong conversions differ; each is a case that went wrong in public.
HARD_STRINGS = (
    "", " ", "  ", "\n", "\n\n", "\t", " Hello", "  Hello", "Hello ", "Hello\n", "\nHello",
    "This is \U0001f999.cpp", "3333+777", "7777+3333", " Vi\u1ec7t", ".:.:", "' : 'search",
    "for 'manual'", " ...", "hello !", "I'm we'll YOU'RE", "a\r\nb\r\n", "x" * 200, " " * 300,
    "//\n//", "\u2581\u2581", "e\u0301", "\ufeffBOM", "nul\x00nul", "\U0001f468\u200d\U0001f469",
    "<s>[INST]", "abs</s>USER", "hi <|eot_id|>", "<|begin_of_text|>", "1234567890" * 3,
    "\u8bf7\u4f60\u57fa\u4e8e\u4ee5\u4e0b", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
)  # fmt: skip
