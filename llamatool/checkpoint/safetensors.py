"""The safetensors format: headers, sharded folders and their index, without the library or torch.

A file is an 8-byte little-endian header length, a JSON header and the data. The header gives each
tensor's type, shape and byte range; this reader also demands what safe loaders should: unique
names, ranges that fill the data without hole or overlap, and sizes that agree.

Source: the format description in huggingface/safetensors README.md.
"""

import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from llamatool import dtypes
from llamatool.checkpoint import files
from llamatool.checkpoint.tensors import MAX_DIMENSIONS, TensorInfo, TensorTable, element_count
from llamatool.errors import CheckpointError
from llamatool.records import record

INDEX_NAME = "model.safetensors.index.json"
BIN_INDEX_NAME = "pytorch_model.bin.index.json"
SHARD_NAME = re.compile(r"[\w.-]+\.(safetensors|bin)", re.ASCII)
_NUMBERED = re.compile(r"(.+)-(\d{1,6})-of-(\d{1,6})\.safetensors", re.ASCII)
_DAMAGED = "the download or copy may be incomplete; fetch it again"


@record
class ShardIndex:
    """A `*.index.json`: which file of a folder holds which tensor."""

    path: Path
    weight_map: Mapping[str, str]
    total_size: int | None  # bytes, as the index states it

    @property
    def file_names(self) -> tuple[str, ...]:
        """Names of the shards, sorted, each once."""
        return tuple(sorted(set(self.weight_map.values())))

    @property
    def missing_files(self) -> tuple[str, ...]:
        """Names of the shards that are not in the folder."""
        return tuple(name for name in self.file_names if not (self.path.parent / name).exists())


def read_file(path: Path) -> TensorTable:
    """The tensors of one `.safetensors` file, from its header alone.

    Raises: CheckpointError if the header is damaged, ambiguous or does not fit the file.
    """
    with files.open_regular(path) as stream:
        size = files.file_size(stream)
        if size < 8:
            raise CheckpointError(
                f"expected a safetensors file, found {size} bytes",
                where=str(path),
                hint=_DAMAGED,
            )
        length = header_length(files.read_exactly(stream, 8, path), size, where=str(path))
        data = files.read_exactly(stream, length, path)
    return parse_header(data, path, size)


def header_length(prefix: bytes, size: int, *, where: str) -> int:
    """Bytes of the JSON header that the first 8 bytes announce.

    Raises: CheckpointError if a file of `size` bytes cannot hold it, or it is beyond 50 MB.
    """
    length = int.from_bytes(prefix[:8], "little")
    if length > size - 8:
        raise CheckpointError(
            f"the safetensors header claims {length:,} bytes, the file has {size:,}",
            where=where,
            hint=_DAMAGED,
        )
    if length > files.MAX_JSON_BYTES:
        raise CheckpointError(f"a safetensors header of {length:,} bytes is too large", where=where)
    return length


def parse_header(data: bytes, path: Path, size: int) -> TensorTable:
    """The tensors that the JSON header `data` of a file of `size` bytes describes."""
    where = str(path)
    header = files.parse_json(data, where=where, what="a safetensors header")
    metadata = _metadata(header.pop("__metadata__", {}), where)
    start = 8 + len(data)
    tensors = {name: _tensor(name, entry, path, start) for name, entry in header.items()}
    _check_ranges(tensors, start, size, where)
    return TensorTable("safetensors", (path,), tensors, metadata)


def read_index(path: Path) -> ShardIndex:
    """The index in `path`; every shard name in it is a plain file name.

    Raises: CheckpointError if a name could lead out of the folder.
    """
    return parse_index(files.read_json(path, "a shard index"), path)


def parse_index(content: Mapping[str, Any], path: Path) -> ShardIndex:
    """The index that the JSON object `content`, read from `path`, describes."""
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("the shard index has no `weight_map` object", where=str(path))
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not SHARD_NAME.fullmatch(name) or ".." in name:
            raise CheckpointError(
                f"`weight_map` puts `{tensor[:80]}` into `{str(name)[:80]}`, which is no plain name"
                " of a .safetensors or .bin file",
                where=str(path),
                hint="an index may only name files of its own folder; do not trust this download",
            )
    return ShardIndex(path, weight_map, _total_size(content))


def read_indexed(index: ShardIndex) -> TensorTable:
    """The tensors of all shards of `index`, after a check that index and shards agree.

    Raises: CheckpointError if a shard is missing, holds other tensors than the index says, or is
    a link that leads out of the folder (links of the hub cache into its `blobs` are accepted).
    """
    return join_shards(index, [_read_shard(shard_path(index, n)) for n in index.file_names])


def join_shards(index: ShardIndex, tables: Sequence[TensorTable]) -> TensorTable:
    """One table of all shards; `tables` in the order of `index.file_names`.

    Raises: CheckpointError if a shard holds other tensors than the index says.
    """
    in_index: dict[str, set[str]] = {}
    for tensor, name in index.weight_map.items():
        in_index.setdefault(name, set()).add(tensor)
    tensors: dict[str, TensorInfo] = {}
    for name, table in zip(index.file_names, tables, strict=True):
        _check_agreement(index, name, in_index[name], table.tensors.keys())
        tensors.update(table.tensors)
    return TensorTable(
        tables[0].format,
        tuple(path for table in tables for path in table.files),
        tensors,
        tables[0].metadata,
    )


