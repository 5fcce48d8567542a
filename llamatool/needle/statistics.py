"""What hits out of trials allow to say: intervals, effective length, paired comparison."""

import math
from collections.abc import Sequence

from llamatool.records import record

Z95 = 1.96  # of the normal distribution, for a two-sided interval of 95 %


def wilson(hits: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """The Wilson interval of a share, both ends; (0, 1) without trials.

    centre (p + z^2/2n) / (1 + z^2/n), half width z sqrt(p(1-p)/n + z^2/4n^2) / (1 + z^2/n)
    Example: 20 of 20 -> (0.84, 1.00); 66 of 66 -> (0.945, 1.00); 0 of 1 -> (0.00, 0.79).
    """
    if not 0 <= hits <= trials:
        raise ValueError(f"{hits} hits of {trials} trials")
    if not trials:
        return 0.0, 1.0
    share, square = hits / trials, z * z / trials
    centre = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / trials + square / (4 * trials)) / (1 + square)
    # Rounding must not push an end outside, nor 0 and n off the ends that the formula gives them.
    low = 0.0 if hits == 0 else max(0.0, centre - half)
    high = 1.0 if hits == trials else min(1.0, centre + half)
    return low, high


def trials_needed(share: float, confidence: float = 0.95) -> int:
    """Trials without a miss that show at least `share`, one-sided: ln(1 - confidence) / ln share.

    Example: 0.90 -> 29, 0.95 -> 59, 0.99 -> 299.
    """
    return math.ceil(math.log(1 - confidence) / math.log(share))


@record
class Share:
    """Hits out of trials at one length."""

    length: int
    hits: int
    trials: int


def effective_length(
    shares: Sequence[Share], threshold: float, *, lower_bound: bool = False
) -> int | None:
    """The largest length such that all lengths up to it reach `threshold`; None if the first fails.

    Args: lower_bound: compare the lower end of the interval instead of the share.
    Example: 2048 20/20, 4096 19/20, 8192 8/20 at 0.85 -> 4096.
    """
    reached = None
    for share in sorted(shares, key=lambda s: s.length):
        if not share.trials:
            break
        value = share.hits / share.trials
        if lower_bound:
            value = wilson(share.hits, share.trials)[0]
        if value < threshold:
            break
        reached = share.length
    return reached


@record
class Paired:
    """Two runs on the same trials: how often only one of them was right."""

    both: int
    only_first: int
    only_second: int
    neither: int
    p_value: float  # of no difference, exact and two-sided


def paired(first: Sequence[bool], second: Sequence[bool]) -> Paired:
    """The exact McNemar test of two runs on equal trials.

    p = min(1, 2 P(X <= min(b, c))), X binomial(b + c, 1/2), b and c the trials with one hit.
    Example: 5 trials that only the first has, none that only the second has -> p 0.0625.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} trials are no pairs")
    both = sum(a and b for a, b in zip(first, second, strict=True))
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    n, k = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    return Paired(
        both,
        only_first,
        only_second,
        len(first) - both - only_first - only_second,
        min(1.0, 2 * tail),
    )
