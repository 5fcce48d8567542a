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
    models: Sequence[tuple[str, KvCache]],
    longest: int,
    *,
    batch_size: int = 1,
    num_images: int = 0,
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
            pair = _Pair(first, second, batch_size, num_images)
            for num_tokens, order in pair.changes(longest):
                smaller, larger = (
                    (first_name, second_name) if order < 0 else (second_name, first_name)
                )
                num_bytes = min(pair.num_bytes(num_tokens))
                found.append(Crossing(num_tokens, num_bytes, smaller, larger))
    return tuple(sorted(found, key=lambda crossing: crossing.num_tokens))


class _Pair:
    """Two caches under the same load, compared by length."""

    def __init__(self, first: KvCache, second: KvCache, batch_size: int, num_images: int) -> None:
        self._caches = (first, second)
        self._batch_size = batch_size
        self._num_images = num_images

    def num_bytes(self, num_tokens: int) -> tuple[int, int]:
        first, second = (
            cache.num_bytes(num_tokens, batch_size=self._batch_size, num_images=self._num_images)
            for cache in self._caches
        )
        return first, second

    def changes(self, longest: int) -> list[tuple[int, int]]:
        """Lengths at which the order becomes the opposite of what it was, and that order."""
        windows = {group.window for cache in self._caches for group in cache.groups}
        corners = sorted({1, longest, *(w for w in windows if w is not None and w < longest)})
        changes = []
        order = self._order(1)
        for left, right in pairwise(corners):
            after = self._order(right)
            if after and order and after != order:
                changes.append((self._first_with(after, left, right), after))
            order = after or order
        return changes

    def _first_with(self, order: int, low: int, high: int) -> int:
        while low + 1 < high:
            middle = (low + high) // 2
            if self._order(middle) == order:
                high = middle
            else:
                low = middle
        return high

    def _order(self, num_tokens: int) -> int:
        """-1 if the first cache is the smaller one, 1 if the second is, 0 if they are equal."""
        first, second = self.num_bytes(num_tokens)
        return (first > second) - (first < second)
