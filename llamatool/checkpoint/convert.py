"""The engine: carries out a plan with threads, in bounded memory, and can be interrupted.

Each task moves some rows of one block. What is read is summed up (CRC-32 of every piece, in the
order in which the source stores it), so that the result can be proven later by another way
(verify.py). The journal learns how far the data has reached the disk.
"""

import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llamatool.checkpoint.cast import CastCount, cast, raw_type
from llamatool.checkpoint.plan import FLOAT32, Block, Order, Read, TensorPlan, Write
from llamatool.checkpoint.rawio import Sink, Sources

if TYPE_CHECKING:
    from llamatool.checkpoint.cast import Raw

CHUNK_BYTES = 2 << 20  # fits into the cache of a core together with its copy
SYNC_BYTES = 1 << 30  # written between two entries of the journal

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, tensor


@dataclass(frozen=True, slots=True)
class Task:
    """Rows `start` to `stop` of the matrix of a block."""

    block: Block
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes that will be written."""
        width = sum(write.num_columns for write in self.block.writes)
        if self.block.transposed:
            width = self.block.num_columns * len(self.block.writes)
        return (self.stop - self.start) * width * self.block.dtype.block_bytes


@dataclass(slots=True)
class Outcome:
    """What the engine learned while moving the bytes."""

    piece_sums: list[tuple[int, ...] | None]  # per task and read; None: moved by an earlier run
    casts: CastCount = field(default_factory=CastCount)
    written_sums: dict[tuple[str, str], list[tuple[int, int, int]]] = field(default_factory=dict)
    num_bytes_read: int = 0
    num_bytes_written: int = 0


def tasks_of(plan: TensorPlan, chunk_bytes: int = CHUNK_BYTES) -> list[Task]:
    """The blocks cut into pieces of about `chunk_bytes`, whole heads where rows are reordered."""
    tasks = []
    for block in plan.blocks:
        unit = block.head_dim if block.reorder else 1
        row_bytes = block.num_columns * block.dtype.block_bytes
        step = max(1, chunk_bytes // (row_bytes * unit)) * unit
        end = block.row + block.num_rows
        if block.transposed:
            step = block.num_rows
        tasks += [
            Task(block, start, min(start + step, end)) for start in range(block.row, end, step)
        ]
    return tasks


def execute(
    tasks: Sequence[Task],
    sources: Sources,
    sinks: dict[str, Sink],
    *,
    first: int = 0,
    num_threads: int = 2,
    sum_pieces: bool = True,
    sum_written: bool = False,
    progress: Progress | None = None,
    on_durable: Callable[[int], None] | None = None,
) -> Outcome:
    """Moves the bytes of `tasks` from number `first` on.

    Args: sum_written: also sum up what is written, for the checksums of zip archives.
    on_durable: told a number of tasks after all data of the tasks before it is on the disk.
    Raises: what reading or writing raises, and KeyboardInterrupt, with all threads stopped.
    """
    run = _Run(tasks, sources, sinks, first, sum_pieces, sum_written)
    threads = [threading.Thread(target=run.work, daemon=True) for _ in range(max(1, num_threads))]
    for thread in threads:
        thread.start()
    try:
        _watch(run, threads, sinks, progress, on_durable)
    finally:
        run.stop.set()
        for thread in threads:
            thread.join()
    if run.error is not None:
        raise run.error
    run.outcome.num_bytes_read = sources.num_bytes_read
    return run.outcome


def _watch(
    run: "_Run",
    threads: Sequence[threading.Thread],
    sinks: dict[str, Sink],
    progress: Progress | None,
    on_durable: Callable[[int], None] | None,
) -> None:
    """Waits for the workers; tells progress and makes data durable in between."""
    total = sum(task.num_bytes for task in run.tasks)
    synced = run.num_bytes_done
    while any(thread.is_alive() for thread in threads):
        run.idle.wait(0.1)
        run.idle.clear()
        if progress is not None:
            progress(run.num_bytes_done, total, run.current)
        if on_durable is not None and run.num_bytes_done - synced >= SYNC_BYTES:
            reached, synced = run.num_finished(), run.num_bytes_done
            for sink in sinks.values():
                sink.sync()
            on_durable(reached)
    if progress is not None and run.error is None:
        progress(total, total, "")


class _Run:
    """The state that the workers share."""

    def __init__(
        self,
        tasks: Sequence[Task],
        sources: Sources,
        sinks: dict[str, Sink],
        first: int,
        sum_pieces: bool,
        sum_written: bool,
    ) -> None:
        self.tasks = tasks
        self.sources = sources
        self.sinks = sinks
        self.sum_pieces = sum_pieces
        self.sum_written = sum_written
        self.stop = threading.Event()
        self.idle = threading.Event()
        self.error: BaseException | None = None
        self.outcome = Outcome([None] * len(tasks))
        self.num_bytes_done = sum(task.num_bytes for task in tasks[:first])
        self.current = ""
        self._next = first
        self._finished = bytearray(len(tasks))
        self._finished[:first] = b"\1" * first
        self._lock = threading.Lock()

    def num_finished(self) -> int:
        """Tasks from the first on that are all done."""
        end = self._finished.find(b"\0")
        return len(self.tasks) if end < 0 else end

    def work(self) -> None:
        scratch = _Scratch()
        try:
            while not self.stop.is_set():
                with self._lock:
                    number = self._next
                    self._next += 1
                if number >= len(self.tasks):
                    break
                self._move(number, scratch)
        except BaseException as error:  # raised again by the main thread
            self.error = error
            self.stop.set()
        self.idle.set()

    def _move(self, number: int, scratch: "_Scratch") -> None:
        task = self.tasks[number]
        self.current = task.block.name
        values, sums, casts = self._gather(task, scratch)
        written = self._scatter(task, values, scratch)
        with self._lock:
            self._finished[number] = 1
            self.outcome.piece_sums[number] = sums
            self.outcome.casts.add(casts)
            self.num_bytes_done += task.num_bytes
            self.outcome.num_bytes_written += task.num_bytes
            for key, place in written:
                self.outcome.written_sums.setdefault(key, []).append(place)

    def _gather(self, task: Task, scratch: "_Scratch") -> "tuple[Raw, tuple[int, ...], CastCount]":
        """The rows of the task as they will be written, and the sums of the pieces read."""
        block, num_rows = task.block, task.stop - task.start
        kind, casts, sums = raw_type(block.dtype), CastCount(), []
        whole = None
        if not block.reads:
            whole = scratch.array("whole", num_rows, block.num_columns, kind)
            whole[:] = 0
        for read in block.reads:
            piece, count = self._piece(read, task, scratch)
            casts.add(count)
            if self.sum_pieces:
                sums.append(zlib.crc32(piece.data.cast("B")))
            if read.num_columns == block.num_columns:
                whole = piece
                continue
            if whole is None:
                whole = scratch.array("whole", num_rows, block.num_columns, kind)
            whole[:, read.column : read.column + read.num_columns] = piece
        assert whole is not None
        if block.reorder is not None:
            whole = reordered(whole, block.head_dim, block.reorder)
        if block.transposed:
            whole = whole.T.copy()
        return whole, tuple(sums), casts

    def _piece(self, read: Read, task: Task, scratch: "_Scratch") -> "tuple[Raw, CastCount]":
        """Rows of one stored tensor in their own order, in the type to be written."""
        dtype, num_rows = read.stored.dtype, task.stop - task.start
        first = first_element(read, task.start)
        buffer = None
        if dtype.block_elements == 1:
            buffer = scratch.array("piece", num_rows, read.num_columns, raw_type(dtype))
        raw = self.sources.elements(read.stored, first, num_rows, read.num_columns, buffer)
        stored = FLOAT32 if dtype.block_elements > 1 else dtype
        return cast(raw, stored, task.block.dtype)

    def _scatter(
        self, task: Task, values: "Raw", scratch: "_Scratch"
    ) -> list[tuple[tuple[str, str], tuple[int, int, int]]]:
        """Writes the rows; gives where what sum was written, if that is wanted."""
        block, sums = task.block, []
        for write in block.writes:
            part = values
            if not block.transposed and write.num_columns != block.num_columns:
                part = scratch.array("part", len(values), write.num_columns, raw_type(block.dtype))
                part[:] = values[:, write.column : write.column + write.num_columns]
            view = part.data.cast("B")
            start = first_element(write, task.start) * block.dtype.block_bytes
            target = write.stored
            self.sinks[target.file].write(view, target.offset + start)
            if self.sum_written:
                key = (target.file, target.name)
                sums.append((key, (start, len(view), zlib.crc32(view))))
        return sums


class _Scratch:
    """The buffers of one worker, used again for every task."""

    def __init__(self) -> None:
        self._buffers: dict[str, bytearray] = {}

    def array(self, name: str, num_rows: int, num_columns: int, kind: str) -> "Raw":
        import numpy as np

        num_bytes = num_rows * num_columns * int(kind[1:])
        if len(self._buffers.get(name, b"")) < num_bytes:
            self._buffers[name] = bytearray(num_bytes)
        flat: Raw = np.frombuffer(self._buffers[name], dtype=kind, count=num_rows * num_columns)
        return flat.reshape(num_rows, num_columns)


def first_element(place: Read | Write, row: int) -> int:
    """The element of the stored tensor at which the rectangle's part of `row` begins."""
    return place.first + (row - place.row) * place.pitch


