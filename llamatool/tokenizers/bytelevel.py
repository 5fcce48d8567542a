"""Byte-level BPE in the spelling of a tokenizer.json: GPT-2's byte alphabet and the merge list.

tiktoken ranks and a tokenizer.json with a merge list say the same thing in two ways: the ranks
merge any two neighbours whose concatenation is a token, the lowest rank first; the merge list names
every such pair, in that order.
"""

from collections.abc import Iterator, Mapping

from llamatool.errors import TokenizerError
from llamatool.tokenizers.tiktoken import Ranks

Merge = tuple[str, str]


def _alphabet() -> list[str]:
    """The character that stands for each byte: itself where it is visible, else U+0100 and up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(shifted)) for byte in range(256)]


ALPHABET = _alphabet()
_TO_BYTE = {character: byte for byte, character in enumerate(ALPHABET)}
_TO_LATIN = str.maketrans({character: chr(byte) for byte, character in enumerate(ALPHABET)})
_FROM_LATIN = str.maketrans(dict(enumerate(ALPHABET)))


def to_text(token: bytes) -> str:
    """A token in GPT-2's alphabet. Example: b" the" -> `\u0120the`."""
    return token.decode("latin-1").translate(_FROM_LATIN)


def to_bytes(text: str) -> bytes | None:
    """The bytes of a token in GPT-2's alphabet, None if it has other characters.

    Example: `\u0120the` -> b" the".
    """
    if any(character not in _TO_BYTE for character in text):
        return None
    return text.translate(_TO_LATIN).encode("latin-1")


def ranks_from_vocabulary(vocabulary: Mapping[str, int], *, where: str) -> dict[bytes, int]:
    """The tokens of a byte-level vocabulary as tiktoken ranks, in the order of their ids.

    Raises: TokenizerError if the ids are not 0, 1, 2, ..., or a token is not in GPT-2's alphabet.
    """
    ranks: dict[bytes, int] = {}
    for expected, (text, token_id) in enumerate(
        sorted(vocabulary.items(), key=lambda item: item[1])
    ):
        token = to_bytes(text)
        if token is None:
            raise TokenizerError(
                f"token `{text[:40]}` is not in GPT-2's byte alphabet", where=where
            )
        if token_id != expected:
            raise TokenizerError(
                f"ids are not consecutive: {token_id} after {expected - 1}", where=where
            )
        ranks[token] = token_id
    return ranks


def derive_merges(ranks: Ranks) -> list[tuple[bytes, bytes]]:
    """The merge list that gives the same ids as the ranks.

    For each token, in the order of ranks, every split into two tokens, ordered by the rank of the
    left half, then of the right. Example: Llama 3 -> 280147 merges, the list of the published
    tokenizer.json in its order; Llama 4 -> 439802.
    """
    merges: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        merges += _splits(token, ranks)
    return merges


def _splits(token: bytes, ranks: Ranks) -> list[tuple[bytes, bytes]]:
    halves = [
        (token[:i], token[i:])
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    if len(halves) > 1:
        halves.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return halves


def merge_pairs(merges: object, *, where: str) -> Iterator[Merge]:
    """The pairs of a `merges` list, which files write as `"a b"` or as `["a", "b"]`.

    Raises: TokenizerError for an entry that is no pair.
    """
    if not isinstance(merges, list):
        raise TokenizerError("`merges` is no list", where=where)
    for entry in merges:
        match entry.split(" ") if isinstance(entry, str) else entry:
            case [str(left), str(right)]:
                yield left, right
            case _:
                raise TokenizerError(f"merge {str(entry)[:60]!r} is not a pair", where=where)
