"""From stored tensors to new files: every byte range of a conversion, known before it starts.

A tensor of the model is seen as a matrix. Each layout keeps rectangles of it at known places:
whole (Hugging Face, GGUF), split by rows or columns over ranks, fused with others (Meta). The
plan lays the rectangles of the source over those of the destination; where they meet is a Block,
a few contiguous reads and writes. Nothing here reads or writes a byte.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from llamatool import dtypes
from llamatool.checkpoint import names, writers
from llamatool.checkpoint.layout import Holding, Resolved, shares_of
from llamatool.checkpoint.names import Part, TensorSpec
from llamatool.checkpoint.tensors import TensorInfo
from llamatool.checkpoint.writers import FileLayout, Target
from llamatool.config.model import ModelConfig, Note
from llamatool.dtypes import DType
from llamatool.errors import UnsupportedError

Order = Literal["pairs", "halves"]  # of the rows of a rotated head: Meta's and Hugging Face's


Stored = TypeVar("Stored", TensorInfo, Target)


@dataclass(frozen=True, slots=True)
class Place(Generic[Stored]):
    """A rectangle of a tensor's matrix and where it is kept."""

    stored: Stored
    row: int
    num_rows: int
    column: int
    num_columns: int
    first: int  # element of the stored tensor at which the rectangle begins
    pitch: int  # elements of the stored tensor from one row to the next


