"""Opening files that may be anything: pipes, devices, cyclic links, pointers, web pages.

Everything here ends in a CheckpointError with the place, never in a hang or a traceback.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from llamatool import strictjson
from llamatool.errors import CheckpointError

MAX_JSON_BYTES = 50_000_000
# The parsed form of JSON costs up to about 100 bytes for each of these characters; the limit keeps
# a hostile file below 200 MB and lets about 100,000 tensors of one file through.
MAX_JSON_TOKENS = 1_500_000


def open_regular(path: Path) -> BinaryIO:
    """An unbuffered reader of the regular file at `path`.

    Raises: CheckpointError if there is no such file, it cannot be read, or is no regular file.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"expected a file, found {kind_of(mode)}", where=str(path))
        # Without O_NONBLOCK a pipe put there since the check would block the open for ever.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        stream = os.fdopen(os.open(path, flags), "rb", buffering=0)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    mode = os.fstat(stream.fileno()).st_mode
    if not stat.S_ISREG(mode):
        stream.close()
        raise CheckpointError(f"expected a file, found {kind_of(mode)}", where=str(path))
    return stream


def read_exactly(stream: BinaryIO, num_bytes: int, path: Path) -> bytes:
    """The next `num_bytes` bytes.

    Raises: CheckpointError if the file ends before, or the disk fails.
    """
    parts = []
    missing = num_bytes
    try:
        while missing:
            part = stream.read(min(missing, 1 << 24))
            if not part:
                raise CheckpointError(
                    f"the file ends {missing} bytes early",
                    where=str(path),
                    hint="the download or copy may be incomplete; fetch it again",
                )
            parts.append(part)
            missing -= len(part)
    except OSError as error:
        raise unreadable(path, error) from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def file_size(stream: BinaryIO) -> int:
    """Bytes of an open file."""
    return os.fstat(stream.fileno()).st_size


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in the file at `path`.

    Raises: InputError if it is unreadable, too large or not acceptable (llamatool/strictjson.py).
    """
    with open_regular(path) as stream:
        size = file_size(stream)
        if size > MAX_JSON_BYTES:
            raise CheckpointError(
                f"expected {what}, found a file of {size:,} bytes", where=str(path)
            )
        data = read_exactly(stream, size, path)
    return parse_json(data, where=str(path), what=what)


def parse_json(data: bytes, *, where: str, what: str) -> dict[str, Any]:
    """The JSON object in `data`, refused before parsing if it would take too much memory."""
    tokens = sum(data.count(token) for token in (b",", b"[", b"{"))
    if len(data) > MAX_JSON_BYTES or tokens > MAX_JSON_TOKENS:
        raise CheckpointError(
            f"{what} of {len(data):,} bytes with {tokens:,} values is too large", where=where
        )
    return strictjson.parse_object(data, where=where, what=what)


def kind_of(mode: int) -> str:
    """What a file mode says the thing is, in words."""
    kinds = (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((words for test, words in kinds if test(mode)), "a file")


def unreadable(path: Path, error: OSError | ValueError) -> CheckpointError:
    """The error that says why `path` could not be opened or read."""
    code = error.errno if isinstance(error, OSError) else None
    where = str(path)
    if code == errno.ELOOP:
        return CheckpointError("the symbolic links form a circle", where=where)
    if code in (errno.EACCES, errno.EPERM):
        return CheckpointError(
            "no permission to read", where=where, hint="check the owner and mode of the file"
        )
    if code in (errno.ENOENT, errno.ENOTDIR):
        if path.is_symlink():
            target = path.readlink()
            return CheckpointError(
                f"a symbolic link to `{target}`, which does not exist", where=where
            )
        return CheckpointError("no such file", where=where)
    if code == errno.ENAMETOOLONG:
        return CheckpointError("the name is too long", where=where[:200])
    if isinstance(error, OSError):
        return CheckpointError(f"cannot be read: {error.strerror or error}", where=where)
    return CheckpointError("no such file", where=where)
