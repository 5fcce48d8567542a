"""The zip container of `.pth` files: its directory, read strictly.

A general zip library accepts files that two readers understand differently. This one accepts only
what torch.save writes: stored records, each once, in ranges that do not overlap, with a local
header that agrees with the central directory.

Source: APPNOTE.TXT of PKWARE, sections 4.3 and 4.5.3 (zip64).
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from llamatool.checkpoint import files
from llamatool.errors import CheckpointError
from llamatool.records import record

MAX_RECORDS = 200_000
MAX_DIRECTORY_BYTES = 64_000_000
_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_ENCRYPTED, _DESCRIPTOR = 0x0001, 0x0008
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_DAMAGED = "the download or copy may be incomplete; fetch it again"


@record
class Record:
    """One stored file of the archive."""

    name: str
    offset: int  # bytes from the start of the archive to the record's first byte
    num_bytes: int
    crc32: int


@record
class _Entry:
    name: str
    raw_name: bytes
    flags: int
    crc32: int
    num_bytes: int
    header_offset: int


def read_directory(stream: BinaryIO, path: Path) -> dict[str, Record]:
    """The records of the zip archive in `stream`, by name, in the order of the directory.

    Raises: CheckpointError if the archive is cut, compressed, encrypted or contradicts itself.
    """
    size = files.file_size(stream)
    num_entries, offset, num_bytes = _find_directory(stream, path, size)
    _seek(stream, offset, path)
    data = files.read_exactly(stream, num_bytes, path)
    entries = list(_entries(data, num_entries, path))
    records: dict[str, Record] = {}
    end = 0
    for entry in sorted(entries, key=lambda e: e.header_offset):
        if entry.header_offset < end:
            raise _bad(path, f"record `{entry.name[:80]}` overlaps another")
        record = _record(stream, entry, path)
        end = record.offset + record.num_bytes
        if end > offset:
            raise _bad(path, f"record `{entry.name[:80]}` reaches beyond the data")
        if record.name in records:
            raise _bad(path, f"record `{entry.name[:80]}` occurs twice")
        records[record.name] = record
    return records


def _find_directory(stream: BinaryIO, path: Path, size: int) -> tuple[int, int, int]:
    """Number of entries, and offset and length of the central directory."""
    tail_bytes = min(size, _END.size + _FULL16)
    _seek(stream, size - tail_bytes, path)
    tail = files.read_exactly(stream, tail_bytes, path)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + _END.size > len(tail):
        raise CheckpointError(
            "the zip archive has no end record: it is cut", where=str(path), hint=_DAMAGED
        )
    _, disk, start_disk, here, total, num_bytes, offset, comment = _END.unpack_from(tail, at)
    end_offset = size - tail_bytes + at
    if end_offset + _END.size + comment != size:
        raise _bad(path, "bytes follow the end record")
    if disk or start_disk or here != total:
        raise _bad(path, "the archive spans several disks")
    if end_offset >= _END64_LOCATOR.size:
        _seek(stream, end_offset - _END64_LOCATOR.size, path)
        locator = files.read_exactly(stream, _END64_LOCATOR.size, path)
        signature, _, end64_offset, _ = _END64_LOCATOR.unpack(locator)
        if signature == b"PK\6\7":
            if end64_offset > end_offset - _END64_LOCATOR.size - _END64.size:
                raise _bad(path, "the zip64 end record lies outside the file")
            _seek(stream, end64_offset, path)
            fields = _END64.unpack(files.read_exactly(stream, _END64.size, path))
            if fields[0] != b"PK\6\6" or fields[6] != fields[7]:
                raise _bad(path, "the zip64 end record is damaged")
            total, num_bytes, offset = fields[7], fields[8], fields[9]
            end_offset = end64_offset
    if total > MAX_RECORDS or num_bytes > MAX_DIRECTORY_BYTES:
        raise _bad(path, f"a directory of {total:,} records is too large")
    if offset + num_bytes != end_offset:
        raise _bad(path, "the directory does not end where the archive says")
    return total, offset, num_bytes


def _entries(data: bytes, total: int, path: Path) -> Iterator[_Entry]:
    at = 0
    for _ in range(total):
        if at + _CENTRAL.size > len(data):
            raise _bad(path, "the directory is cut")
        fields = _CENTRAL.unpack_from(data, at)
        signature, _, _, flags, method, _, _, crc32, packed, unpacked = fields[:10]
        name_bytes, extra_bytes, comment_bytes, _, _, _, header_offset = fields[10:]
        if signature != b"PK\1\2":
            raise _bad(path, "the directory is damaged")
        at += _CENTRAL.size
        raw_name = data[at : at + name_bytes]
        extra = data[at + name_bytes : at + name_bytes + extra_bytes]
        at += name_bytes + extra_bytes + comment_bytes
        name = raw_name.decode("utf-8", "backslashreplace")
        unpacked, packed, header_offset = _zip64(extra, unpacked, packed, header_offset, path)
        if flags & _ENCRYPTED:
            raise _bad(path, f"record `{name[:80]}` is encrypted")
        if method != 0 or packed != unpacked:
            raise _bad(
                path,
                f"record `{name[:80]}` is compressed, which torch.save never does",
                "unpack it and save it again with torch.save if you trust it",
            )
        yield _Entry(name, raw_name, flags, crc32, unpacked, header_offset)
    if at != len(data):
        raise _bad(path, "the directory holds more than its records")


def _zip64(
    extra: bytes, unpacked: int, packed: int, offset: int, path: Path
) -> tuple[int, int, int]:
    values = [unpacked, packed, offset]
    wanted = [position for position, value in enumerate(values) if value == _FULL32]
    at = 0
    while wanted and at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            if length < 8 * len(wanted) or at + 4 + length > len(extra):
                raise _bad(path, "a zip64 field is cut")
            for number, position in enumerate(wanted):
                values[position] = struct.unpack_from("<Q", extra, at + 4 + 8 * number)[0]
            break
        at += 4 + length
    return values[0], values[1], values[2]


def _record(stream: BinaryIO, entry: _Entry, path: Path) -> Record:
    _seek(stream, entry.header_offset, path)
    fields = _LOCAL.unpack(files.read_exactly(stream, _LOCAL.size, path))
    signature, _, flags, method, _, _, crc32, packed, unpacked, name_bytes, extra_bytes = fields
    name = files.read_exactly(stream, name_bytes, path)
    sizes_agree = (
        # A writer that streams leaves sizes and checksum to a descriptor behind the data.
        flags & _DESCRIPTOR
        or (crc32 == entry.crc32 and {packed, unpacked} <= {entry.num_bytes, _FULL32})
    )
    if (
        signature != b"PK\3\4"
        or name != entry.raw_name
        or flags != entry.flags
        or method != 0
        or not sizes_agree
    ):
        raise _bad(path, f"the two headers of record `{entry.name[:80]}` disagree")
    offset = entry.header_offset + _LOCAL.size + name_bytes + extra_bytes
    return Record(entry.name, offset, entry.num_bytes, entry.crc32)


def _seek(stream: BinaryIO, offset: int, path: Path) -> None:
    try:
        stream.seek(offset)
    except (OSError, ValueError, OverflowError):
        raise _bad(path, "an offset lies outside the file") from None


def _bad(path: Path, what: str, hint: str = _DAMAGED) -> CheckpointError:
    return CheckpointError(
        f"the zip archive is not as torch.save writes it: {what}", where=str(path), hint=hint
    )
