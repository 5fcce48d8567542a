"""PyTorch's `.pth` and `.bin` files: where each tensor lies, read without unpickling.

The zip directory gives the byte ranges of the storages, the pickle (read as data by
`pickledata.py`) the tensors that are views of them. The format from before zip files is read too:
the storages follow the pickle one after the other.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from llamatool import dtypes
from llamatool.checkpoint import archive, files
from llamatool.checkpoint.pickledata import Blob, Global, Machine, PickleDataError
from llamatool.checkpoint.tensors import MAX_DIMENSIONS, TensorInfo, TensorTable, element_count
from llamatool.dtypes import DType
from llamatool.errors import CheckpointError, UnsupportedError
from llamatool.records import record

MAX_PICKLE_BYTES = 32_000_000
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_SHARD = re.compile(r"consolidated(?:\.([0-9]{1,4}))?\.pth", re.ASCII)
_SIDE_FILE = re.compile(r"(fp8|int4)_scales_\d+\.pt", re.ASCII)
_DAMAGED = "the download or copy may be incomplete; fetch it again"


@record
class _StorageType:
    dtype: DType


@record
class _Storage:
    key: str
    dtype: DType
    num_elements: int


@record
class _Tensor:
    storage: _Storage
    offset: int  # elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@record
class _Opaque:
    """A value that is no tensor, and of which only its kind is kept."""

    kind: str


def read_file(path: Path) -> TensorTable:
    """The tensors of one `.pth` or `.bin` file, as torch.save wrote it.

    Entries that are no tensors (extra state of a training run) are listed in `other`.
    Raises: CheckpointError if the file is damaged or names code to run.
    """
    with files.open_regular(path) as stream:
        start = stream.read(4)
        if start == b"PK\3\4":
            return _read_zip(stream, path)
        if start[:1] == b"\x80":
            return _read_legacy(stream, path)
    raise CheckpointError(
        "expected a file written by torch.save, found neither a zip archive nor a pickle",
        where=str(path),
        hint=_DAMAGED,
    )


def shard_paths(folder: Path) -> tuple[Path, ...]:
    """The `consolidated.NN.pth` files of a Meta folder in the order of their ranks; none: ().

    Accepts `consolidated.00.pth`, `consolidated.0.pth` and, for a single file,
    `consolidated.pth`; other `.pth` files do not count.
    Raises: CheckpointError if a rank is missing or has two files.
    """
    ranks: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = _SHARD.fullmatch(path.name)
        if match is None:
            continue
        rank = int(match[1] or 0)
        if rank in ranks:
            raise CheckpointError(
                f"`{ranks[rank].name}` and `{path.name}` are both shard {rank}",
                where=str(folder),
                hint="keep the one that belongs to the other shards",
            )
        ranks[rank] = path
    for rank in range(len(ranks)):
        if rank not in ranks:
            raise CheckpointError(
                f"shard {rank} is missing: found {', '.join(p.name for p in ranks.values())}",
                where=str(folder),
                hint="fetch the missing shard; a model needs all of them",
            )
    return tuple(ranks[rank] for rank in range(len(ranks)))


def side_files(folder: Path) -> tuple[Path, ...]:
    """The files with the scales of Meta's quantised shards (`fp8_scales_0.pt`); none: ()."""
    return tuple(path for path in sorted(folder.iterdir()) if _SIDE_FILE.fullmatch(path.name))


