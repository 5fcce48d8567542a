"""Proof of a conversion, and comparison of any two checkpoints, by another way than the engine's.

The engine lays rectangles over each other (plan.py). Here a tensor is looked at from the other
side: for rows asked for in the order of Hugging Face's layout, index arithmetic says which element
of which stored tensor each one is. Both read the table of names, and nothing else in common.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamatool.checkpoint import names
from llamatool.checkpoint.cast import cast, to_float
from llamatool.checkpoint.convert import Task, first_element
from llamatool.checkpoint.layout import Holding, Resolved
from llamatool.checkpoint.names import TensorSpec
from llamatool.checkpoint.plan import FLOAT32, Read
from llamatool.checkpoint.rawio import Sources
from llamatool.checkpoint.tensors import TensorInfo
from llamatool.dtypes import DType
from llamatool.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamatool.checkpoint.cast import Raw

    Rows = NDArray[np.signedinteger[Any]]

CHUNK_ELEMENTS = 2 << 20

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, tensor


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is not the same in two checkpoints."""

    name: str  # Hugging Face's
    kind: str  # "values", "shape", "dtype", "only in the first", "only in the second"
    num_different: int = 0  # elements
    num_elements: int = 0
    max_difference: float | None = None  # absolute, between finite values


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two checkpoints, tensor by tensor."""

    num_tensors: int  # compared
    num_elements: int
    num_rounded: int  # tensors that are equal only after the wider type is narrowed
    differences: tuple[Difference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether every tensor is the same, bit for bit or after narrowing."""
        return not self.differences


def compare(first: Resolved, second: Resolved, progress: Progress | None = None) -> Comparison:
    """Compares all tensors, whatever the layouts, in pieces of a few megabytes.

    Tensors of the same type are compared bit by bit; of two types the wider one is narrowed, and
    the largest difference of the values is told where that does not make them equal.
    """
    specs = {h.spec.name: h.spec for h in first.holdings.values()}
    total = sum(spec.num_elements for spec in specs.values())
    differences: list[Difference] = []
    done = num_rounded = num_tensors = 0
    with Values(first) as left, Values(second) as right:
        for name, spec in specs.items():
            if name not in second.holdings:
                differences.append(Difference(name, "only in the first"))
                continue
            if progress is not None:
                progress(done, total, name)
            num_tensors += 1
            found = _compare(name, left, right)
            if found is not None:
                differences.append(found)
            elif left.dtype(name) != right.dtype(name):
                num_rounded += 1
            done += spec.num_elements
    only_right = [n for n in second.holdings if n not in first.holdings]
    differences += [Difference(name, "only in the second") for name in only_right]
    return Comparison(num_tensors, done, num_rounded, tuple(differences))


def check_pieces(
    tasks: Sequence[Task],
    sums: Sequence[tuple[int, ...] | None],
    source: Resolved,
    output: Resolved,
    *,
    num_threads: int = 2,
    progress: Progress | None = None,
) -> str | None:
    """What is wrong with `output`, or None if it is proven to hold the source's pieces.

    Each piece of a stored tensor was summed up when it was read. Its elements are looked up in
    the output by index arithmetic, put into the source's order and summed up again.
    Args: sums: of a task None where an earlier run moved it; the source is then read again.
    """
    from concurrent.futures import ThreadPoolExecutor

    total = sum(task.num_bytes for task in tasks)
    done = 0
    covered: dict[tuple[str, str], int] = {}
    with (
        Values(output) as values,
        Sources(source.checkpoint.byte_order) as again,
        ThreadPoolExecutor(num_threads) as pool,
    ):

        def check(number: int) -> str | None:
            return _check_task(tasks[number], sums[number], source, values, again)

        for task, problem in zip(tasks, pool.map(check, range(len(tasks))), strict=True):
            if problem is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                return problem
            for read in task.block.reads:
                key = (str(read.stored.file), read.stored.name)
                size = (task.stop - task.start) * read.num_columns
                covered[key] = covered.get(key, 0) + size
            done += task.num_bytes
            if progress is not None:
                progress(done, total, task.block.name)
    return _uncovered(source, covered) or _unequal_replica(output)


