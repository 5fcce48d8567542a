"""Writing a converted checkpoint so that a half-written one never looks whole.

Everything goes into a hidden folder inside the destination first: tensors, then the small files.
After the data is on the disk and verified, the files get their names, the index and the
configuration last. An interrupted run is finished by the next one.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llamatool import __version__
from llamatool.checkpoint import convert, journal, pth, rawio, safetensors, verify
from llamatool.checkpoint.cast import CastCount
from llamatool.checkpoint.convert import Outcome, Task
from llamatool.checkpoint.layout import Checkpoint, Resolved, resolve
from llamatool.checkpoint.plan import TensorPlan
from llamatool.checkpoint.rawio import Sink, Sources
from llamatool.checkpoint.tensors import TensorTable
from llamatool.checkpoint.writers import FileLayout
from llamatool.errors import CheckpointError, ResourceError

VerifyMode = Literal["none", "size", "hash", "full"]
Step = Literal["converting", "verifying"]
Progress = Callable[[Step, int, int, str], None]  # bytes done, bytes in all, tensor

# Renamed after everything else: without them a folder is not taken for a checkpoint.
_LAST = (safetensors.INDEX_NAME, "params.json", "config.json")
RECORD = "conversion.json"


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file of the output."""

    name: str
    num_bytes: int
    sha256: str | None  # None: not computed without verification


@dataclass(frozen=True, slots=True)
class Written:
    """What has been written, and whether it is proven."""

    files: tuple[WrittenFile, ...]
    problem: str | None  # what the verification found wrong
    num_bytes_read: int = 0
    num_bytes_written: int = 0
    casts: CastCount | None = None  # None: moved by an earlier run


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write."""

    verify: VerifyMode = "hash"
    resume: bool = False
    num_threads: int = 2
    chunk_bytes: int = convert.CHUNK_BYTES
    replaced: tuple[str, ...] = ()  # files of an earlier conversion, removed before the renaming


def write_folder(
    plan: TensorPlan,
    small_files: Mapping[str, bytes],
    record: Mapping[str, Any],
    destination: Path,
    options: WriteOptions,
    *,
    progress: Progress | None = None,
) -> Written:
    """Carries out `plan` into `destination` and writes `small_files` beside the tensors.

    Args: record: what conversion.json says; the digests of the files are added to it.
    Raises: ResourceError without room or permission; KeyboardInterrupt, after which a run with
    `resume` goes on where this one stopped.
    """
    _create(destination)
    tasks = convert.tasks_of(plan, options.chunk_bytes)
    with journal.Journal(destination) as log:
        key = journal.fingerprint(plan, tasks, small_files)
        state = log.begin(f"{__version__} {options.chunk_bytes} {key}", resume=options.resume)
        if "written" in state:
            written = _read_written(state["written"])
        else:
            written = _write_tensors(plan, tasks, log, state, options, progress)
            if written.problem is not None:
                _discard(log, plan)
                return written
            written = replace(written, files=written.files + _small(log.folder, small_files))
            content = {**record, "files": [_file_json(file) for file in written.files]}
            _put(log.folder / RECORD, journal.pretty(content))
            rawio.sync_folder(log.folder)
            log.note(written=content["files"])
        names = [file.name for file in written.files]
        _remove_replaced(destination, options.replaced, names)
        _rename(log.folder, destination, names)
        log.remove()
    rawio.sync_folder(destination)
    return written


def open_output(plan: TensorPlan, folder: Path) -> Resolved:
    """What has been written, read back from its own headers and checked against the model."""
    checkpoint = plan.resolved.checkpoint
    paths = [folder / layout.name for layout in plan.files]
    if plan.files[0].name.endswith(".pth"):
        tables = tuple(pth.read_file(path) for path in paths)
        return resolve(Checkpoint("meta", folder, checkpoint.config, tables))
    read = [safetensors.read_file(path) for path in paths]
    merged = {name: info for table in read for name, info in table.tensors.items()}
    files = tuple(path for table in read for path in table.files)
    table = TensorTable("safetensors", files, merged)
    config = replace(checkpoint.config, quantization=None)
    return resolve(Checkpoint("huggingface", folder, config, (table,)))


def _create(destination: Path) -> None:
    try:
        destination.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise rawio.unwritable(destination, error) from None


def _write_tensors(
    plan: TensorPlan,
    tasks: Sequence[Task],
    log: journal.Journal,
    state: Mapping[str, Any],
    options: WriteOptions,
    progress: Progress | None,
) -> Written:
    resumed = bool(state)
    first = min(int(state.get("tasks", 0)), len(tasks))
    needed = sum(layout.num_bytes for layout in plan.files) - _present(plan, log.folder)
    rawio.check_space(log.folder, needed)
    sinks: dict[str, Sink] = {}
    try:
        for layout in plan.files:
            path = log.folder / layout.name
            sinks[layout.name] = Sink(path, layout.num_bytes, resume=resumed)
        outcome = _move(plan, tasks, first, sinks, log, options, progress)
        for layout in plan.files:
            for offset, content in layout.fixed:
                sinks[layout.name].write(memoryview(content), offset)
            _write_checksums(layout, sinks[layout.name], outcome, complete=first == 0)
        for sink in sinks.values():
            sink.sync()
    finally:
        for sink in sinks.values():
            sink.close()
    log.note(tasks=len(tasks))
    problem, digests = _verified(plan, tasks, outcome, log.folder, options, progress)
    files = tuple(
        WrittenFile(layout.name, layout.num_bytes, digests.get(layout.name))
        for layout in plan.files
    )
    return Written(
        files,
        problem,
        outcome.num_bytes_read,
        outcome.num_bytes_written,
        outcome.casts if first == 0 else None,
    )


def _discard(log: journal.Journal, plan: TensorPlan) -> None:
    """Takes away what proved to be wrong, so that nobody goes on with it."""
    for layout in plan.files:
        (log.folder / layout.name).unlink(missing_ok=True)
    log.remove()


def _present(plan: TensorPlan, folder: Path) -> int:
    """Bytes that an earlier run has already taken on the disk."""
    paths = [folder / layout.name for layout in plan.files]
    return sum(path.stat().st_size for path in paths if path.exists())


def _move(
    plan: TensorPlan,
    tasks: Sequence[Task],
    first: int,
    sinks: dict[str, Sink],
    log: journal.Journal,
    options: WriteOptions,
    progress: Progress | None,
) -> Outcome:
    def tell(done: int, total: int, name: str) -> None:
        if progress is not None:
            progress("converting", done, total, name)

    archives = any(layout.checksums for layout in plan.files)
    forget = plan.num_bytes > _memory_bytes() // 2
    with Sources(plan.resolved.checkpoint.byte_order, forget=forget) as sources:
        return convert.execute(
            tasks,
            sources,
            sinks,
            first=first,
            num_threads=options.num_threads,
            sum_pieces=options.verify == "hash",
            sum_written=archives and first == 0,
            progress=tell,
            on_durable=lambda reached: log.note(tasks=reached),
        )


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return 1 << 62


def _write_checksums(layout: FileLayout, sink: Sink, outcome: Outcome, *, complete: bool) -> None:
    """Puts the CRC-32 of every record into the zip archive's headers."""
    for checksum in layout.checksums:
        target = checksum.target
        places = outcome.written_sums.get((layout.name, target.name), [])
        crc = convert.combined_crc32(places) if complete else _crc_of(sink, target)
        for position in checksum.positions:
            sink.write(memoryview(crc.to_bytes(4, "little")), position)


