"""A checkpoint's tensors as the decoder's parameters, whichever layout they are stored in.

Which stored tensors make up a parameter, and how, stands in checkpoint/names.py; this file only
carries it out: join the shares of Meta's ranks, exchange the rows of q and k between the two
RoPE layouts, transpose, tabulate tile positions by aspect ratio. One tensor at a time, so that
loading needs the memory of the weights and of one tensor more.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from llamatool.checkpoint.names import (
    Part,
    TensorSpec,
    canonical_name,
    drop_reason,
    odd_name,
    tensor_specs,
    tile_cells,
)
from llamatool.checkpoint.tensors import TensorInfo, TensorTable
from llamatool.config.model import ModelConfig
from llamatool.errors import CheckpointError, UnsupportedError
from llamatool.model.linear import WHOLE
from llamatool.model.ranks import Cut
from llamatool.model.storage import Storage

MAX_LISTED = 30  # names that an error lists in full


class Weights:
    """The tensors of one checkpoint by parameter name, checked as a whole before any is read."""

    def __init__(
        self, config: ModelConfig, tables: Sequence[TensorTable], *, where: str, as_stored: bool
    ) -> None:
        """Finds every tensor and compares all names and shapes.

        Args: as_stored: leaves the rows of q and k in the order of the file (see load.py).
        Raises: CheckpointError that lists everything missing, unknown or of the wrong shape;
        UnsupportedError for adapters and packed weights.
        """
        self.as_stored = as_stored
        self._storage = Storage()
        self._sources = _Finder(config, tables, where).sources()

    def read(
        self,
        name: str,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        cut: Cut | None = None,
    ) -> Tensor:
        """The parameter `name`, or a part of it, converted to `dtype`, on `device`.

        On a CPU and in the stored dtype this is the mapped file itself where the layout allows.
        Of a part, no more is read than lies in it.
        """
        spec, ways = self._sources[name]
        whole = _join([self._stored(source) for source in ways], spec.join_axis)
        if cut is not None:
            ranges = [whole.narrow(cut.axis, first, stop) for first, stop in cut.ranges]
            whole = _join(ranges, cut.axis)
        tensor = whole.read(dtype)
        # Meta's layout and GGUF differ from Hugging Face's by an operation, and by nothing else.
        if ways[0].operation == "permute" and not self.as_stored:
            head_dim = spec.shape[0] // spec.num_heads
            tensor = _pairs_to_halves(tensor, len(tensor) // head_dim)
        elif ways[0].operation == "transpose":
            tensor = tensor.T.contiguous()
        elif ways[0].operation == "tiles":
            tensor = _by_aspect_ratio(tensor, spec)
        return (tensor if cut is not None else tensor.reshape(spec.shape)).to(device)

    def fill(
        self, module: nn.Module, prefix: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Gives every parameter of `module` its tensor, whose name begins with `prefix`.

        Of a parameter that this rank has a part of, that part; see model/linear.py.
        """
        for name, _ in list(module.named_parameters()):
            path, _, last = name.rpartition(".")
            cut = getattr(module.get_submodule(path), "cuts", WHOLE).get(last)
            assign(module, name, self.read(prefix + name, dtype, device, cut=cut))

    def _stored(self, source: "_Source") -> "_Stored | _Pieces":
        """The matrix as it lies in the files, nothing read yet."""
        shares = [_Stored(self._storage, info, source) for info in source.shares]
        return _join(shares, source.axis or 0)


