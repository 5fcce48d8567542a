"""Stored bytes to tensors: files mapped into memory, block formats dequantised.

A mapped tensor costs no memory of its own: the system reads its pages when they are touched and
may drop them again.
"""

import math
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llamatool.checkpoint import files
from llamatool.checkpoint.tensors import TensorInfo
from llamatool.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

FLOATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ROWS_ELEMENTS = 2**22  # elements that are dequantised at a time


class Storage:
    """The files of a checkpoint, each mapped when its first tensor is asked for."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def read(
        self,
        info: TensorInfo,
        dtype: torch.dtype,
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """The tensor on the CPU: mapped and as it is stored, or unpacked to `dtype` from blocks.

        Args: rows: the first of the rows that are wanted, and the one after the last. columns: of
        the last axis, likewise. Of a block format, only blocks are unpacked that hold some of them.

        Raises: UnsupportedError for element types that hold no plain numbers; CheckpointError if
        the file became shorter.
        """
        stored = FLOATS.get(info.dtype.name)
        if stored is not None:
            tensor = self._mapped(info, stored)[slice(*rows) if rows else slice(None)]
            return tensor if columns is None else tensor[..., slice(*columns)]
        if info.dtype.block_elements == 1 or info.dtype.gguf is None:
            raise UnsupportedError(
                f"tensor `{info.name[:200]}` is stored as {info.dtype.name}",
                where=str(info.file),
                hint="take the bfloat16 release of this model",
            )
        return self._dequantised(info, dtype, rows, columns)

    def _mapped(self, info: TensorInfo, dtype: torch.dtype) -> Tensor:
        if not info.num_elements:
            return torch.empty(info.shape, dtype=dtype)
        strides = info.stride or _contiguous(info.shape)
        span = 1 + sum((n - 1) * step for n, step in zip(info.shape, strides, strict=True))
        data = self._map(info)
        if info.offset + span * dtype.itemsize > len(data):
            raise _cut(info)
        if info.offset % dtype.itemsize:  # a header of odd length: no aligned view exists
            raw = data[info.offset : info.offset + span * dtype.itemsize]
            flat = torch.frombuffer(bytearray(raw), dtype=dtype)
        else:
            flat = torch.frombuffer(data, dtype=dtype, count=span, offset=info.offset)
        return flat.as_strided(info.shape, strides)

    def _dequantised(
        self,
        info: TensorInfo,
        dtype: torch.dtype,
        rows: tuple[int, int] | None,
        columns: tuple[int, int] | None,
    ) -> Tensor:
        import numpy

        row_bytes = info.dtype.num_bytes(info.shape[-1])
        num_rows = info.num_elements // info.shape[-1]
        data = self._map(info)
        if info.offset + num_rows * row_bytes > len(data):
            raise _cut(info)
        packed = numpy.frombuffer(data, numpy.uint8, num_rows * row_bytes, info.offset)
        packed = packed.reshape(num_rows, row_bytes)
        shape = info.shape
        if rows is not None:
            each = num_rows // shape[0]
            packed = packed[rows[0] * each : rows[1] * each]
            shape = (rows[1] - rows[0], *shape[1:])
        first, stop = columns or (0, shape[-1])
        block = info.dtype.block_elements
        start, end = first // block, -(-stop // block)  # whole blocks
        packed = packed[:, start * info.dtype.block_bytes : end * info.dtype.block_bytes]
        num_columns = (end - start) * block
        out = torch.empty(len(packed), num_columns, dtype=dtype)
        step = max(1, ROWS_ELEMENTS // max(num_columns, 1))
        for row in range(0, len(packed), step):
            values = _dequantise(packed[row : row + step], info)
            out[row : row + step] = torch.from_numpy(values)
        whole = out.view(*shape[:-1], num_columns)
        return whole[..., first - start * block : stop - start * block]

    def _map(self, info: TensorInfo) -> mmap.mmap:
        if info.file not in self._maps:
            with files.open_regular(info.file) as stream:
                try:
                    # A private mapping: torch wants memory that could be written.
                    data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
                except (OSError, ValueError) as error:
                    raise files.unreadable(info.file, error) from None
            self._maps[info.file] = data
        return self._maps[info.file]


def _dequantise(packed: "NDArray[numpy.uint8]", info: TensorInfo) -> "NDArray[numpy.float32]":
    import gguf

    assert info.dtype.gguf is not None
    kind = gguf.GGMLQuantizationType(info.dtype.gguf)
    try:
        values: NDArray[numpy.float32] = gguf.quants.dequantize(packed, kind)
    except NotImplementedError:
        raise UnsupportedError(
            f"tensor `{info.name[:200]}` has the block format {info.dtype.name},"
            " which cannot be unpacked",
            where=str(info.file),
        ) from None
    return values


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _cut(info: TensorInfo) -> CheckpointError:
    return CheckpointError(
        f"the file ends before tensor `{info.name[:200]}` does",
        where=str(info.file),
        hint="the download or copy may be incomplete; fetch it again",
    )
