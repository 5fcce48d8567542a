"""Element types changed by bit operations and numpy, without torch.

Arrays hold raw elements as unsigned integers, because numpy has no bfloat16. Narrowing rounds to
the nearest value, ties to even; a NaN stays one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamatool.dtypes import DType
from llamatool.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Raw = NDArray[np.unsignedinteger[Any]]


@dataclass(slots=True)
class CastCount:
    """What a change of type did to the values."""

    num_elements: int = 0
    num_rounded: int = 0  # changed at all, the following two included
    num_overflowed: int = 0  # finite, became infinite
    num_underflowed: int = 0  # not zero, became zero

    def add(self, other: "CastCount") -> None:
        """Adds another count to this one."""
        self.num_elements += other.num_elements
        self.num_rounded += other.num_rounded
        self.num_overflowed += other.num_overflowed
        self.num_underflowed += other.num_underflowed


def raw_type(dtype: DType) -> str:
    """The unsigned integer of numpy that holds an element of a plain type, such as `u2`."""
    return f"u{dtype.block_bytes}"


def to_float(raw: "Raw", dtype: DType) -> "NDArray[np.floating[Any]]":
    """The values as float32, or as float64 where they are stored so."""
    import numpy as np

    if dtype.name == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype.name == "float16":
        return raw.view(np.float16).astype(np.float32)
    if dtype.name == "float32":
        return raw.view(np.float32)
    if dtype.name == "float64":
        return raw.view(np.float64)
    raise UnsupportedError(f"elements of type {dtype.name} have no plain value")


def cast(raw: "Raw", source: DType, target: DType) -> "tuple[Raw, CastCount]":
    """The elements in another type, and what that did to them.

    Example: 1.00390625 (float32) to bfloat16 -> 1.0: halfway between two, the even one.
    """
    import numpy as np

    if source == target:
        return raw, CastCount(raw.size)
    with np.errstate(over="ignore", invalid="ignore"):
        values = to_float(raw, source)
        result = _from_float(values, target)
        back = to_float(result, target)
        same = (back == values) | (np.isnan(back) & np.isnan(values))
        count = CastCount(
            raw.size,
            int(raw.size - np.count_nonzero(same)),
            int(np.count_nonzero(np.isinf(back) & np.isfinite(values))),
            int(np.count_nonzero((back == 0) & (values != 0))),
        )
    return result, count


def _from_float(values: "NDArray[np.floating[Any]]", target: DType) -> "Raw":
    import numpy as np

    if target.name == "float64":
        return values.astype(np.float64).view(np.uint64)
    if target.name == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32)
    if target.name == "float32":
        return bits
    if target.name != "bfloat16":
        raise UnsupportedError(f"llamatool does not write {target.name}")
    # Half of the last kept bit, less one unless that bit is set: ties go to the even neighbour.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).astype(np.uint16)
