"""The cache as a curve over the context length, and where two models' curves cross."""

from collections.abc import Sequence
from itertools import pairwise

from llamatool.records import record
from llamatool.sizing.kv_cache import KvCache

FIRST_TOKENS = 4096


@record
class Crossing:
    """The first length at which the order of two caches changes."""

    num_tokens: int  # from here on `smaller` has the smaller cache
    num_bytes: int  # of the smaller cache there
    smaller: str
    larger: str


def curve_lengths(longest: int, *, steps: int = 1) -> tuple[int, ...]:
    """Context lengths from 4k to `longest` tokens: the powers of two, and `longest` itself.

    Args: steps: lengths for each power of two, equally far apart in ratio.
    Example: 131072 -> 4096, 8192, 16384, 32768, 65536, 131072.
    """
    lengths = []
    number = 0
    while (num_tokens := round(FIRST_TOKENS * 2 ** (number / steps))) < longest:
        lengths.append(num_tokens)
        number += 1
    return (*lengths, longest)


def crossings(
    models: Sequence[tuple[str, KvCache]], longest: int, *, batch_size: int = 1
) -> tuple[Crossing, ...]:
    """Every crossing of two of the capped curves up to `longest` tokens, by length.

    Between the windows of two models both curves are straight, so a change of order inside such
    a stretch is found by bisection.

    Example: Llama 4 Scout and Llama 3.1 8B, bfloat16 -> 14746 tokens: Scout's is the larger one
    up to 14745.
    """
    found = []
    for index, (first_name, first) in enumerate(models):
        for second_name, second in models[index + 1 :]:
            for num_tokens in _changes(first, second, longest):
                first_bytes = first.num_bytes(num_tokens, batch_size=batch_size)
                second_bytes = second.num_bytes(num_tokens, batch_size=batch_size)
                names = (first_name, second_name)
                smaller, larger = names if first_bytes < second_bytes else names[::-1]
                found.append(Crossing(num_tokens, min(first_bytes, second_bytes), smaller, larger))
    return tuple(sorted(found, key=lambda crossing: crossing.num_tokens))


def _changes(first: KvCache, second: KvCache, longest: int) -> list[int]:
    """Lengths at which the sign of the difference becomes the opposite of what it was."""
    windows = {group.window for cache in (first, second) for group in cache.groups}
    corners = sorted({1, longest, *(w for w in windows if w is not None and w < longest)})
    changes = []
    order = _order(first, second, 1)
    for left, right in pairwise(corners):
        after = _order(first, second, right)
        if after and order and after != order:
            changes.append(_first_with(first, second, left, right, after))
        order = after or order
    return changes


def _first_with(first: KvCache, second: KvCache, low: int, high: int, order: int) -> int:
    while low + 1 < high:
        middle = (low + high) // 2
        if _order(first, second, middle) == order:
            high = middle
        else:
            low = middle
    return high


def _order(first: KvCache, second: KvCache, num_tokens: int) -> int:
    difference = first.num_bytes(num_tokens) - second.num_bytes(num_tokens)
    return (difference > 0) - (difference < 0)