def shard_path(index: ShardIndex, name: str) -> Path:
    """The path of the shard `name`, which lies in the index's folder or in its hub cache."""
    folder = index.path.parent
    path = folder / name
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError):
            raise CheckpointError("the symbolic links form a circle", where=str(path)) from None
        problem = files.unreadable(path, error)
        raise CheckpointError(
            f"the index names `{name}`: {problem.what}",
            where=str(index.path),
            hint="the download may be incomplete; fetch the missing shard",
        ) from None
    home = folder.resolve()
    if target.parent != home and target.parent != _hub_blobs(home):
        raise CheckpointError(
            f"`{name}` is a link to `{target}`, outside its folder",
            where=str(index.path),
            hint="only links of the hub cache are followed; copy the file into the folder",
        )
    return path


def read_folder(folder: Path) -> TensorTable | None:
    """The tensors of a folder in the Hugging Face layout, or None if it holds no weight files.

    The index decides where there is one; else `model.safetensors`; else all `.safetensors` files
    together; else PyTorch's `.bin` files in the same order.
    """
    if (folder / INDEX_NAME).exists():
        return read_indexed(read_index(folder / INDEX_NAME))
    if (folder / "model.safetensors").exists():
        return read_file(folder / "model.safetensors")
    paths = sorted(folder.glob("*.safetensors"))
    if paths:
        _check_numbering(paths)
        return _merge([read_file(path) for path in paths])
    if (folder / BIN_INDEX_NAME).exists():
        return read_indexed(read_index(folder / BIN_INDEX_NAME))
    if (folder / "pytorch_model.bin").exists():
        return _read_shard(folder / "pytorch_model.bin")
    return None


def _metadata(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise CheckpointError("`__metadata__` is no object of strings", where=where)
    return value


def _tensor(name: str, entry: Any, path: Path, start: int) -> TensorInfo:
    where = f"{path}, tensor `{name[:200]}`"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError("expected `dtype`, `shape` and `data_offsets`", where=where)
    dtype = dtypes.by_safetensors(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"unknown dtype `{str(entry['dtype'])[:80]}`", where=where)
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"`shape` is {_short(shape)}", where=where)
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"`data_offsets` is {_short(offsets)}", where=where)
    count = element_count(tuple(shape))
    if count is None:
        raise CheckpointError(f"`shape` {_short(shape)} has too many elements", where=where)
    num_bytes = offsets[1] - offsets[0]
    if dtype.num_bytes(count) != num_bytes:
        raise CheckpointError(
            f"shape {_short(shape)} of {dtype.name} takes {dtype.num_bytes(count):,} bytes, "
            f"`data_offsets` gives it {num_bytes:,}",
            where=where,
        )
    return TensorInfo(name, dtype, tuple(shape), path, start + offsets[0], num_bytes)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size <= 2**63 for size in value
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_ranges(tensors: Mapping[str, TensorInfo], start: int, size: int, where: str) -> None:
    position = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.num_bytes)):
        if tensor.offset != position:
            problem = "overlaps" if tensor.offset < position else "leaves a hole after"
            raise CheckpointError(
                f"tensor `{tensor.name[:200]}` {problem} the one before it", where=where
            )
        position += tensor.num_bytes
    if position > size:
        raise CheckpointError(
            f"the header describes {position:,} bytes, the file has {size:,}",
            where=where,
            hint=_DAMAGED,
        )
    if position < size:
        raise CheckpointError(
            f"{size - position:,} bytes follow the last tensor", where=where, hint=_DAMAGED
        )


def _total_size(content: Mapping[str, Any]) -> int | None:
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some tools write it as a float.
    return int(total) if isinstance(total, int | float) and not isinstance(total, bool) else None


def _read_shard(path: Path) -> TensorTable:
    if path.suffix == ".bin":
        from llamatool.checkpoint import pth  # only where there are .bin shards

        return pth.read_file(path)
    return read_file(path)


def _check_agreement(index: ShardIndex, file: str, expected: set[str], found: Set[str]) -> None:
    missing = expected - found
    if missing:
        raise CheckpointError(
            f"`{file}` lacks `{min(missing)[:200]}`, which the index puts there"
            + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""),
            where=str(index.path),
            hint="index and shards belong to different saves; fetch both again",
        )
    extra = found - expected
    if extra:
        raise CheckpointError(
            f"`{file}` holds `{min(extra)[:200]}`, which the index does not put there"
            + (f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""),
            where=str(index.path),
            hint="index and shards belong to different saves; fetch both again",
        )


def _hub_blobs(folder: Path) -> Path | None:
    """The hub cache's folder of contents, if `folder` is a snapshot or lies in one."""
    for place in (folder, *folder.parents):
        if place.parent.name == "snapshots":
            return place.parent.parent / "blobs"
    return None


def _check_numbering(paths: list[Path]) -> None:
    matches = [_NUMBERED.fullmatch(path.name) for path in paths]
    numbered = [match for match in matches if match]
    if not numbered or len(numbered) < len(matches):
        return
    have = {(match[1], int(match[2])) for match in numbered}
    for stem, total in {(match[1], int(match[3])) for match in numbered}:
        missing = next((n for n in range(1, total + 1) if (stem, n) not in have), None)
        if missing is not None:
            raise CheckpointError(
                f"shard {missing} of {total} is missing",
                where=str(paths[0].parent),
                hint="the download may be incomplete; fetch the missing shard",
            )


def _merge(tables: list[TensorTable]) -> TensorTable:
    tensors: dict[str, TensorInfo] = {}
    for table in tables:
        for name, tensor in table.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor `{name[:200]}` is in `{tensors[name].file.name}` and in"
                    f" `{tensor.file.name}`",
                    where=str(tensor.file.parent),
                    hint="keep the files of one save, or name one file",
                )
            tensors[name] = tensor
    return TensorTable(
        "safetensors",
        tuple(path for table in tables for path in table.files),
        tensors,
        tables[0].metadata,
    )
