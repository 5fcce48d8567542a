"""Reading and writing ranges of files at given places, from several threads at once."""

import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamatool.checkpoint import files
from llamatool.checkpoint.tensors import TensorInfo
from llamatool.errors import CheckpointError, LlamatoolError, ResourceError, UnsupportedError
from llamatool.units import format_bytes

if TYPE_CHECKING:
    from llamatool.checkpoint.cast import Raw


class Sources:
    """The open files of a checkpoint."""

    def __init__(self, byte_order: str = "<", *, forget: bool = False) -> None:
        self._files: dict[Path, Any] = {}
        self._lock = threading.Lock()
        self._byte_order = byte_order
        self._forget = forget  # tell the system that what was read is not needed again
        self.num_bytes_read = 0

    def __enter__(self) -> "Sources":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._files.values():
            stream.close()
        self._files.clear()

    def into(self, view: memoryview, path: Path, offset: int) -> None:
        """Fills `view` with the bytes of `path` from `offset` on."""
        descriptor = self._descriptor(path)
        done, total = 0, len(view)
        try:
            while done < total:
                count = _read_at(descriptor, view[done:], offset + done)
                if count == 0:
                    raise CheckpointError(
                        f"the file ends {total - done} bytes early",
                        where=str(path),
                        hint="it changed while it was read",
                    )
                done += count
        except OSError as error:
            raise files.unreadable(path, error) from None
        self.num_bytes_read += total
        if self._forget and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, offset, total, os.POSIX_FADV_DONTNEED)

    def elements(
        self,
        info: TensorInfo,
        first: int,
        num_rows: int,
        num_columns: int,
        out: "Raw | None" = None,
    ) -> "Raw":
        """Consecutive elements of a stored tensor from `first` on, as raw integers.

        A quantised tensor gives its values as float32. Args: out: of the shape of the result, to
        be filled instead of a new array.
        """
        import numpy as np

        if info.dtype.block_elements > 1:
            return self._dequantised(info, first, num_rows, num_columns)
        size = info.dtype.block_bytes
        if out is None:
            out = np.empty((num_rows, num_columns), dtype=f"u{size}")
        if info.is_contiguous:
            self.into(out.data.cast("B"), info.file, info.offset + first * size)
        else:
            self._strided(info, first, out)
        return out.byteswap(inplace=True) if self._byte_order == ">" else out

    def _dequantised(self, info: TensorInfo, first: int, num_rows: int, num_columns: int) -> "Raw":
        import numpy as np
        from gguf import GGMLQuantizationType, dequantize

        if self._byte_order == ">":
            raise UnsupportedError("quantised tensors in a big-endian file", where=str(info.file))
        assert info.dtype.gguf is not None
        row_bytes = info.dtype.num_bytes(num_columns)
        raw = np.empty((num_rows, row_bytes), dtype=np.uint8)
        start = info.offset + info.dtype.num_bytes(first)
        self.into(raw.data.cast("B"), info.file, start)
        kind = GGMLQuantizationType(info.dtype.gguf)
        try:
            values = dequantize(raw, kind)
        except NotImplementedError:
            raise UnsupportedError(
                f"quantised tensors of the type {info.dtype.name}", where=str(info.file)
            ) from None
        return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)

    def _strided(self, info: TensorInfo, first: int, out: "Raw") -> None:
        """Reads a view whose elements are not consecutive, run by run."""
        import numpy as np

        assert info.stride is not None
        size = info.dtype.block_bytes
        index = np.unravel_index(np.arange(first, first + out.size), info.shape)
        places = np.zeros(out.size, dtype=np.int64)
        for along, step in zip(index, info.stride, strict=True):
            places += along * step
        order = np.argsort(places, kind="stable")
        flat = out.reshape(-1)
        ordered = places[order]
        breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
        for run in np.split(np.arange(out.size), breaks):
            values = np.empty(run.size, dtype=out.dtype)
            start = info.offset + int(ordered[run[0]]) * size
            self.into(values.data.cast("B"), info.file, start)
            flat[order[run]] = values

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            stream = self._files.get(path)
            if stream is None:
                stream = self._files[path] = files.open_regular(path)
            return int(stream.fileno())


class Sink:
    """A file being written, created at its full size."""

    def __init__(self, path: Path, num_bytes: int, *, resume: bool) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        if not resume:
            flags |= os.O_EXCL
        try:
            self._descriptor = os.open(path, flags, 0o666)
            if num_bytes and os.fstat(self._descriptor).st_size != num_bytes:
                _allocate(self._descriptor, num_bytes)
        except OSError as error:
            raise unwritable(path, error) from None

    def write(self, view: memoryview, offset: int) -> None:
        """Writes all of `view` at `offset`."""
        try:
            while len(view):
                count = _write_at(self._descriptor, view, offset)
                view = view[count:]
                offset += count
        except OSError as error:
            raise unwritable(self.path, error) from None

    def read(self, num_bytes: int, offset: int) -> bytes:
        """Bytes that have been written."""
        view = memoryview(bytearray(num_bytes))
        if _read_at(self._descriptor, view, offset) != num_bytes:
            raise ResourceError("what was written cannot be read back", where=str(self.path))
        return bytes(view)

    def sync(self) -> None:
        """Waits until all that was written is on the disk."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


def sync_folder(folder: Path) -> None:
    """Waits until the names in `folder` are on the disk, where the system offers that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows has no such thing
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(path: Path, error: OSError) -> LlamatoolError:
    """The error that says why `path` could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            "no space left on the disk",
            where=str(path),
            hint="free some and run again with --resume",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ResourceError("no permission to write", where=str(path))
    if error.errno == errno.EEXIST:
        return ResourceError("the file is already there", where=str(path))
    if error.errno == errno.ELOOP:
        return ResourceError("a symbolic link stands in the way", where=str(path))
    return ResourceError(f"cannot be written: {error.strerror or error}", where=str(path))


def check_space(folder: Path, num_bytes: int) -> None:
    """Raises ResourceError if the disk of `folder` has less than `num_bytes` free."""
    import shutil

    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ResourceError(
            f"needs {format_bytes(num_bytes)}, {format_bytes(free)} free", where=str(folder)
        )


_seek_lock = threading.Lock()


def _read_at(descriptor: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    with _seek_lock:  # Windows
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, len(view))
    view[: len(data)] = data
    return len(data)


def _write_at(descriptor: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, view, offset)
    with _seek_lock:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, view)


def _allocate(descriptor: int, num_bytes: int) -> None:
    """Reserves the space, so that a full disk shows at once."""
    os.ftruncate(descriptor, num_bytes)
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        # Some file systems cannot; there the free space was checked, and that has to do.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