def _check_task(
    task: Task,
    sums: tuple[int, ...] | None,
    source: Resolved,
    values: "Values",
    again: Sources,
) -> str | None:
    holding = source.holdings[_stored_name(task.block.name, source)]
    for position, read in enumerate(task.block.reads):
        expected = sums[position] if sums else _sum_again(read, task, again)
        if _sum_in_output(read, task, holding, values) != expected:
            return (
                f"`{task.block.name}`: rows {task.start} to {task.stop} of the output do not hold"
                f" what `{read.stored.name}` has"
            )
    return None


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """A tensor that every rank should have alike, and does not."""

    name: str
    max_difference: float  # absolute, between finite values


def replica_differences(resolved: Resolved) -> tuple[ReplicaDifference, ...]:
    """Tensors that several ranks hold whole, but not with the same values."""
    found = []
    with Sources(resolved.checkpoint.byte_order) as sources:
        for holding in resolved.holdings.values():
            for group in holding.replicas:
                largest = max(_gap(sources, group[0], other) for other in group[1:])
                if largest >= 0:
                    found.append(ReplicaDifference(group[0].name, largest))
    return tuple(found)


def same_values(sources: Sources, first: TensorInfo, second: TensorInfo) -> bool:
    """Whether two stored tensors of the same shape and type hold the same bits."""
    return _gap(sources, first, second) < 0


def _gap(sources: Sources, first: TensorInfo, second: TensorInfo) -> float:
    """Largest difference of the values; -1.0 where all bits are the same."""
    import numpy as np

    largest = -1.0
    for start in range(0, first.num_elements, CHUNK_ELEMENTS):
        count = min(CHUNK_ELEMENTS, first.num_elements - start)
        a = sources.elements(first, start, 1, count)
        b = sources.elements(second, start, 1, count)
        if not np.array_equal(a, b):
            with np.errstate(invalid="ignore", over="ignore"):
                gap = np.abs(to_float(a, first.dtype) - to_float(b, second.dtype))
            finite = gap[np.isfinite(gap)]
            largest = max(largest, float(finite.max()) if finite.size else 0.0)
    return largest


def _unequal_replica(output: Resolved) -> str | None:
    differences = replica_differences(output)
    return f"`{differences[0].name}` is not the same in all shards" if differences else None


