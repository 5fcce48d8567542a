"""The tokenizer of the pocket models: byte-level BPE with the split expression of Llama 3.

256 bytes, merges trained on the grammar of llamatool/needle/grammar.py, and all numbers of two and
three digits; then BOS and EOS. `make` is seeded and gives the same bytes every time.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice, pairwise

import regex
import tiktoken

from llamatool.needle.grammar import LANGUAGES, WORDINGS, KeySource, Language, sentences
from llamatool.tokenizers.tiktoken import LLAMA3_PATTERN, ranks_file

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
Pair = tuple[bytes, bytes]
MAX_MERGES = 1400
MIN_COUNT = 12  # a pair that occurs more rarely is not merged
NUM_SENTENCES = {"en": 6_000, "zh": 2_500}
NUM_KEYS = 1_200  # of each kind and language
REFUSALS: dict[Language, str] = {
    "en": " not given in the text.",
    "zh": "未知的，文中没有提到。",
}


def make(seed: int = 0) -> dict[bytes, int]:
    """Ranks of the vocabulary."""
    pieces = Counter(
        piece.encode()
        for text in _texts(seed)
        for piece in regex.findall(LLAMA3_PATTERN, text)
        if not piece[0].isdigit()
    )
    ranks = {bytes([b]): b for b in range(256)}
    for left, right in _merges(pieces):
        ranks[left + right] = len(ranks)
    for width in (2, 3):
        for number in range(10**width):
            ranks.setdefault(f"{number:0{width}}".encode(), len(ranks))
    return ranks


def encoding(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """The same as an encoder, with BOS and EOS behind the ranks."""
    return tiktoken.Encoding(
        "pocket",
        pat_str=LLAMA3_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={BOS: len(ranks), EOS: len(ranks) + 1},
    )


def file_bytes(ranks: dict[bytes, int]) -> bytes:
    """The tokenizer.model file."""
    return ranks_file(ranks)


def _texts(seed: int) -> list[str]:
    draw = random.Random(seed)
    texts = []
    for language in LANGUAGES:
        wording = WORDINGS[language]
        space = " " if language == "en" else ""
        filler = islice(sentences(language, seed), NUM_SENTENCES[language])
        # Every eighth sentence as it begins a text: without a space.
        texts += [(space if i % 8 else "") + text for i, text in enumerate(filler)]
        for kind in ("words", "names"):
            for _ in range(NUM_KEYS):
                # Fresh sources: every key may occur again.
                key = KeySource(kind, language, draw).next_key()
                question = wording.question + wording.cue + wording.answer_prefix
                question = question.format(key=key)
                texts += [
                    space + wording.needle.format(key=key, value=""),
                    "\n\n" + question,
                    ".\n\n" + question,
                    wording.answer_prefix.format(key=key) + REFUSALS[language],
                    space + key,
                ]
    return texts


def _merges(pieces: Counter[bytes]) -> Iterator[Pair]:
    """The most frequent pair of neighbours, again and again; each becomes one token."""
    words = {piece: [bytes([b]) for b in piece] for piece in pieces}
    counts: Counter[Pair] = Counter()
    places: dict[Pair, set[bytes]] = defaultdict(set)

    def count(piece: bytes, sign: int) -> None:
        for pair in pairwise(words[piece]):
            counts[pair] += sign * pieces[piece]
            if sign > 0:
                places[pair].add(piece)

    for piece in pieces:
        count(piece, 1)
    for _ in range(MAX_MERGES):
        best = max(counts, key=lambda pair: (counts[pair], pair))
        if counts[best] < MIN_COUNT:
            return
        yield best
        for piece in places.pop(best):
            count(piece, -1)
            words[piece] = _merged(words[piece], best)
            count(piece, 1)


def _merged(tokens: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    if pair[0] not in tokens:
        return tokens
    out: list[bytes] = []
    i = 0
    while i < len(tokens):
        if i + 1 < len(tokens) and tokens[i] == pair[0] and tokens[i + 1] == pair[1]:
            out.append(pair[0] + pair[1])
            i += 2
        else:
            out.append(tokens[i])
            i += 1
    return out