def _read_zip(stream: BinaryIO, path: Path) -> TensorTable:
    records = archive.read_directory(stream, path)
    pickles = [name for name in records if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(
            f"expected one `data.pkl` in the archive, found {len(pickles)}",
            where=str(path),
            hint="a zip file that torch.save wrote is expected",
        )
    root = pickles[0].removesuffix("data.pkl")
    if root + "constants.pkl" in records:
        raise UnsupportedError("a TorchScript program, not a checkpoint", where=str(path))
    order = records.get(root + "byteorder")
    if order is not None and _content(stream, order, path, 16) != b"little":
        raise UnsupportedError("the tensors are stored big-endian", where=str(path))
    data = _content(stream, records[pickles[0]], path, MAX_PICKLE_BYTES)
    value = _load(Machine(data, _find, _reduce, _persistent), path)

    def locate(storage: _Storage) -> int:
        record = records.get(f"{root}data/{storage.key}")
        num_bytes = storage.dtype.num_bytes(storage.num_elements)
        if record is None:
            raise CheckpointError(
                f"storage `{storage.key[:80]}` is missing", where=str(path), hint=_DAMAGED
            )
        if record.num_bytes != num_bytes:
            raise CheckpointError(
                f"storage `{storage.key[:80]}` of {storage.num_elements:,} {storage.dtype.name}"
                f" elements takes {num_bytes:,} bytes, its record has {record.num_bytes:,}",
                where=str(path),
            )
        return record.offset

    return _table(value, locate, path)


def _content(stream: BinaryIO, record: archive.Record, path: Path, limit: int) -> bytes:
    if record.num_bytes > limit:
        raise CheckpointError(
            f"record `{record.name[:80]}` of {record.num_bytes:,} bytes is too large",
            where=str(path),
        )
    stream.seek(record.offset)
    return files.read_exactly(stream, record.num_bytes, path)


def _read_legacy(stream: BinaryIO, path: Path) -> TensorTable:
    size = files.file_size(stream)
    stream.seek(0)
    # The pickles stand before the storages; how long they are is known only by reading them.
    machine = Machine(
        files.read_exactly(stream, min(size, MAX_PICKLE_BYTES), path),
        _find,
        _reduce,
        _persistent,
    )
    if _load(machine, path) != _LEGACY_MAGIC:
        raise CheckpointError(
            "a pickle, but not one of torch.save; it was not run",
            where=str(path),
            hint="expected a checkpoint of the form torch.save writes",
        )
    protocol, system = _load(machine, path), _load(machine, path)
    if protocol != _LEGACY_PROTOCOL or not isinstance(system, dict):
        raise CheckpointError("an unknown version of torch.save's old format", where=str(path))
    if system.get("little_endian") is not True:
        raise UnsupportedError("the tensors are stored big-endian", where=str(path))
    value, keys = _load(machine, path), _load(machine, path)
    offsets = _legacy_offsets(stream, machine.position, _storages(value), keys, size, path)
    return _table(value, lambda storage: offsets[storage.key], path)


def _storages(value: object) -> dict[str, _Storage]:
    entries = value.values() if isinstance(value, dict) else ()
    return {e.storage.key: e.storage for e in entries if isinstance(e, _Tensor)}


def _check_storages(value: dict[Any, Any], path: Path) -> None:
    storages = _storages(value)
    for entry in value.values():
        if isinstance(entry, _Tensor) and storages[entry.storage.key] != entry.storage:
            raise CheckpointError(
                f"storage `{entry.storage.key[:80]}` has two descriptions", where=str(path)
            )


def _legacy_offsets(
    stream: BinaryIO,
    position: int,
    storages: Mapping[str, _Storage],
    keys: object,
    size: int,
    path: Path,
) -> dict[str, int]:
    if not isinstance(keys, list) or {k for k in keys if isinstance(k, str)} != storages.keys():
        raise CheckpointError("the list of storages does not fit the tensors", where=str(path))
    if len(keys) != len(storages):
        raise CheckpointError("a storage is listed twice", where=str(path))
    offsets = {}
    for key in keys:
        stream.seek(position)
        stored = int.from_bytes(files.read_exactly(stream, 8, path), "little")
        storage = storages[key]
        if stored != storage.num_elements:
            raise CheckpointError(
                f"storage `{key[:80]}` has {stored:,} elements, its tensors say"
                f" {storage.num_elements:,}",
                where=str(path),
            )
        offsets[key] = position + 8
        position += 8 + storage.dtype.num_bytes(storage.num_elements)
        if position > size:
            raise CheckpointError(
                f"the file ends {position - size:,} bytes early", where=str(path), hint=_DAMAGED
            )
    if position != size:
        raise CheckpointError("bytes follow the last storage", where=str(path), hint=_DAMAGED)
    return offsets


def _load(machine: Machine, path: Path) -> Any:
    try:
        return machine.load()
    except PickleDataError as error:
        raise CheckpointError(
            f"the pickle {error}", where=str(path), hint="it was read as data; nothing was run"
        ) from None


def _find(name: str) -> object:
    """An inert stand-in for `name`; anything but the names of plain tensors is refused."""
    if name in _CALLS or name in ("torch.Size", "collections.OrderedDict"):
        return Global(name)
    module, _, last = name.rpartition(".")
    if module in ("torch", "torch.storage") and last.endswith("Storage"):
        dtype = dtypes.by_storage(last)
        if dtype is not None:
            return _StorageType(dtype)
    if module == "torch" and dtypes.by_name(last) is not None:
        return _Opaque(name)
    raise PickleDataError(f"names `{name[:200]}`, which a checkpoint has no need of")


def _reduce(function: object, arguments: object) -> object:
    if not isinstance(function, Global) or not isinstance(arguments, tuple):
        raise PickleDataError("calls something that is no function")
    if function.name == "collections.OrderedDict":
        return _ordered(arguments)
    if function.name == "torch.Size":
        return arguments[0]
    return _CALLS[function.name](arguments)


def _ordered(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    pairs = arguments[0] if arguments else []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str | int)
        for pair in pairs
    ):
        raise PickleDataError("builds a dictionary of something else than pairs")
    return {pair[0]: pair[1] for pair in pairs}