class Values:
    """The tensors of a checkpoint as rows in the order of Hugging Face's layout."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved = resolved
        self._sources = Sources(resolved.checkpoint.byte_order)

    def __enter__(self) -> "Values":
        return self

    def __exit__(self, *_: object) -> None:
        self._sources.__exit__()

    def dtype(self, name: str) -> DType:
        """Type of the elements that `rows` gives."""
        dtype = self._holding(name).dtype
        return FLOAT32 if dtype.block_elements > 1 else dtype

    def spec(self, name: str) -> TensorSpec:
        """What the table of names says of a tensor."""
        return self._holding(name).spec

    def rows(self, name: str, start: int, stop: int) -> "Raw":
        """Rows `start` to `stop` of the matrix of a tensor, as raw elements."""
        import numpy as np

        holding = self._holding(name)
        spec, layout = holding.spec, self.resolved.checkpoint.layout
        if spec.operation == "permute" and layout != "huggingface":
            height = row_count(spec) // spec.num_heads
            low, high = start // height * height, -(-stop // height) * height
            wanted = np.arange(start, stop)
            head, within = np.divmod(wanted, height)
            half, pair = np.divmod(within, height // 2)
            stored = head * height + 2 * pair + half
            picked: Raw = self._stored_rows(holding, low, high)[stored - low]
            return picked
        if spec.operation == "transpose" and holding.parts:
            turned = self.elements(holding.infos[0][0], 0, spec.shape[1], spec.shape[0]).T
            return np.ascontiguousarray(turned[start:stop])
        if spec.operation == "tiles" and holding.parts:
            return self._tile_rows(holding, start, stop)
        return self._stored_rows(holding, start, stop)

    def _holding(self, name: str) -> Holding:
        return self.resolved.holdings.get(name) or self.resolved.repeats[name]

    def elements(self, info: TensorInfo, first: int, rows: int, columns: int) -> "Raw":
        """Elements of one stored tensor, as they lie there."""
        return self._sources.elements(info, first, rows, columns)

    def _stored_rows(self, holding: Holding, start: int, stop: int) -> "Raw":
        """Rows in the order in which the layout stores them, joined over ranks and parts."""
        import numpy as np

        columns = column_count(holding.spec)
        if not holding.parts:
            info = holding.infos[0][0]
            return self.elements(info, start * columns, stop - start, columns)
        joined = []
        above = 0
        for part, infos in zip(holding.parts, holding.infos, strict=True):
            rows = part.shape[0] if len(part.shape) < 3 else math.prod(part.shape[:2])
            if holding.spec.join_axis:
                joined.append(self._part_rows(holding, part, infos, start, stop))
                continue
            low, high = max(start - above, 0), min(stop - above, rows)
            if low < high:
                joined.append(self._part_rows(holding, part, infos, low, high))
            above += rows
        axis = 1 if holding.spec.join_axis else 0
        return joined[0] if len(joined) == 1 else np.concatenate(joined, axis)

    def _part_rows(
        self,
        holding: Holding,
        part: names.Part,
        infos: tuple[TensorInfo, ...],
        start: int,
        stop: int,
    ) -> "Raw":
        import numpy as np

        ranks = len(infos)
        skipped = part.num_rows_before // ranks
        width = part.shape[-1] if len(part.shape) > 1 else 1
        if part.axis is None:
            columns = column_count(holding.spec)
            return self.elements(infos[0], start * columns, stop - start, columns)
        if part.axis == len(part.shape) - 1 and part.axis > 0:
            share = width // ranks
            pieces = [
                self.elements(info, (skipped + start) * share, stop - start, share)
                for info in infos
            ]
            return np.concatenate(pieces, axis=1)
        # Rows are shared out, within each expert where there are several.
        height = part.shape[part.axis]
        share = height // ranks
        pieces = []
        row = start
        while row < stop:
            expert, within = divmod(row, height)
            rank, local = divmod(within, share)
            count = min(stop - row, share - local)
            first = (skipped + expert * share + local) * width
            pieces.append(self.elements(infos[rank], first, count, width))
            row += count
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _tile_rows(self, holding: Holding, start: int, stop: int) -> "Raw":
        import numpy as np

        spec, part, info = holding.spec, holding.parts[0], holding.infos[0][0]
        columns = column_count(spec)
        result = np.zeros((stop - start, columns), dtype=f"u{info.dtype.block_bytes}")
        slots, across = part.shape[0], part.shape[1]
        for row in range(start, stop):
            number, slot = divmod(row, slots)
            if number == 0:
                continue
            height, wide = spec.aspect_ratios[number - 1]
            if slot < height * wide:
                cell = slot // wide * across + slot % wide
                result[row - start] = self.elements(info, cell * columns, 1, columns)[0]
        return result


def row_count(spec: TensorSpec) -> int:
    """Rows of the matrix of a tensor."""
    return spec.num_elements // column_count(spec)


def column_count(spec: TensorSpec) -> int:
    """Columns of the matrix of a tensor: its last axis, a vector has one; see plan.matrix_of."""
    if spec.operation == "tiles":
        return math.prod(spec.ways[0][0].shape[2:])
    if len(spec.shape) == 1:
        return 1
    if len(spec.shape) == 4:  # the patch embedding: one row per filter
        return math.prod(spec.shape[1:])
    return spec.shape[-1]


def chunks(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    """Ranges of rows of about two million elements."""
    rows, columns = row_count(spec), column_count(spec)
    step = max(1, CHUNK_ELEMENTS // columns)
    if spec.num_heads:
        height = rows // spec.num_heads
        step = max(1, step // height) * height
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _compare(name: str, left: Values, right: Values) -> Difference | None:
    import numpy as np

    spec, other = left.resolved.holdings[name].spec, right.resolved.holdings[name].spec
    if spec.shape != other.shape:
        return Difference(name, "shape")
    a_type, b_type = left.dtype(name), right.dtype(name)
    num_different, largest = 0, 0.0
    for start, stop in chunks(spec):
        a, b = left.rows(name, start, stop), right.rows(name, start, stop)
        if a_type == b_type:
            different = a != b
        else:
            narrow = a_type if _bits(a_type) < _bits(b_type) else b_type
            different = cast(a, a_type, narrow)[0] != cast(b, b_type, narrow)[0]
        count = int(np.count_nonzero(different))
        if not count:
            continue
        num_different += count
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(to_float(a, a_type) - to_float(b, b_type))[different]
        finite = gap[np.isfinite(gap)]
        largest = max(largest, float(finite.max()) if finite.size else 0.0)
    if not num_different:
        return None
    return Difference(name, "values", num_different, spec.num_elements, largest)


def _bits(dtype: DType) -> tuple[int, int]:
    # Of the two types of 16 bits bfloat16 has the fewer digits.
    return dtype.block_bytes, 0 if dtype.name == "bfloat16" else 1


def _stored_name(name: str, source: Resolved) -> str:
    """The tensor that a copy of a tied one was made from."""
    if name in source.holdings:
        return name
    specs = names.tensor_specs(source.checkpoint.config)
    repeated = next(spec.repeats for spec in specs if spec.name == name)
    assert repeated is not None
    return repeated


def _sum_again(read: Read, task: Task, sources: Sources) -> int:
    first = first_element(read, task.start)
    rows = task.stop - task.start
    raw = sources.elements(read.stored, first, rows, read.num_columns)
    stored = FLOAT32 if read.stored.dtype.block_elements > 1 else read.stored.dtype
    return zlib.crc32(cast(raw, stored, task.block.dtype)[0].data.cast("B"))


def _sum_in_output(read: Read, task: Task, holding: Holding, values: Values) -> int:
    """The sum of the elements that the source stores from the task's first element on."""
    import numpy as np

    first = first_element(read, task.start)
    num_rows = task.stop - task.start
    spec, name = holding.spec, task.block.name
    if task.block.transposed:
        whole = values.rows(name, 0, row_count(spec))
        turned = whole.T if holding.parts else whole
        return zlib.crc32(np.ascontiguousarray(turned).data.cast("B"))
    if spec.operation in ("tiles", "transpose") and holding.parts:
        return _sum_of_stored_shape(read, task, holding, values, first, num_rows)
    rows, column = _logical(read, holding, first // read.num_columns, num_rows)
    low, high = int(rows.min()), int(rows.max()) + 1
    found = values.rows(name, low, high)[:, column : column + read.num_columns]
    if (np.diff(rows) != 1).any():
        found = found[rows - low]
    return zlib.crc32(np.ascontiguousarray(found).data.cast("B"))


def _sum_of_stored_shape(
    read: Read, task: Task, holding: Holding, values: Values, first: int, num_rows: int
) -> int:
    """Tables whose cells or axes Meta orders in its own way, looked up cell by cell."""
    import numpy as np

    spec, part = holding.spec, holding.parts[0]
    columns = read.num_columns
    target = values.resolved.holdings[spec.name]
    if target.parts:  # from Meta's layout to Meta's: the table as it is
        info = target.infos[0][0]
        raw = values.elements(info, first, num_rows, columns)
        return zlib.crc32(raw.data.cast("B"))
    result = []
    for cell in range(first // columns, first // columns + num_rows):
        y, x = divmod(cell, part.shape[1])
        number, slot = next(
            (number, y * wide + x)
            for number, (high, wide) in enumerate(spec.aspect_ratios, start=1)
            if number == task.start // part.shape[0] and y < high and x < wide
        )
        row = number * part.shape[0] + slot
        result.append(values.rows(spec.name, row, row + 1))
    return zlib.crc32(np.concatenate(result).data.cast("B"))


def _logical(read: Read, holding: Holding, first_row: int, num_rows: int) -> "tuple[Rows, int]":
    """Rows and first column of the matrix at which a stored tensor's rows belong."""
    import numpy as np

    spec = holding.spec
    rows = np.arange(first_row, first_row + num_rows)
    column = 0
    if holding.parts:
        part_number, rank = _identify(read, holding)
        part = holding.parts[part_number]
        ranks = len(holding.infos[part_number])
        rows = rows - part.num_rows_before // ranks if part.num_rows_total is not None else rows
        if part.axis == len(part.shape) - 1 and part.axis > 0:
            column = rank * (part.shape[-1] // ranks)
        elif part.axis is not None:
            height = part.shape[part.axis]
            share = height // ranks
            expert, within = np.divmod(rows, share)
            rows = expert * height + rank * share + within
        for before in holding.parts[:part_number]:
            if spec.join_axis:
                column += before.shape[-1]
            else:
                rows = rows + before.shape[0]
    if spec.operation == "permute" and _in_pairs(holding):
        height = row_count(spec) // spec.num_heads
        head, within = np.divmod(rows, height)
        pair, half = np.divmod(within, 2)
        rows = head * height + half * (height // 2) + pair
    return rows, column


def _in_pairs(holding: Holding) -> bool:
    """Whether the rows of a head are stored pair by pair: in Meta's layout and in GGUF."""
    return bool(holding.parts) or holding.infos[0][0].name == holding.spec.gguf


def _identify(read: Read, holding: Holding) -> tuple[int, int]:
    """Which part and which rank the stored tensor is."""
    for number, infos in enumerate(holding.infos):
        for rank, info in enumerate(infos):
            if info is read.stored:
                return number, rank
    raise CheckpointError(f"`{read.stored.name}` is not a part of `{holding.spec.name}`")


def same_tensor(resolved: Resolved, first: str, second: str) -> bool:
    """Whether two tensors of a checkpoint hold the same bits; stops at the first difference."""
    import numpy as np

    with Values(resolved) as values:
        for start, stop in chunks(values.spec(first)):
            if not np.array_equal(
                values.rows(first, start, stop), values.rows(second, start, stop)
            ):
                return False
    return True


def unequal_tile_copies(resolved: Resolved) -> str | None:
    """A table by aspect ratio that has different values for the same tile, or None.

    Meta's layout has one place for each tile, Hugging Face's one for each ratio that uses it.
    """
    import numpy as np

    with Values(resolved) as values:
        for name, holding in resolved.holdings.items():
            spec = holding.spec
            if spec.operation != "tiles":
                continue
            slots = spec.ways[0][0].shape[0]
            first: dict[tuple[int, int], int] = {}
            for (number, slot), cell in names.tile_cells(spec.aspect_ratios, slots).items():
                row = number * slots + slot
                other = first.setdefault(cell, row)
                if other == row:
                    continue
                if not np.array_equal(
                    values.rows(name, other, other + 1), values.rows(name, row, row + 1)
                ):
                    return name
    return None


def _uncovered(source: Resolved, covered: dict[tuple[str, str], int]) -> str | None:
    """A stored tensor of which not every element has been looked up."""
    counts: dict[tuple[str, str], int] = {}
    for holding in source.holdings.values():
        if holding.spec.operation == "tiles":
            continue
        for infos in holding.infos:
            for info in infos:
                key = (str(info.file), info.name)
                counts[key] = info.num_elements
    for key, count in counts.items():
        if covered.get(key, 0) < count:
            return f"`{key[1]}` of {key[0]}: only {covered.get(key, 0)} of {count} elements moved"
    return None
