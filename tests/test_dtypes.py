"""The table of element types against the libraries that define them."""

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from llamatool import dtypes


@pytest.mark.parametrize("kind", list(GGML_QUANT_SIZES), ids=lambda kind: kind.name)
def test_gguf_block_sizes(kind):
    found = dtypes.by_gguf(int(kind))
    assert found is not None
    assert (found.block_elements, found.block_bytes) == GGML_QUANT_SIZES[kind]
    if kind.name not in ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64"):
        assert found.name == kind.name.lower()


@pytest.mark.parametrize(
    "name",
    [
        "float64",
        "float32",
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
        "complex64",
    ],
)
def test_torch_sizes(name):
    found = dtypes.by_name(name)
    assert found is not None
    assert found.block_elements == 1
    assert found.block_bytes == getattr(torch, name).itemsize


def test_spellings():
    for spelling in ("bf16", "BF16", "bfloat16", "torch.bfloat16"):
        assert dtypes.by_name(spelling) is dtypes.by_safetensors("BF16")
    assert dtypes.by_storage("HalfStorage") is dtypes.by_name("fp16")
    assert dtypes.by_name("Q4_K") is dtypes.by_gguf(int(GGMLQuantizationType.Q4_K))
    assert dtypes.by_name("nonsense") is None


def test_bytes_of_blocks_are_not_bytes_of_elements():
    q8_0, q4_0 = dtypes.by_name("q8_0"), dtypes.by_name("q4_0")
    assert q8_0.num_bytes(1024) == 1088
    assert q4_0.num_bytes(1024) == 576
    assert q8_0.bits_per_element == 8.5
    assert q4_0.bits_per_element == 4.5
    assert q8_0.num_bytes(33) == 68
    assert dtypes.by_name("int4").num_bytes(3) == 2
