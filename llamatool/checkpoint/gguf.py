"""GGUF files: metadata and tensor table, read without the gguf package or numpy.

Versions 2 and 3, little and big endian. Large arrays (the vocabulary) are skipped and read when
asked for. Every count and length is checked against the bytes that are left, so a lying header
costs no memory.

Source: docs/gguf.md of ggml-org/ggml.
"""

import struct
from collections.abc import Iterator, Mapping, Sized
from pathlib import Path
from typing import BinaryIO, Literal

from llamatool import dtypes
from llamatool.checkpoint import files
from llamatool.checkpoint.tensors import MAX_DIMENSIONS, TensorInfo, TensorTable, element_count
from llamatool.errors import CheckpointError, UnsupportedError
from llamatool.records import record

MAX_KEYS = 65_536
MAX_TENSORS = 100_000
MAX_NAME_BYTES = 4096
MAX_STRING_BYTES = 8_000_000  # a chat template takes some thousands
MAX_HEADER_BYTES = 500_000_000  # read in pieces; the largest vocabularies take about 15 MB
SMALL_ARRAY = 4096  # elements; longer arrays are read when asked for
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TYPE_NAMES = (
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32"),
    *("bool", "string", "array", "uint64", "int64", "float64"),
)
_DAMAGED = "the download or copy may be incomplete; fetch it again"

Scalar = bool | int | float | str
ByteOrder = Literal["<", ">"]


@record
class GgufArray(Sized):
    """An array of the metadata that stays in the file until it is read."""

    element_type: str
    length: int
    file: Path
    offset: int  # bytes
    num_bytes: int
    byte_order: ByteOrder

    def __len__(self) -> int:
        return self.length

    def read(self) -> tuple[Scalar, ...]:
        """The values, read from the file now."""
        with files.open_regular(self.file) as stream:
            stream.seek(self.offset)
            reader = _Reader(stream, self.file, self.byte_order)
            kind = _TYPE_NAMES.index(self.element_type)
            return tuple(reader.values(kind, self.length))


Value = Scalar | tuple[Scalar, ...] | GgufArray


