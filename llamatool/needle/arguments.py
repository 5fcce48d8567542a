"""What the user writes for lengths, depths and budgets, as values."""

import math
import re
from typing import Literal

from llamatool.errors import UsageError
from llamatool.needle.session import Budget
from llamatool.units import TOKENS_HELP, parse_tokens

MAX_POINTS = 200  # lengths or depths of one test
Scale = Literal["linear", "sigmoid"]

_RANGE = re.compile(r"([^:]+):([^:]+):([x+])([^:]+)")
_TIME = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)", re.ASCII)
_FLOPS = re.compile(r"(\d+(?:\.\d+)?)([GTPE])F", re.ASCII)
_POWERS = {"G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths in tokens: one, a list, or a range by factors or steps.

    Raises: UsageError.
    Example: `1k,4k` -> 1024, 4096; `1k:8k:x2` -> 1024, 2048, 4096, 8192; `8k:24k:+8k` -> 8192,
    16384, 24576.
    """
    lengths: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            lengths.append(parse_tokens(part))
        else:
            lengths += _range(part, *match.groups())
        if len(lengths) > MAX_POINTS:
            raise UsageError(f"`{text[:80]}` names more than {MAX_POINTS} lengths")
    if min(lengths) < 1:
        raise UsageError(f"`{text[:80]}` names a length of 0 tokens")
    return tuple(sorted(set(lengths)))


def _range(text: str, first: str, last: str, kind: str, step: str) -> list[int]:
    low, high = parse_tokens(first), parse_tokens(last)
    by = parse_tokens(step)
    if low < 1 or high < low or by < (2 if kind == "x" else 1):
        raise UsageError(
            f"`{text[:80]}` is no range of lengths",
            hint=f"like 1k:64k:x2 or 8k:128k:+8k ({TOKENS_HELP})",
        )
    lengths: list[int] = []
    while low <= high and len(lengths) <= MAX_POINTS:
        lengths.append(low)
        low = low * by if kind == "x" else low + by
    return lengths


def parse_depths(text: str, scale: Scale = "linear") -> tuple[float, ...]:
    """Depths from 0 to 1: a number of them, or a list in percent.

    Args: scale: of a number of depths; sigmoid puts more of them near both ends.
    Raises: UsageError.
    Example: `3` -> 0, 0.5, 1; `0,25,100` -> 0, 0.25, 1; `5` on the sigmoid scale -> 0, 0.0701,
    0.5, 0.9299, 1.
    """
    parts = text.split(",")
    try:
        values = [float(part) for part in parts]
    except ValueError:
        raise _no_depths(text) from None
    if len(parts) > 1:
        if not all(0 <= value <= 100 for value in values) or len(parts) > MAX_POINTS:
            raise _no_depths(text)
        return tuple(sorted({round(value / 100, 6) for value in values}))
    count = values[0]
    if not 1 <= count <= MAX_POINTS or count != int(count):
        raise _no_depths(text)
    if count == 1:
        return (0.5,)
    even = [i / (count - 1) for i in range(int(count))]
    if scale == "sigmoid":
        even = [_sigmoid(depth) for depth in even]
    return tuple(round(depth, 4) for depth in even)


def parse_budget(text: str) -> Budget:
    """A time (`90s`, `10m`, `1h`) or an amount of work (`2PF` is 2e15 FLOPs).

    Raises: UsageError.
    """
    match = _TIME.fullmatch(text.strip())
    if match is not None:
        return Budget(seconds=float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]])
    match = _FLOPS.fullmatch(text.strip())
    if match is not None:
        return Budget(flops=float(match[1]) * _POWERS[match[2]])
    raise UsageError(f"`{text[:80]}` is no budget", hint="a time like 10m, or work like 2PF")


def _sigmoid(depth: float) -> float:
    """The logistic curve between 0 and 1, with both ends on it."""

    def logistic(x: float) -> float:
        return 1 / (1 + math.exp(-10 * (x - 0.5)))

    return (logistic(depth) - logistic(0)) / (logistic(1) - logistic(0))


def _no_depths(text: str) -> UsageError:
    return UsageError(
        f"`{text[:80]}` names no depths",
        hint="a number of them (11), or a list in percent (0,25,50,75,100)",
    )
