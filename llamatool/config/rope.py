"""Rotary position embedding in plain numbers: how fast each pair of a head's elements turns.

Pair i of a head turns by `position x inverse frequency i` radians. Every rope type changes only
the inverse frequencies (and, for two of them, the length of the rotated vectors). `inspect`
shows these numbers and the model turns the same list into a tensor, so there is one truth.
Standard library only, double precision.

Source of the formulas: transformers modeling_rope_utils.py; Meta's apply_scaling in
llama-models models/llama3/model.py; for the temperature modeling_llama4.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from llamatool.config.model import RopeConfig, TemperatureConfig
from llamatool.errors import ConfigError
from llamatool.records import record

Band = Literal["unchanged", "interpolated", "divided"]

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@record
class RopeBands:
    """How many of the head_dim / 2 frequencies the llama3 scaling treats in which way."""

    unchanged: int  # short waves: they turn many times within the original context
    interpolated: int  # between the two
    divided: int  # long waves: slowed down by the whole factor


def powers(theta: float, head_dim: int) -> Sequence[float]:
    """theta^(2i / head_dim) for each of the head_dim / 2 pairs.

    Example: theta 10000, head_dim 4 -> 1.0, 100.0.
    """
    # A float even for an integer theta: 1 / 10**400 would not be one.
    theta = float(theta)
    return tuple(theta ** (2 * i / head_dim) for i in range(head_dim // 2))


Powers = Callable[[float, int], Sequence[float]]


def inverse_frequencies(
    rope: RopeConfig,
    head_dim: int,
    *,
    max_position_embeddings: int | None = None,
    length: int | None = None,
    powers: Powers = powers,
) -> tuple[float, ...]:
    """Radians per position of each of the head_dim / 2 pairs.

    The default is theta^(-2i / head_dim); the scaled types change it.

    Args:
    length: tokens in sight, cached and new; only `dynamic` and `longrope` look at it, and
        without it they answer for their original context.
    powers: makes the powers that all begins with, in numbers whose arithmetic goes through to
        the end: the model's are of single precision.

    Raises: ConfigError for an unknown type, a missing value, or values without a result.
    Example: theta 500000, head_dim 128 -> 1.0, 0.8146172338565447, ...; with the scaling of
    Llama 3.1 number 32 is 0.0005248461609929547 instead of 0.001414213562373095.
    """
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"`head_dim` is {head_dim}, which rotary embeddings cannot pair up")
    if not (math.isfinite(rope.theta) and rope.theta > 0):
        raise ConfigError(f"`rope_theta` is {rope.theta}, expected a positive number")
    try:
        frequencies = _by_type(rope, head_dim, max_position_embeddings, length, powers)
    except (OverflowError, ZeroDivisionError):
        frequencies = ()
    if not frequencies or not all(map(math.isfinite, frequencies)):
        raise ConfigError(
            f"the rope parameters (type `{rope.type}`, theta {rope.theta})"
            " give no finite frequencies"
        )
    return frequencies


def _by_type(
    rope: RopeConfig,
    head_dim: int,
    max_position_embeddings: int | None,
    length: int | None,
    powers: Powers,
) -> tuple[float, ...]:
    # The formulas do their steps in the order of transformers, which single precision shows.
    match rope.type:
        case "default":
            return _inverse(powers(rope.theta, head_dim))
        case "linear":
            factor = _positive(rope, "factor")
            return tuple(f / factor for f in _inverse(powers(rope.theta, head_dim)))
        case "dynamic":
            theta = _dynamic_theta(rope, head_dim, max_position_embeddings, length)
            return _inverse(powers(theta, head_dim))
        case "yarn":
            return _yarn(rope, powers(rope.theta, head_dim), max_position_embeddings)
        case "longrope":
            return _longrope(rope, powers(rope.theta, head_dim), max_position_embeddings, length)
        case "llama3":
            scaling = _Llama3(rope, max_position_embeddings)
            return tuple(scaling.scaled(f) for f in _inverse(powers(rope.theta, head_dim)))
    raise ConfigError(
        f"rope type `{rope.type[:80]}` is unknown", hint=f"known are {', '.join(ROPE_TYPES)}"
    )


def attention_factor(rope: RopeConfig, *, max_position_embeddings: int | None = None) -> float:
    """What cosine and sine are multiplied by: 1 but for `yarn` and `longrope`.

    yarn: the given value, else the ratio of the two mscale terms, else 0.1 ln(factor) + 1;
    longrope: the given value, else sqrt(1 + ln(factor) / ln(original context)).

    Raises: ConfigError if a value that it needs is missing.
    Example: yarn, factor 4 -> 1.138629436111989; longrope, factor 32, original 4096 ->
    1.1902380714238083.
    """
    if rope.type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    original = _original_context(rope, max_position_embeddings)
    factor = _factor_or_ratio(rope, original, max_position_embeddings)
    if rope.type == "longrope":
        if factor <= 1:
            return 1.0
        if original < 2:
            raise ConfigError(f"`original_max_position_embeddings` is {original} in a longrope")
        return math.sqrt(1 + math.log(factor) / math.log(original))
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(factor, rope.mscale) / _mscale(factor, rope.mscale_all_dim)
    return _mscale(factor, 1.0)


def frequency_bands(
    rope: RopeConfig, head_dim: int, *, max_position_embeddings: int | None = None
) -> RopeBands | None:
    """How the llama3 scaling splits the frequencies; None for every other rope type.

    Example: Llama 3.1, head_dim 128 -> 29 unchanged, 6 interpolated, 29 divided; Llama 4 Scout,
    whose two limits are equal -> 35, 0, 29.
    """
    if rope.type != "llama3":
        return None
    scaling = _Llama3(rope, max_position_embeddings)
    bands = [scaling.band(f) for f in _inverse(powers(rope.theta, head_dim))]
    return RopeBands(bands.count("unchanged"), bands.count("interpolated"), bands.count("divided"))


def wavelengths(frequencies: tuple[float, ...]) -> tuple[float, ...]:
    """Positions after which each pair has turned once: 2 pi / inverse frequency.

    Example: inverse frequency 0.001 -> 6283.185307179586.
    """
    return tuple(math.tau / f if f else math.inf for f in frequencies)


def temperature_scale(temperature: TemperatureConfig, position: int) -> float:
    """What q is multiplied by at `position` (zero-based) in a layer without RoPE.

    1 + attn_scale ln(1 + floor((position + 1) / floor_scale))

    Example: attn_scale 0.1, floor_scale 8192: 1.0 at position 8190, 1.0693147180559945 at 8191.
    """
    steps = math.floor((position + 1) / temperature.floor_scale)
    return 1.0 + temperature.attn_scale * math.log(1 + steps)


def _inverse(powers: Sequence[float]) -> tuple[float, ...]:
    return tuple(1.0 / p for p in powers)


def _dynamic_theta(
    rope: RopeConfig, head_dim: int, max_position_embeddings: int | None, length: int | None
) -> float:
    """The base grows with the length, beyond the trained context only (NTK-aware scaling)."""
    factor = _positive(rope, "factor")
    context = _context(rope, max_position_embeddings)
    if head_dim == 2:
        raise ConfigError("rope type `dynamic` needs a `head_dim` above 2")
    stretch = factor * max(length or 0, context) / context - (factor - 1)
    theta: float = rope.theta * stretch ** (head_dim / (head_dim - 2))
    return theta


def _yarn(
    rope: RopeConfig, powers: Sequence[float], max_position_embeddings: int | None
) -> tuple[float, ...]:
    """Fast pairs stay, slow pairs are divided, with a linear ramp over the index between them."""
    original = _original_context(rope, max_position_embeddings)
    factor = _factor_or_ratio(rope, original, max_position_embeddings)
    head_dim = 2 * len(powers)

    def index_of(rotations: float) -> float:  # the pair that turns so often in the context
        return head_dim * math.log(original / (rotations * math.tau)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast or 32), index_of(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001

    one = powers[0]  # theta^0, in the arithmetic of the others

    def slowed(index: int, power: float) -> float:
        kept = 1 - min(max((one * index - low) / (high - low), 0.0), 1.0)
        return 1.0 / (factor * power) * (1 - kept) + 1.0 / power * kept

    return tuple(slowed(i, p) for i, p in enumerate(powers))


def _longrope(
    rope: RopeConfig,
    powers: Sequence[float],
    max_position_embeddings: int | None,
    length: int | None,
) -> tuple[float, ...]:
    """Every pair has a divisor of its own: one list within the original context, one beyond."""
    beyond = (length or 0) > _original_context(rope, max_position_embeddings)
    name = "long_factor" if beyond else "short_factor"
    divisors = rope.long_factor if beyond else rope.short_factor
    if divisors is None or len(divisors) != len(powers):
        found = "missing" if divisors is None else f"{len(divisors)} numbers"
        raise ConfigError(f"`{name}` of the longrope is {found}, expected {len(powers)} numbers")
    return tuple(1.0 / (divisor * p) for p, divisor in zip(powers, divisors, strict=True))


class _Llama3:
    """The scaling of Llama 3.1 and later: by the wavelength against the original context."""

    def __init__(self, rope: RopeConfig, max_position_embeddings: int | None) -> None:
        self.factor = _positive(rope, "factor")
        self.low = _positive(rope, "low_freq_factor")
        self.high = _positive(rope, "high_freq_factor")
        self.original = _original_context(rope, max_position_embeddings)

    def band(self, frequency: float) -> Band:
        wavelength = math.tau / frequency
        if wavelength > self.original / self.low:
            return "divided"
        # Scout sets low = high: nothing lies between, and the interpolation would be 0 / 0 there.
        if wavelength < self.original / self.high or self.high <= self.low:
            return "unchanged"
        return "interpolated"

    def scaled(self, frequency: float) -> float:
        match self.band(frequency):
            case "unchanged":
                return frequency
            case "divided":
                return frequency / self.factor
            case "interpolated":
                turns = self.original / (math.tau / frequency)  # in the original context
                smooth = (turns - self.low) / (self.high - self.low)
                return (1 - smooth) * frequency / self.factor + smooth * frequency


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _positive(
    rope: RopeConfig, name: Literal["factor", "low_freq_factor", "high_freq_factor"]
) -> float:
    value: float | None = getattr(rope, name)
    if value is None:
        raise ConfigError(f"the rope type `{rope.type}` needs `{name}`, which is missing")
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"`{name}` of the rope is {value}, expected a positive number")
    return float(value)


def _factor_or_ratio(rope: RopeConfig, original: int, max_position_embeddings: int | None) -> float:
    if rope.factor is None and max_position_embeddings is not None:
        return max_position_embeddings / original
    return _positive(rope, "factor")


def _context(rope: RopeConfig, max_position_embeddings: int | None) -> int:
    if max_position_embeddings is None or max_position_embeddings < 1:
        raise ConfigError(f"the rope type `{rope.type}` needs `max_position_embeddings`")
    return max_position_embeddings


def _original_context(rope: RopeConfig, max_position_embeddings: int | None) -> int:
    original = rope.original_max_position_embeddings
    if original is None:
        return _context(rope, max_position_embeddings)
    if original < 1:
        raise ConfigError(f"`original_max_position_embeddings` is {original}")
    return original