@record
class GgufFile:
    """The header of a GGUF file. Shapes are given slowest dimension first, as torch has them."""

    path: Path
    version: int
    byte_order: ByteOrder
    metadata: Mapping[str, Value]
    table: TensorTable

    @property
    def architecture(self) -> str | None:
        """`general.architecture`, such as `llama`; it prefixes the other keys."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else None

    @property
    def num_parts(self) -> int:
        """Files that the model was split into; 1 for most."""
        count = self.metadata.get("split.count", 1)
        return count if isinstance(count, int) and count > 1 else 1


def read_file(path: Path) -> GgufFile:
    """The metadata and the tensor table of the GGUF file at `path`.

    Raises: CheckpointError if the file is damaged or its sizes contradict each other;
    UnsupportedError for version 1.
    """
    with files.open_regular(path) as stream:
        size = files.file_size(stream)
        start = files.read_exactly(stream, min(size, 8), path)
        if start[:4] != b"GGUF" or len(start) < 8:
            raise CheckpointError(
                f"expected a GGUF file, found {size} bytes that begin {start[:4]!r}",
                where=str(path),
                hint=_DAMAGED,
            )
        version, byte_order = _version(start[4:8], path)
        reader = _Reader(stream, path, byte_order)
        num_tensors, num_keys = reader.count(), reader.count()
        _check_counts(num_tensors, num_keys, size, path)
        metadata = _metadata(reader, num_keys)
        entries = [_entry(reader) for _ in range(num_tensors)]
        alignment = _alignment(metadata, path)
        start_of_data = -(-reader.position // alignment) * alignment
    tensors = _tensors(entries, start_of_data, alignment, size, path)
    return GgufFile(path, version, byte_order, metadata, TensorTable("gguf", (path,), tensors))


def rope_divisors(file: GgufFile) -> tuple[float, ...] | None:
    """The values of `rope_freqs.weight`, which scale RoPE; None if there is no such tensor."""
    info = file.table.tensors.get("rope_freqs.weight")
    if info is None or info.dtype.name != "float32" or info.num_elements > SMALL_ARRAY:
        return None
    with files.open_regular(file.path) as stream:
        stream.seek(info.offset)
        raw = files.read_exactly(stream, info.num_bytes, file.path)
    return struct.unpack(f"{file.byte_order}{info.num_elements}f", raw)


def read_metadata(path: Path) -> dict[str, Scalar | tuple[Scalar, ...]]:
    """The whole metadata of the GGUF file at `path`, the large arrays read too."""
    metadata = read_file(path).metadata
    return {k: v.read() if isinstance(v, GgufArray) else v for k, v in metadata.items()}


class _Reader:
    """Reads values one after the other, with a buffer of its own and a limit on the whole."""

    def __init__(self, stream: BinaryIO, path: Path, byte_order: ByteOrder) -> None:
        self.path = path
        self.byte_order = byte_order
        self._stream = stream
        self._base = stream.tell()
        self._buffer = b""
        self._at = 0
        self._left = min(files.file_size(stream) - self._base, MAX_HEADER_BYTES)
        self._kept = 0

    @property
    def position(self) -> int:
        return self._base + self._at

    @property
    def num_bytes_left(self) -> int:
        return self._left + len(self._buffer) - self._at

    def take(self, num_bytes: int) -> bytes:
        self._need(num_bytes)
        part = self._buffer[self._at : self._at + num_bytes]
        self._at += num_bytes
        return part

    def skip(self, num_bytes: int) -> None:
        while num_bytes:
            part = min(num_bytes, 1 << 20)
            self._need(part)
            self._at += part
            num_bytes -= part

    def count(self) -> int:
        return int.from_bytes(self.take(8), "little" if self.byte_order == "<" else "big")

    def number(self) -> int:
        return int.from_bytes(self.take(4), "little" if self.byte_order == "<" else "big")

    def text(self, limit: int = MAX_STRING_BYTES, errors: str = "replace") -> str:
        length = self.count()
        if length > limit:
            raise self.bad(f"a text of {length:,} bytes")
        self._kept += length
        if self._kept > 4 * MAX_STRING_BYTES:
            raise self.bad("too much text")
        return self.take(length).decode("utf-8", errors)

    def values(self, kind: int, length: int) -> Iterator[Scalar]:
        if kind == _STRING:
            for _ in range(length):
                # Pieces of a vocabulary need not be UTF-8, and their bytes must survive.
                yield self.text(errors="surrogateescape")
            return
        code = _SCALARS[kind]
        item = struct.Struct(self.byte_order + code)
        for _ in range(length):
            yield item.unpack(self.take(item.size))[0]

    def skip_texts(self, length: int) -> None:
        unpack = struct.Struct(self.byte_order + "Q").unpack_from
        done = 0
        while done < length:
            self._need(8)
            buffer, at, end = self._buffer, self._at, len(self._buffer) - 8
            while done < length and at <= end:
                step = unpack(buffer, at)[0] + 8
                if at + step > len(buffer):
                    break
                at += step
                done += 1
            self._at = at
            if done < length:  # the next text is not wholly in the buffer
                self._need(8)
                self.skip(unpack(self._buffer, self._at)[0] + 8)
                done += 1

    def bad(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the GGUF header has {what} near byte {self.position}",
            where=str(self.path),
            hint=_DAMAGED,
        )

    def _need(self, num_bytes: int) -> None:
        missing = num_bytes - (len(self._buffer) - self._at)
        if missing <= 0:
            return
        if missing > self._left:
            raise self.bad(f"{num_bytes:,} more bytes where the file has {self.num_bytes_left:,}")
        part = files.read_exactly(self._stream, min(self._left, max(missing, 1 << 18)), self.path)
        self._left -= len(part)
        self._base += self._at
        self._buffer = self._buffer[self._at :] + part
        self._at = 0


def _version(raw: bytes, path: Path) -> tuple[int, ByteOrder]:
    little, big = int.from_bytes(raw, "little"), int.from_bytes(raw, "big")
    # A big-endian file has the small version number in the last byte.
    version, order = (little, "<") if little < 65_536 else (big, ">")
    if version == 1:
        raise UnsupportedError(
            "a GGUF file of version 1",
            where=str(path),
            hint="convert it with llama.cpp's gguf tools",
        )
    if version not in (2, 3):
        raise UnsupportedError(f"a GGUF file of unknown version {version}", where=str(path))
    return version, "<" if order == "<" else ">"


def _check_counts(num_tensors: int, num_keys: int, size: int, path: Path) -> None:
    # An entry takes at least 8 bytes of name length and some more.
    if num_keys > min(MAX_KEYS, size // 13) or num_tensors > min(MAX_TENSORS, size // 24):
        raise CheckpointError(
            f"the GGUF header claims {num_tensors:,} tensors and {num_keys:,} metadata keys",
            where=str(path),
            hint=_DAMAGED,
        )


def _metadata(reader: _Reader, num_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = reader.text(MAX_NAME_BYTES)
        if key in metadata:
            raise reader.bad(f"the key `{key[:80]}` twice")
        metadata[key] = _value(reader, key)
    return metadata


def _value(reader: _Reader, key: str) -> Value:
    kind = reader.number()
    if kind == _STRING:
        return reader.text()
    if kind in _SCALARS:
        return next(reader.values(kind, 1))
    if kind != _ARRAY:
        raise reader.bad(f"a value of unknown type {kind} for `{key[:80]}`")
    element, length = reader.number(), reader.count()
    if element != _STRING and element not in _SCALARS:
        raise reader.bad(f"an array of type {element} for `{key[:80]}`")
    item_bytes = 8 if element == _STRING else struct.calcsize("<" + _SCALARS[element])
    if length * item_bytes > reader.num_bytes_left:
        raise reader.bad(f"an array of {length:,} elements for `{key[:80]}`")
    if length <= SMALL_ARRAY:
        return tuple(reader.values(element, length))
    offset = reader.position
    if element == _STRING:
        reader.skip_texts(length)
    else:
        reader.skip(length * item_bytes)
    return GgufArray(
        _TYPE_NAMES[element],
        length,
        reader.path,
        offset,
        reader.position - offset,
        reader.byte_order,
    )


@record
class _Entry:
    name: str
    dimensions: tuple[int, ...]  # fastest first, as ggml counts
    kind: int
    offset: int


def _entry(reader: _Reader) -> _Entry:
    name = reader.text(MAX_NAME_BYTES)
    num_dimensions = reader.number()
    if num_dimensions > MAX_DIMENSIONS:
        raise reader.bad(f"{num_dimensions} dimensions for `{name[:80]}`")
    dimensions = tuple(reader.count() for _ in range(num_dimensions))
    return _Entry(name, dimensions, reader.number(), reader.count())


def _alignment(metadata: Mapping[str, Value], path: Path) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise CheckpointError(f"`general.alignment` is {alignment!r}", where=str(path))
    return alignment


def _tensors(
    entries: list[_Entry], start: int, alignment: int, size: int, path: Path
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        if entry.name in tensors:
            raise CheckpointError(f"tensor `{entry.name[:200]}` occurs twice", where=str(path))
        tensors[entry.name] = _tensor(entry, start, alignment, path)
    end = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.num_bytes)):
        if tensor.offset < end:
            raise CheckpointError(
                f"tensor `{tensor.name[:200]}` overlaps the one before it", where=str(path)
            )
        end = tensor.offset + tensor.num_bytes
    if tensors and end > size:  # a file of the vocabulary alone ends without padding
        raise CheckpointError(
            f"the header describes {end:,} bytes, the file has {size:,}",
            where=str(path),
            hint=_DAMAGED,
        )
    return tensors


def _tensor(entry: _Entry, start: int, alignment: int, path: Path) -> TensorInfo:
    where = f"{path}, tensor `{entry.name[:200]}`"
    dtype = dtypes.by_gguf(entry.kind)
    if dtype is None:
        raise UnsupportedError(f"unknown GGUF tensor type {entry.kind}", where=where)
    shape = tuple(reversed(entry.dimensions))
    count = element_count(shape)
    row = entry.dimensions[0] if entry.dimensions else 1
    if count is None or row % dtype.block_elements:
        raise CheckpointError(f"shape {list(shape)} cannot be stored as {dtype.name}", where=where)
    if entry.offset % alignment:
        raise CheckpointError(
            f"offset {entry.offset} is no multiple of the alignment {alignment}", where=where
        )
    return TensorInfo(entry.name, dtype, shape, path, start + entry.offset, dtype.num_bytes(count))