def assign(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Makes `tensor` the parameter `name` of `module`, in place of the one it was built with."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    setattr(owner, last, nn.Parameter(tensor, requires_grad=False))


def parameter_name(name: str) -> str:
    """Our name of the tensor that Hugging Face calls `name`.

    Example: `language_model.model.layers.0.feed_forward.router.weight` ->
    `layers.0.mlp.router.weight`.
    """
    name = name.removeprefix("language_model.").removeprefix("model.")
    return name.replace(".feed_forward.", ".mlp.")


class _Source:
    """A matrix in the files: the shares of all ranks, and the rows of each that belong to it."""

    def __init__(
        self,
        shares: Sequence[TensorInfo],
        share_shape: tuple[int, ...],
        operation: str,
        *,
        axis: int | None = None,
        rows: tuple[int, int] | None = None,
    ) -> None:
        self.shares = tuple(shares)
        self.share_shape = share_shape
        self.operation = operation
        self.axis = axis
        self.rows = rows


class _Stored:
    """What one file holds of a matrix, or a part of that; read when it is asked for."""

    def __init__(self, storage: Storage, info: TensorInfo, source: _Source) -> None:
        self.shape: tuple[int, ...] = source.share_shape
        self._storage = storage
        self._info = info
        self._source = source
        self._cuts: tuple[tuple[int, int, int], ...] = ()

    def narrow(self, axis: int, first: int, stop: int) -> "_Stored":
        """The part from `first` to `stop` of an axis."""
        part = copy(self)
        part._cuts = (*self._cuts, (axis, first, stop))
        part.shape = (*self.shape[:axis], stop - first, *self.shape[axis + 1 :])
        return part

    def read(self, dtype: torch.dtype) -> Tensor:
        """The mapped file itself if it is of this dtype and in one stretch, else a copy."""
        rows, shape, cuts = self._source.rows, self._source.share_shape, self._cuts
        columns = None
        if shape == self._info.shape and cuts:  # so that blocks of other ranks stay packed
            axis, first, stop = cuts[0]
            if axis == 0 and rows is None:
                rows, cuts = (first, stop), cuts[1:]
                shape = (stop - first, *shape[1:])
            elif axis == len(shape) - 1:
                columns, cuts = (first, stop), cuts[1:]
                shape = (*shape[:-1], stop - first)
        tensor = self._storage.read(self._info, dtype, rows=rows, columns=columns).reshape(shape)
        for axis, first, stop in cuts:
            tensor = tensor.narrow(axis, first, stop - first)
        tensor = tensor.to(dtype)
        return tensor.contiguous() if self._cuts else tensor


class _Pieces:
    """Matrices side by side along an axis, nothing of them read yet."""

    def __init__(self, pieces: "Sequence[_Stored | _Pieces]", axis: int) -> None:
        self.pieces = pieces
        self.axis = axis
        shape: tuple[int, ...] = pieces[0].shape
        size = sum(piece.shape[axis] for piece in pieces)
        self.shape: tuple[int, ...] = (*shape[:axis], size, *shape[axis + 1 :])

    def narrow(self, axis: int, first: int, stop: int) -> "_Stored | _Pieces":
        """The part from `first` to `stop` of an axis, of the pieces that it touches."""
        if axis != self.axis:
            return _join([piece.narrow(axis, first, stop) for piece in self.pieces], self.axis)
        parts, start = [], 0
        for piece in self.pieces:
            size = piece.shape[axis]
            low, high = max(first - start, 0), min(stop - start, size)
            if low < high:
                parts.append(piece if (low, high) == (0, size) else piece.narrow(axis, low, high))
            start += size
        return _join(parts or [self.pieces[0].narrow(axis, 0, 0)], axis)

    def read(self, dtype: torch.dtype) -> Tensor:
        """All pieces as one tensor."""
        return torch.cat([piece.read(dtype) for piece in self.pieces], dim=self.axis)


def _join(pieces: "Sequence[_Stored | _Pieces]", axis: int) -> "_Stored | _Pieces":
    return pieces[0] if len(pieces) == 1 else _Pieces(pieces, axis)


class _Finder:
    """Finds the sources of every parameter and collects what does not fit."""

    def __init__(self, config: ModelConfig, tables: Sequence[TensorTable], where: str) -> None:
        self.config = config
        self.tables = tables
        self.where = where
        self.by_name = self._canonical()
        self.missing: list[str] = []
        self.ill_shaped: list[str] = []
        self.used: set[str] = set()

    def sources(self) -> dict[str, tuple[TensorSpec, list[_Source]]]:
        packed = odd_name(name for table in self.tables for name in table.tensors)
        if packed is not None:
            name, what, hint = packed
            raise UnsupportedError(f"`{name[:200]}` is {what}", where=self.where, hint=hint)
        found = {}
        for spec in tensor_specs(self.config):
            sources = self._meta(spec) if self.config.source_format == "meta" else self._whole(spec)
            if sources:
                found[parameter_name(spec.name)] = (spec, sources)
        self._report(self._unknown())
        return found

    def _whole(self, spec: TensorSpec) -> list[_Source]:
        """A Hugging Face folder or a GGUF file."""
        gguf = self.config.source_format == "gguf"
        name = spec.gguf if gguf else spec.name
        info = self.by_name.get(name) if name else None
        if info is None:
            if spec.repeats is None:
                self.missing.append(name or spec.name)
            return []
        self.used.add(info.name)
        if info.shape != spec.shape:
            self.ill_shaped.append(_misfit(info, spec.shape))
        return [_Source([info], info.shape, spec.operation if gguf else "copy")]

    def _canonical(self) -> dict[str, TensorInfo]:
        tensors = self.tables[0].tensors
        if self.config.source_format == "huggingface":
            return {canonical_name(name, self.config): info for name, info in tensors.items()}
        return dict(tensors)

    def _meta(self, spec: TensorSpec) -> list[_Source]:
        """Meta's files: the first spelling that every rank has."""
        for way in spec.ways:
            if all(part.name in table.tensors for part in way for table in self.tables):
                return [self._part(part, spec.operation) for part in way]
        if spec.repeats is None:
            names = [part.name for part in spec.ways[0]] if spec.ways else [spec.name]
            self.missing += names
        return []

    def _part(self, part: Part, operation: str) -> _Source:
        num_ranks = len(self.tables)
        infos = [table.tensors[part.name] for table in self.tables]
        self.used.add(part.name)
        part = _as_split(part, infos, num_ranks)
        expected = part.stored_shape(num_ranks)
        for rank, info in enumerate(infos):
            if info.shape != expected:
                where = f"rank {rank}: " if num_ranks > 1 else ""
                self.ill_shaped.append(where + _misfit(info, expected))
        return _Source(
            infos if part.axis is not None else infos[:1],
            part.shard_shape(num_ranks),
            operation,
            axis=part.axis,
            rows=part.rows(num_ranks) if part.num_rows_total is not None else None,
        )

    def _unknown(self) -> list[str]:
        return sorted(
            {
                name
                for table in self.tables
                for name, info in table.tensors.items()
                if name not in self.used and drop_reason(name) is None and info.num_elements
            }
        )

    def _report(self, unknown: Sequence[str]) -> None:
        parts = [
            f"{len(names)} {what}: {', '.join(_listed(names))}"
            for what, names in (
                ("missing", self.missing),
                ("unknown", unknown),
                ("of the wrong shape", self.ill_shaped),
            )
            if names
        ]
        if parts:
            raise CheckpointError(
                "the tensors are not those of the configuration; " + "; ".join(parts),
                where=self.where,
                hint="see `llamatool inspect` for the whole comparison",
            )


def _as_split(part: Part, infos: Sequence[TensorInfo], num_ranks: int) -> Part:
    """The part as these files split it: Llama 1 and 2 split the input table by columns."""
    if part.axis is None or len(part.shape) != 2 or not part.name.endswith("tok_embeddings.weight"):
        return part
    for axis in (0, 1):
        other = replace(part, axis=axis)
        if infos[0].shape == other.stored_shape(num_ranks):
            return other
    return part


def _pairs_to_halves(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from pairs (2i, 2i + 1) to (i, i + head_dim / 2), in one pass."""
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    rest = tensor.shape[1:]
    source = tensor.reshape(num_heads, -1, 2, *rest)
    out.view(num_heads, 2, -1, *rest).transpose(1, 2).copy_(source)
    return out


def _by_aspect_ratio(cells: Tensor, spec: TensorSpec) -> Tensor:
    """Meta's tile positions by row and column, [T, T, ...], as Hugging Face's table by ratio."""
    tiles = cells.shape[0]
    table = cells.new_zeros(spec.shape[0], tiles, cells[0, 0].numel())
    for (number, slot), (row, column) in tile_cells(spec.aspect_ratios, tiles).items():
        table[number, slot] = cells[row, column].flatten()
    return table


def _misfit(info: TensorInfo, expected: tuple[int, ...]) -> str:
    return f"{info.name} has {list(info.shape)} instead of {list(expected)}"


def _listed(names: Sequence[str]) -> Iterator[str]:
    yield from (f"`{name[:200]}`" for name in names[:MAX_LISTED])
    if len(names) > MAX_LISTED:
        yield f"and {len(names) - MAX_LISTED} more"
