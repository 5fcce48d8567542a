"""The files of a conversion, laid out before their data: every header byte and tensor offset.

A safetensors file is its header and the tensors. A `.pth` file is a zip archive with a pickle and
one stored record per tensor; its checksums are known only when the data has been written, so the
layout says where they belong.

Source: huggingface/safetensors README.md; APPNOTE.TXT of PKWARE; caffe2/serialize/inline_container
of PyTorch for the alignment of records.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from llamatool.dtypes import DType

_ALIGNMENT = 64  # bytes; torch maps storages that begin at multiples
_FULL32 = 0xFFFFFFFF
_UTF8_NAMES = 0x0800
_DOS_TIME, _DOS_DATE = 0, 0x21  # 1 January 1980: the same input gives the same bytes


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor to be written."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    file: str = ""  # name in the output folder
    offset: int = 0  # bytes from the start of the file

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.dtype.num_bytes(math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class Checksum:
    """A tensor of a zip archive, and where the CRC-32 of its bytes is to be written."""

    target: Target
    positions: tuple[int, ...]  # bytes from the start of the file, four bytes each


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file to be written: its size, its tensors, and all bytes that are no tensor data."""

    name: str
    num_bytes: int
    targets: tuple[Target, ...]
    fixed: tuple[tuple[int, bytes], ...]  # offset and content
    checksums: tuple[Checksum, ...] = ()


def safetensors_layout(name: str, targets: Sequence[Target]) -> FileLayout:
    """A safetensors file with `targets`; wider types come first, so that all are aligned."""
    ordered = sorted(targets, key=lambda target: -target.dtype.block_bytes)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for target in ordered:
        start, end = end, end + target.num_bytes
        header[target.name] = {
            "dtype": target.dtype.safetensors,
            "shape": list(target.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    position = 8 + len(text)
    placed = []
    for target in ordered:
        placed.append(replace(target, file=name, offset=position))
        position += target.num_bytes
    return FileLayout(name, position, tuple(placed), ((0, struct.pack("<Q", len(text)) + text),))


def pth_layout(name: str, targets: Sequence[Target]) -> FileLayout:
    """A file that `torch.load(weights_only=True, mmap=True)` reads as a dictionary of `targets`."""
    archive = _Archive(name)
    archive.add_bytes("data.pkl", _pickle(targets))
    archive.add_bytes("byteorder", b"little")
    for key, target in enumerate(targets):
        archive.add_target(f"data/{key}", target)
    archive.add_bytes("version", b"3\n")
    return archive.finish()


@dataclass(slots=True)
class _Record:
    raw_name: bytes
    header_offset: int
    num_bytes: int
    crc32: int


class _Archive:
    """Builds the layout of a zip archive, record by record."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._position = 0
        self._fixed: list[tuple[int, bytes]] = []
        self._records: list[_Record] = []
        self._targets: list[tuple[Target, int]] = []  # and the number of the record

    def add_bytes(self, name: str, content: bytes) -> None:
        self._begin(name, len(content), zlib.crc32(content))
        self._fixed.append((self._position, content))
        self._position += len(content)

    def add_target(self, name: str, target: Target) -> None:
        self._begin(name, target.num_bytes, 0)
        placed = replace(target, file=self._name, offset=self._position)
        self._targets.append((placed, len(self._records) - 1))
        self._position += target.num_bytes

    def finish(self) -> FileLayout:
        start = self._position
        directory = bytearray()
        in_directory = []
        for record in self._records:
            in_directory.append(start + len(directory) + 16)
            directory += _central(record)
        self._fixed.append((start, bytes(directory) + _end(start, len(directory), self._records)))
        end_offset, end_bytes = self._fixed[-1]
        checksums = tuple(
            Checksum(target, (self._records[number].header_offset + 14, in_directory[number]))
            for target, number in self._targets
        )
        placed = tuple(target for target, _ in self._targets)
        size = end_offset + len(end_bytes)
        return FileLayout(self._name, size, placed, tuple(self._fixed), checksums)

    def _begin(self, name: str, num_bytes: int, crc32: int) -> None:
        record = _Record(f"archive/{name}".encode(), self._position, num_bytes, crc32)
        self._records.append(record)
        header = _local(record)
        self._fixed.append((self._position, header))
        self._position += len(header)


def _local(record: _Record) -> bytes:
    large = record.num_bytes >= _FULL32
    size = _FULL32 if large else record.num_bytes
    extra = struct.pack("<2H2Q", 1, 16, record.num_bytes, record.num_bytes) if large else b""
    # A field of padding brings the data to a multiple of 64, as torch's own writer does.
    unpadded = record.header_offset + 30 + len(record.raw_name) + len(extra) + 4
    padding = -unpadded % _ALIGNMENT
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    fields = (b"PK\3\4", 45 if large else 20, _UTF8_NAMES, 0, _DOS_TIME, _DOS_DATE)
    sizes = (record.crc32, size, size, len(record.raw_name), len(extra))
    return struct.pack("<4s5H3L2H", *fields, *sizes) + record.raw_name + extra


def _central(record: _Record) -> bytes:
    values = []
    size = record.num_bytes
    if size >= _FULL32:
        values += [size, size]
        size = _FULL32
    offset = record.header_offset
    if offset >= _FULL32:
        values.append(offset)
        offset = _FULL32
    extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    version = 45 if values else 20
    fields = (b"PK\1\2", version, version, _UTF8_NAMES, 0, _DOS_TIME, _DOS_DATE)
    sizes = (record.crc32, size, size, len(record.raw_name), len(extra), 0, 0, 0, 0, offset)
    return struct.pack("<4s6H3L5H2L", *fields, *sizes) + record.raw_name + extra


def _end(start: int, num_bytes: int, records: Sequence[_Record]) -> bytes:
    count = len(records)
    end64_offset = start + num_bytes
    end64 = struct.pack(
        "<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, num_bytes, start
    ) + struct.pack("<4sLQL", b"PK\6\7", 0, end64_offset, 1)
    large = start >= _FULL32 or count >= 0xFFFF
    return (end64 if large else b"") + struct.pack(
        "<4s4H2LH",
        b"PK\5\6",
        0,
        0,
        min(count, 0xFFFF),
        min(count, 0xFFFF),
        min(num_bytes, _FULL32),
        min(start, _FULL32),
        0,
    )


def _pickle(targets: Iterable[Target]) -> bytes:
    """A dictionary of tensors as torch.save pickles it, protocol 2."""
    parts = [b"\x80\x02}"]
    for key, target in enumerate(targets):
        count = math.prod(target.shape)
        storage = (
            b"("
            + _text("storage")
            + f"ctorch\n{target.dtype.storage}\n".encode()
            + _text(str(key))
            + _text("cpu")
            + _number(count)
            + b"tQ"
        )
        parts.append(
            _text(target.name)
            + b"ctorch._utils\n_rebuild_tensor_v2\n("
            + storage
            + _number(0)
            + _numbers(target.shape)
            + _numbers(_strides(target.shape))
            + b"\x89ccollections\nOrderedDict\n)RtRs"
        )
    return b"".join(parts) + b"."


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _text(text: str) -> bytes:
    raw = text.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _number(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _numbers(values: Iterable[int]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"