def _crc_of(sink: Sink, target: Any) -> int:
    import zlib

    crc = 0
    for start in range(0, target.num_bytes, 1 << 22):
        count = min(1 << 22, target.num_bytes - start)
        crc = zlib.crc32(sink.read(count, target.offset + start), crc)
    return crc


def _verified(
    plan: TensorPlan,
    tasks: Sequence[Task],
    outcome: Outcome,
    folder: Path,
    options: WriteOptions,
    progress: Progress | None,
) -> tuple[str | None, dict[str, str]]:
    """What is wrong with the output, and the digests of its files."""
    if options.verify == "none":
        return None, {}

    def tell(done: int, total: int, name: str) -> None:
        if progress is not None:
            progress("verifying", done, total, name)

    try:
        output = open_output(plan, folder)
    except CheckpointError as error:
        return f"the output cannot be read: {error.what}", {}
    if options.verify == "size":
        return None, {}
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(options.num_threads) as pool:
        names = [layout.name for layout in plan.files]
        digests = pool.map(lambda name: _sha256(folder / name), names)
        if options.verify == "full":
            problem = _compared(plan, output, tell)
        else:
            problem = verify.check_pieces(
                tasks,
                outcome.piece_sums,
                plan.resolved,
                output,
                num_threads=options.num_threads,
                progress=tell,
            )
        return problem, dict(zip(names, digests, strict=True))


def _compared(plan: TensorPlan, output: Resolved, tell: convert.Progress) -> str | None:
    comparison = verify.compare(plan.resolved, output, tell)
    for difference in comparison.differences:
        return f"`{difference.name}` differs from the source ({difference.kind})"
    unequal = verify.replica_differences(output)
    return f"`{unequal[0].name}` is not the same in all shards" if unequal else None


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _small(folder: Path, small_files: Mapping[str, bytes]) -> tuple[WrittenFile, ...]:
    written = []
    for name, content in sorted(small_files.items()):
        _put(folder / name, content)
        written.append(WrittenFile(name, len(content), hashlib.sha256(content).hexdigest()))
    return tuple(written)


def _put(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)  # of an earlier run that stopped here
    try:
        with path.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise rawio.unwritable(path, error) from None


def _remove_replaced(destination: Path, replaced: Sequence[str], names: Sequence[str]) -> None:
    """Takes an earlier conversion apart, the files first without which it is no checkpoint."""
    stale = [name for name in _LAST if name in replaced]
    stale += [name for name in replaced if name not in names and name not in _LAST]
    for name in stale:
        (destination / name).unlink(missing_ok=True)


def _rename(folder: Path, destination: Path, names: Sequence[str]) -> None:
    ordered = [name for name in names if name not in _LAST]
    ordered += [RECORD, *(name for name in _LAST if name in names)]
    for name in ordered:
        # A run that was interrupted here has moved some already.
        if not (folder / name).exists() and (destination / name).exists():
            continue
        try:
            os.replace(folder / name, destination / name)  # noqa: PTH105
        except OSError as error:
            raise rawio.unwritable(destination / name, error) from None
        if name == RECORD:
            rawio.sync_folder(destination)


def _file_json(file: WrittenFile) -> dict[str, Any]:
    return {"name": file.name, "bytes": file.num_bytes, "sha256": file.sha256}


def _read_written(files: Sequence[Mapping[str, Any]]) -> Written:
    found = tuple(WrittenFile(str(f["name"]), int(f["bytes"]), f["sha256"]) for f in files)
    return Written(found, None)


def check_writable(destination: Path) -> None:
    """Raises ResourceError if no folder can be made at `destination`."""
    place = destination
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        raise ResourceError("no permission to write", where=str(place))