def reordered(values: "Raw", head_dim: int, change: tuple[Order, Order]) -> "Raw":
    """The rows of each head in the other order.

    From pairs (Meta) to halves (Hugging Face), row 2i + s of a head becomes row
    s x head_dim/2 + i; the other direction undoes it.
    """
    columns = values.shape[1]
    inner = (head_dim // 2, 2) if change[0] == "pairs" else (2, head_dim // 2)
    turned = values.reshape(-1, *inner, columns).swapaxes(1, 2)
    return turned.reshape(values.shape)


def combined_crc32(places: list[tuple[int, int, int]]) -> int:
    """CRC-32 of a record from the sums (start, length, crc) of its parts in any order."""
    total = 0
    for _, length, crc in sorted(places):
        total = _crc32_shifted(total, length) ^ crc
    return total


def _crc32_shifted(crc: int, num_bytes: int) -> int:
    """`crc` as if `num_bytes` zero bytes followed; Mark Adler's method from zlib's crc32.c."""
    if not num_bytes:
        return crc
    for power, bit in enumerate(bin(num_bytes)[:1:-1]):
        if bit == "1":
            crc = _multiplied(_shift_of(power), crc)
    return crc


_POLYNOMIAL = 0xEDB88320
_shifts: list[int] = [0x00800000]  # x^8, then each the square of the one before


def _shift_of(power: int) -> int:
    while len(_shifts) <= power:
        _shifts.append(_multiplied(_shifts[-1], _shifts[-1]))
    return _shifts[power]


def _multiplied(a: int, b: int) -> int:
    """Product of a and b modulo the polynomial, both with the highest power in the lowest bit."""
    product = 0
    mask = 1 << 31
    while mask:
        if a & mask:
            product ^= b
        mask >>= 1
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
