"""Where the tensors of a checkpoint lie: the one form that every reader gives.

A table holds no tensor data. With `file`, `offset`, `shape` and `stride` a caller reads exactly
the bytes it needs.
"""

import math
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from llamatool.dtypes import DType
from llamatool.records import record

MAX_DIMENSIONS = 8  # torch and ggml allow more and fewer; no Llama tensor has above five
MAX_ELEMENTS = 2**62


@record
class TensorInfo:
    """One stored tensor."""

    name: str
    dtype: DType
    shape: tuple[int, ...]  # slowest dimension first
    file: Path
    offset: int  # bytes from the start of the file to the first element
    num_bytes: int  # bytes of the elements, whatever the stride
    stride: tuple[int, ...] | None = None  # elements; None: rows lie one after the other

    @property
    def num_elements(self) -> int:
        """Elements of the tensor; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other, last dimension fastest."""
        if self.stride is None:
            return True
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return self.num_elements == 0
            expected *= size
        return True


@record
class TensorTable:
    """The tensors of one file, or of the files of one Hugging Face folder, by name.

    A Meta folder gives one table per model-parallel rank, because each rank has a part of every
    tensor under the same name.
    """

    format: Literal["safetensors", "pth", "gguf"]
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str] = field(default_factory=dict)  # safetensors' `__metadata__`
    other: Mapping[str, str] = field(default_factory=dict)  # .pth: entries that are no tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def element_count(shape: tuple[int, ...]) -> int | None:
    """Elements of `shape`, or None if a size is negative or the product exceeds 2^62."""
    count = 1
    for size in shape:
        if size < 0:
            return None
        count *= size
        if count > MAX_ELEMENTS:
            return None
    return count
