"""One table of element types: their names in config.json, safetensors, GGUF and .pth, and sizes.

A block format (GGUF's quantised types) stores `block_elements` values in `block_bytes` bytes; a
plain type is a block of one element. Keeping both numbers apart is what avoids the 32-fold
mistake of taking bytes per block for bytes per element.
"""

from typing import NamedTuple


class DType(NamedTuple):
    """An element type and its size."""

    name: str  # as config.json and torch spell it; block formats in GGUF's spelling, lower case
    block_elements: int  # values in one block
    block_bytes: int  # bytes of one block
    safetensors: str | None = None  # its name in a safetensors header
    gguf: int | None = None  # its number in a GGUF tensor table
    storage: str | None = None  # its storage class in a .pth pickle

    @property
    def bits_per_element(self) -> float:
        """Bits that one element takes, scales included: 16 for bfloat16, 4.5 for q4_0."""
        return 8 * self.block_bytes / self.block_elements

    def num_bytes(self, num_elements: int) -> int:
        """Bytes of `num_elements` elements; a started block counts whole.

        Example: q8_0, 1024 elements -> 1088 (34 bytes per 32).
        """
        return -(-num_elements // self.block_elements) * self.block_bytes


# Sources: safetensors' Dtype enum; gguf-py GGML_QUANT_SIZES and GGMLQuantizationType; torch's
# storage classes as torch.save writes them.
_TABLE = (
    DType("float64", 1, 8, "F64", 28, "DoubleStorage"),
    DType("float32", 1, 4, "F32", 0, "FloatStorage"),
    DType("bfloat16", 1, 2, "BF16", 30, "BFloat16Storage"),
    DType("float16", 1, 2, "F16", 1, "HalfStorage"),
    DType("float8_e4m3fn", 1, 1, "F8_E4M3", None, "Float8_e4m3fnStorage"),
    DType("float8_e5m2", 1, 1, "F8_E5M2", None, "Float8_e5m2Storage"),
    DType("float8_e8m0fnu", 1, 1, "F8_E8M0"),
    DType("float8_e4m3fnuz", 1, 1, "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", 1, 1, "F8_E5M2FNUZ"),
    DType("int64", 1, 8, "I64", 27, "LongStorage"),
    DType("int32", 1, 4, "I32", 26, "IntStorage"),
    DType("int16", 1, 2, "I16", 25, "ShortStorage"),
    DType("int8", 1, 1, "I8", 24, "CharStorage"),
    DType("uint64", 1, 8, "U64"),
    DType("uint32", 1, 4, "U32"),
    DType("uint16", 1, 2, "U16"),
    DType("uint8", 1, 1, "U8", None, "ByteStorage"),
    DType("bool", 1, 1, "BOOL", None, "BoolStorage"),
    DType("complex64", 1, 8, "C64", None, "ComplexFloatStorage"),
    DType("int4", 2, 1),
    DType("float4_e2m1", 2, 1, "F4"),
    DType("float6_e2m3", 4, 3, "F6_E2M3"),
    DType("float6_e3m2", 4, 3, "F6_E3M2"),
    DType("q4_0", 32, 18, None, 2),
    DType("q4_1", 32, 20, None, 3),
    DType("q5_0", 32, 22, None, 6),
    DType("q5_1", 32, 24, None, 7),
    DType("q8_0", 32, 34, None, 8),
    DType("q8_1", 32, 40, None, 9),
    DType("q2_k", 256, 84, None, 10),
    DType("q3_k", 256, 110, None, 11),
    DType("q4_k", 256, 144, None, 12),
    DType("q5_k", 256, 176, None, 13),
    DType("q6_k", 256, 210, None, 14),
    DType("q8_k", 256, 292, None, 15),
    DType("iq2_xxs", 256, 66, None, 16),
    DType("iq2_xs", 256, 74, None, 17),
    DType("iq3_xxs", 256, 98, None, 18),
    DType("iq1_s", 256, 50, None, 19),
    DType("iq4_nl", 32, 18, None, 20),
    DType("iq3_s", 256, 110, None, 21),
    DType("iq2_s", 256, 82, None, 22),
    DType("iq4_xs", 256, 136, None, 23),
    DType("iq1_m", 256, 56, None, 29),
    DType("tq1_0", 256, 54, None, 34),
    DType("tq2_0", 256, 66, None, 35),
    DType("mxfp4", 32, 17, None, 39),
    DType("nvfp4", 64, 36, None, 40),
    DType("q1_0", 128, 18, None, 41),
)

_ALIASES = {
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "float8": "float8_e4m3fn",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "double": "float64",
    "f64": "float64",
    "i8": "int8",
    "i4": "int4",
}

_BY_NAME = {dtype.name: dtype for dtype in _TABLE}
_BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in _TABLE if dtype.safetensors}
_BY_GGUF = {dtype.gguf: dtype for dtype in _TABLE if dtype.gguf is not None}
_BY_STORAGE = {dtype.storage: dtype for dtype in _TABLE if dtype.storage}


def by_name(name: str) -> DType | None:
    """The type that `name` means in any common spelling (`bf16`, `torch.bfloat16`, `Q8_0`)."""
    key = name.lower().removeprefix("torch.")
    return _BY_NAME.get(_ALIASES.get(key, key))


def by_safetensors(name: str) -> DType | None:
    """The type of a safetensors header's `dtype` value."""
    return _BY_SAFETENSORS.get(name)


def by_gguf(number: int) -> DType | None:
    """The type of a GGUF tensor table's type number."""
    return _BY_GGUF.get(number)


def by_storage(name: str) -> DType | None:
    """The type of a torch storage class named in a .pth pickle."""
    return _BY_STORAGE.get(name)