def _rebuild_tensor(arguments: tuple[Any, ...]) -> _Tensor:
    storage, offset, shape, stride = arguments[:4]
    if (
        not isinstance(storage, _Storage)
        or not _is_sizes((offset,))
        or not _is_sizes(shape)
        or not _is_sizes(stride)
        or len(shape) != len(stride)
        or len(shape) > MAX_DIMENSIONS
    ):
        raise PickleDataError("describes a tensor by something else than sizes")
    count = element_count(shape)
    if count is None:
        raise PickleDataError(f"describes a tensor of shape {shape}")
    # The element farthest into the storage; a tensor without elements has none.
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if count and last >= storage.num_elements:
        raise PickleDataError(
            f"describes a tensor of shape {shape} that leaves its storage of"
            f" {storage.num_elements:,} elements"
        )
    return _Tensor(storage, offset, tuple(shape), tuple(stride))


def _rebuild_parameter(arguments: tuple[Any, ...]) -> _Tensor:
    if not isinstance(arguments[0], _Tensor):
        raise PickleDataError("makes a parameter of what is no tensor")
    return arguments[0]


# What a pickle may call; each gives an inert value.
_CALLS: dict[str, Callable[[tuple[Any, ...]], object]] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "io.BytesIO": lambda _: _Opaque("io.BytesIO"),
    "_io.BytesIO": lambda _: _Opaque("io.BytesIO"),
    "_codecs.encode": lambda _: _Opaque("bytes"),  # protocol 2 writes bytes as encoded text
}


def _persistent(value: object) -> _Storage:
    if not isinstance(value, tuple) or len(value) < 5 or value[0] != "storage":
        raise PickleDataError("refers to something outside that is no storage")
    _, kind, key, _, num_elements = value[:5]
    if len(value) > 5 and value[5] is not None:
        raise PickleDataError("describes a storage inside another one")
    if not isinstance(kind, _StorageType) or not isinstance(key, str):
        raise PickleDataError("describes a storage of an unknown type")
    if not _is_sizes((num_elements,)):
        raise PickleDataError("describes a storage by something else than its size")
    return _Storage(key, kind.dtype, num_elements)


def _is_sizes(value: object) -> bool:
    return isinstance(value, tuple) and all(
        type(size) is int and 0 <= size < 2**62 for size in value
    )


def _table(value: object, locate: Callable[[_Storage], int], path: Path) -> TensorTable:
    if not isinstance(value, dict):
        raise CheckpointError(
            f"expected a dictionary of tensors, found {_kind(value)}", where=str(path)
        )
    _check_storages(value, path)
    tensors: dict[str, TensorInfo] = {}
    other: dict[str, str] = {}
    for name, entry in value.items():
        if not isinstance(name, str):
            raise CheckpointError("a key of the dictionary is no text", where=str(path))
        if not isinstance(entry, _Tensor):
            other[name] = _kind(entry)
            continue
        dtype = entry.storage.dtype
        tensors[name] = TensorInfo(
            name,
            dtype,
            entry.shape,
            path,
            locate(entry.storage) + dtype.num_bytes(entry.offset),
            dtype.num_bytes(element_count(entry.shape) or 0),
            entry.stride,
        )
    if not tensors:
        raise CheckpointError(
            "the file holds no tensors"
            + (f", only {', '.join(f'`{n[:40]}`' for n in list(other)[:5])}" if other else ""),
            where=str(path),
            hint="a file with one tensor per name is expected, not a training state",
        )
    return TensorTable("pth", (path,), tensors, other=other)


def _kind(value: object) -> str:
    if isinstance(value, _Opaque):
        return value.kind
    if isinstance(value, Global):
        return value.name
    if isinstance(value, Blob):
        return f"{value.num_bytes} bytes"
    return type(value).__name__.lstrip("_").lower()