Read = Place[TensorInfo]
Write = Place[Target]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a matrix that come from the same reads and go to the same writes."""

    name: str  # Hugging Face's, for progress and errors
    row: int
    num_rows: int
    num_columns: int
    reads: tuple[Read, ...]  # side by side, the first column first; (): zeros
    writes: tuple[Write, ...]
    dtype: DType  # written
    reorder: tuple[Order, Order] | None = None  # of the rows within each head, from and to
    head_dim: int = 0
    transposed: bool = False  # what is read is written with its axes exchanged


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Where all tensors go."""

    resolved: Resolved
    files: tuple[FileLayout, ...]
    blocks: tuple[Block, ...]
    notes: tuple[Note, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors that will be written."""
        return sum(target.num_bytes for file in self.files for target in file.targets)


def matrix_of(spec: TensorSpec) -> tuple[int, int]:
    """Rows and columns of a tensor's matrix: leading axes are rows, the last one is columns.

    Example: 3-D expert weights (16, 5120, 16384) -> (81920, 16384); a norm -> (4096, 1).
    """
    if spec.operation == "tiles":
        cell = spec.ways[0][0].shape
        columns = math.prod(cell[2:])
        return spec.num_elements // columns, columns
    if len(spec.shape) == 1:
        return spec.shape[0], 1
    if len(spec.shape) == 2 or spec.join_axis == 2 or spec.name.endswith("experts.down_proj"):
        return spec.num_elements // spec.shape[-1], spec.shape[-1]
    return spec.shape[0], spec.num_elements // spec.shape[0]


# ---- rectangles of Meta's layout ----


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle of the matrix within the tensor `part` of one rank."""

    part: int  # index of the part
    rank: int
    row: int
    num_rows: int
    column: int
    num_columns: int
    first: int  # element of the rank's tensor
    pitch: int


def rectangles(spec: TensorSpec, parts: Sequence[Part], shares: int) -> Iterator[Rectangle]:
    """How Meta's `shares` files together hold the matrix of `spec`."""
    rows, columns = matrix_of(spec)
    if spec.operation == "tiles":
        yield from _tile_rectangles(spec, parts[0], columns)
        return
    if spec.operation == "transpose":
        yield Rectangle(0, 0, 0, rows, 0, columns, 0, rows)
        return
    row = column = 0
    for number, part in enumerate(parts):
        part_rows, part_columns = _part_matrix(part, columns)
        for rank in range(shares if part.axis is not None else 1):
            for piece in _shares(part, part_rows, part_columns, rank, shares):
                yield replace(piece, part=number, row=piece.row + row, column=piece.column + column)
        if spec.join_axis:
            column += part_columns
        else:
            row += part_rows


def _part_matrix(part: Part, columns: int) -> tuple[int, int]:
    if len(part.shape) == 1:
        return part.shape[0], 1
    return math.prod(part.shape[:-1]), part.shape[-1]


def _shares(part: Part, rows: int, columns: int, rank: int, shares: int) -> Iterator[Rectangle]:
    above = part.rows(shares)[0]
    if part.axis is None:
        yield Rectangle(0, 0, 0, rows, 0, columns, above * columns, columns)
    elif part.axis == 0:
        share = rows // shares
        yield Rectangle(0, rank, rank * share, share, 0, columns, above * columns, columns)
    elif part.axis == len(part.shape) - 1:
        width = columns // shares
        yield Rectangle(0, rank, 0, rows, rank * width, width, above * width, width)
    else:  # the middle axis of an expert weight: each expert's rows are shared out
        experts, height = part.shape[0], part.shape[1]
        share = height // shares
        for expert in range(experts):
            row = expert * height + rank * share
            yield Rectangle(0, rank, row, share, 0, columns, expert * share * columns, columns)


def _tile_rectangles(spec: TensorSpec, part: Part, columns: int) -> Iterator[Rectangle]:
    slots = part.shape[0]
    for (number, slot), (y, x) in names.tile_cells(spec.aspect_ratios, slots).items():
        cell = y * part.shape[1] + x
        yield Rectangle(0, 0, number * slots + slot, 1, 0, columns, cell * columns, columns)


# ---- the overlay ----


def reads_of(holding: Holding) -> tuple[Read, ...]:
    """Where the matrix of a stored tensor is read from."""
    spec = holding.spec
    if not holding.parts:
        rows, columns = matrix_of(spec)
        return (Place(holding.infos[0][0], 0, rows, 0, columns, 0, columns),)
    return tuple(
        Place(
            holding.infos[r.part][r.rank],
            *(r.row, r.num_rows, r.column, r.num_columns, r.first, r.pitch),
        )
        for r in rectangles(spec, holding.parts, holding.num_shards)
    )


def overlay(
    spec: TensorSpec,
    reads: Sequence[Read],
    writes: Sequence[Write],
    columns: int,
    reorder: tuple[Order, Order] | None,
) -> Iterator[Block]:
    """The blocks that fill all `writes` from `reads`, in the order of the rows."""
    head_dim = matrix_of(spec)[0] // spec.num_heads if spec.num_heads else 0
    cuts = sorted(_edges(reads) | _edges(writes))
    sources, sinks = _Sweep(reads), _Sweep(writes)
    for start, stop in itertools.pairwise(cuts):
        found = sorted(sources.at(start), key=lambda read: read.column)
        wanted = sinks.at(start)
        if wanted:
            yield Block(
                spec.name,
                start,
                stop - start,
                columns,
                tuple(found),
                tuple(wanted),
                wanted[0].stored.dtype,
                reorder,
                head_dim,
            )


AnyPlace = TypeVar("AnyPlace", Read, Write)


def _edges(places: Iterable[AnyPlace]) -> set[int]:
    return {edge for place in places for edge in (place.row, place.row + place.num_rows)}


class _Sweep(Generic[AnyPlace]):
    """The rectangles that cover a row, for rows that come in ascending order."""

    def __init__(self, places: Iterable[AnyPlace]) -> None:
        self._waiting: list[AnyPlace] = sorted(places, key=lambda p: p.row, reverse=True)
        self._active: list[AnyPlace] = []

    def at(self, row: int) -> list[AnyPlace]:
        self._active = [p for p in self._active if p.row + p.num_rows > row]
        while self._waiting and self._waiting[-1].row <= row:
            self._active.append(self._waiting.pop())
        return list(self._active)


# ---- destinations ----


def plan_huggingface(resolved: Resolved, *, dtype: DType | None, shard_bytes: int) -> TensorPlan:
    """The plan for one or more safetensors files.

    Args: dtype: of all tensors written; None keeps each one's own. shard_bytes: of a file, which
    only a single larger tensor exceeds.
    """
    specs = [
        spec
        for spec in names.tensor_specs(resolved.checkpoint.config)
        if spec.name in resolved.holdings
    ]
    targets = [
        Target(spec.name, _written(resolved.holdings[spec.name], dtype), spec.shape)
        for spec in specs
    ]
    shards = _shard(targets, shard_bytes)
    layouts = []
    for number, shard in enumerate(shards, start=1):
        name = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        layouts.append(writers.safetensors_layout(name, shard))
    placed = {target.name: target for layout in layouts for target in layout.targets}
    blocks: list[Block] = []
    for spec in specs:
        rows, columns = matrix_of(spec)
        write = Place(placed[spec.name], 0, rows, 0, columns, 0, columns)
        blocks += _blocks(resolved, spec, [write], "halves")
    return TensorPlan(resolved, tuple(layouts), tuple(blocks), resolved.notes)


def plan_meta(resolved: Resolved, *, dtype: DType | None, num_shards: int) -> TensorPlan:
    """The plan for `num_shards` files of Meta's layout.

    Raises: UnsupportedError if the model has tensors that Meta's code does not know, or sizes
    that the shards do not divide, with the largest number that works.
    """
    config = resolved.checkpoint.config
    specs = names.tensor_specs(config)
    parts_of = {spec.name: _meta_parts(spec, resolved) for spec in specs}
    check_divisible(config, num_shards)
    targets: dict[str, Target] = {}
    for spec in specs:
        shares, _ = shares_of(spec, config, num_shards)
        for part in parts_of[spec.name]:
            written = _written(_holding(resolved, spec), dtype)
            targets.setdefault(part.name, Target(part.name, written, part.stored_shape(shares)))
    layouts = [
        writers.pth_layout(f"consolidated.{rank:02d}.pth", list(targets.values()))
        for rank in range(num_shards)
    ]
    placed = [{target.name: target for target in layout.targets} for layout in layouts]
    blocks: list[Block] = []
    for spec in specs:
        writes = _meta_writes(spec, parts_of[spec.name], config, placed)
        blocks += _blocks(resolved, spec, writes, "pairs")
        blocks += _unreachable_cells(resolved, spec, parts_of[spec.name], placed)
    return TensorPlan(resolved, tuple(layouts), tuple(blocks), resolved.notes)


def check_divisible(config: ModelConfig, num_shards: int) -> None:
    """Raises UnsupportedError where a size is not divided by the shards, with what would work."""
    specs = names.tensor_specs(config)
    problem = _indivisible(specs, config, num_shards)
    if problem is not None:
        fitting = (n for n in range(num_shards, 0, -1) if _indivisible(specs, config, n) is None)
        raise UnsupportedError(
            problem, hint=f"the largest number that works is --mp {next(fitting)}"
        )


def _indivisible(specs: Iterable[TensorSpec], config: ModelConfig, number: int) -> str | None:
    vision = config.vision.num_attention_heads if config.vision else number
    for heads, what in (
        (config.num_attention_heads, "heads"),
        (vision, "heads of the image tower"),
    ):
        if heads % number:
            return f"{heads} {what} cannot be shared by {number} shards"
    for spec in specs:
        try:
            shares, _ = shares_of(spec, config, number)
        except UnsupportedError as error:
            return error.what
        for part in spec.ways[0] if spec.ways else ():
            if part.axis is not None and part.shape[part.axis] % shares:
                return (
                    f"`{part.name}` has the size {part.shape[part.axis]}, which {number} shards do"
                    " not divide"
                )
            if part.num_rows_total is not None and shares < number:
                return f"`{part.name}` holds {config.num_key_value_heads} key/value heads"
    return None


def _meta_parts(spec: TensorSpec, resolved: Resolved) -> tuple[Part, ...]:
    """Meta's tensors for `spec`: split as the source has them, else as published."""
    if not spec.ways:
        raise UnsupportedError(
            f"Meta's layout has no place for `{spec.name}`",
            hint="models with biases or weighted q/k norms stay in the Hugging Face layout",
        )
    published = spec.ways[0]
    stored = _holding(resolved, spec).parts
    if spec.name.endswith("embed_tokens.weight") and stored:
        return (replace(published[0], axis=stored[0].axis), *published[1:])
    return published


def _meta_writes(
    spec: TensorSpec,
    parts: Sequence[Part],
    config: ModelConfig,
    placed: Sequence[Mapping[str, Target]],
) -> list[Write]:
    shares, repeat = shares_of(spec, config, len(placed))
    writes: list[Write] = []
    seen: set[int] = set()
    for r in rectangles(spec, parts, shares):
        if spec.operation == "tiles":  # the table by ratio repeats a cell for several ratios
            if r.first in seen:
                continue
            seen.add(r.first)
        part = parts[r.part]
        ranks = range(len(placed))
        if part.axis is not None:
            ranks = range(r.rank * repeat, (r.rank + 1) * repeat)
        writes += [
            Place(
                placed[rank][part.name],
                *(r.row, r.num_rows, r.column, r.num_columns, r.first, r.pitch),
            )
            for rank in ranks
        ]
    return writes


def _blocks(
    resolved: Resolved, spec: TensorSpec, writes: Sequence[Write], order: Order
) -> list[Block]:
    holding = _holding(resolved, spec)
    reads: Sequence[Read] = reads_of(holding)
    source_order: Order = "halves" if resolved.checkpoint.layout == "huggingface" else "pairs"
    rows, columns = matrix_of(spec)
    if spec.operation in ("tiles", "transpose") and order == "pairs" and holding.parts:
        return _as_it_is(spec, holding, writes)
    if spec.operation == "transpose" and (holding.parts or order == "pairs"):
        stored_rows, stored_columns = (columns, rows) if holding.parts else (rows, columns)
        read = Place(reads[0].stored, 0, stored_rows, 0, stored_columns, 0, stored_columns)
        dtype = writes[0].stored.dtype
        whole = (spec.name, 0, stored_rows, stored_columns, (read,), tuple(writes), dtype)
        return [Block(*whole, transposed=True)]
    turned = spec.operation == "permute" and source_order != order
    return list(overlay(spec, reads, writes, columns, (source_order, order) if turned else None))


def _as_it_is(spec: TensorSpec, holding: Holding, writes: Sequence[Write]) -> list[Block]:
    """From Meta's layout to Meta's: every rank's copy of the whole tensor, in Meta's own order."""
    part = holding.parts[0]
    columns = part.shape[-1]
    rows = math.prod(part.shape) // columns
    targets = {id(write.stored): write.stored for write in writes}
    whole = (0, rows, 0, columns, 0, columns)
    reads: list[Read] = [Place(holding.infos[0][0], *whole)]
    sinks: list[Write] = [Place(target, *whole) for target in targets.values()]
    return list(overlay(replace(spec, num_heads=0), reads, sinks, columns, None))


def _unreachable_cells(
    resolved: Resolved,
    spec: TensorSpec,
    parts: Sequence[Part],
    placed: Sequence[Mapping[str, Target]],
) -> list[Block]:
    """Zeros for the cells of Meta's tile table that belong to no aspect ratio."""
    if spec.operation != "tiles" or _holding(resolved, spec).parts:
        return []
    columns = matrix_of(spec)[1]
    part = parts[0]
    used = {
        y * part.shape[1] + x
        for y, x in names.tile_cells(spec.aspect_ratios, part.shape[0]).values()
    }
    blocks = []
    for cell in range(part.shape[0] * part.shape[1]):
        if cell not in used:
            writes: list[Write] = [
                Place(targets[part.name], cell, 1, 0, columns, cell * columns, columns)
                for targets in placed
            ]
            dtype = writes[0].stored.dtype
            blocks.append(Block(spec.name, cell, 1, columns, (), tuple(writes), dtype))
    return blocks


def _holding(resolved: Resolved, spec: TensorSpec) -> Holding:
    """The stored tensor behind `spec`; a tied output table is read from the input table."""
    return resolved.holdings[spec.repeats or spec.name]


def _written(holding: Holding, dtype: DType | None) -> DType:
    if dtype is not None:
        return dtype
    if holding.dtype.block_elements > 1:  # the exact plain form of a quantised tensor
        return FLOAT32
    return holding.dtype


def _float32() -> DType:
    found = dtypes.by_name("float32")
    assert found is not None
    return found


FLOAT32 = _float32()


def _shard(targets: Sequence[Target], shard_bytes: int) -> list[list[Target]]:
    shards: list[list[Target]] = [[]]
    filled = 0
    for target in targets:
        if shards[-1] and filled + target.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(target)
        filled += target.num_bytes
    return shards
