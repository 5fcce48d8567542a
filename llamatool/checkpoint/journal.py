"""What a conversion that was interrupted needs to know: what it was, and how far it came.

One JSON object per line. The first names the program, the source and the plan; later ones say how
many tasks are on the disk, and that the files are being given their final names. A line that was
cut by a crash is ignored.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from llamatool.checkpoint.convert import Task
from llamatool.checkpoint.plan import TensorPlan
from llamatool.errors import ResourceError, UsageError

FOLDER = ".llamatool-partial"
_LOG, _LOCK = "journal.jsonl", "lock"


def fingerprint(plan: TensorPlan, tasks: Sequence[Task], extra: Mapping[str, bytes]) -> str:
    """SHA-256 over everything that decides the output: the sources' state and the plan.

    A source counts by name, size and time of change. Args: extra: the small files of the output.
    """
    digest = hashlib.sha256()
    files = {path for table in plan.resolved.checkpoint.tables for path in table.files}
    for path in sorted(files):
        state = path.stat()
        digest.update(f"{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    for layout in plan.files:
        digest.update(f"{layout.name} {layout.num_bytes}\n".encode())
        for _, content in layout.fixed:
            digest.update(content)
    digest.update(f"{len(tasks)} tasks\n".encode())
    for name in sorted(extra):
        digest.update(name.encode() + hashlib.sha256(extra[name]).digest())
    return digest.hexdigest()


class Journal:
    """The folder of an unfinished conversion, locked while it is used."""

    def __init__(self, output: Path) -> None:
        self.folder = output / FOLDER
        self._lock: TextIO | None = None
        self._log: TextIO | None = None

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._log, self._lock):
            if stream is not None:
                stream.close()

    def begin(self, key: str, *, resume: bool) -> dict[str, Any]:
        """Opens the journal for the conversion `key`; gives what an earlier run left behind.

        Raises: UsageError if there is an unfinished conversion and `resume` does not ask for it,
        or it was another one; ResourceError if it is still running.
        """
        if self.folder.is_symlink():
            raise UsageError("a symbolic link stands in the way", where=str(self.folder))
        self.folder.mkdir(exist_ok=True)
        self._lock = self._locked()
        path = self.folder / _LOG
        state = _read(path)
        if state and not resume:
            raise UsageError(
                "an unfinished conversion lies there",
                where=str(self.folder),
                hint="finish it with --resume, or remove that folder",
            )
        if state and state.get("key") != key:
            raise UsageError(
                "the unfinished conversion was another one: source, options or version differ",
                where=str(self.folder),
                hint="run it with the same arguments, or remove that folder",
            )
        self._log = path.open("a", encoding="utf-8")
        if not state:
            self._append({"key": key})  # reaches the disk with the first entry about data
        return state

    def note(self, **values: object) -> None:
        """Appends a line and waits until it is on the disk."""
        self._append(values)
        assert self._log is not None
        os.fsync(self._log.fileno())

    def _append(self, values: Mapping[str, object]) -> None:
        assert self._log is not None
        self._log.write(json.dumps(values, sort_keys=True) + "\n")
        self._log.flush()

    def remove(self) -> None:
        """Removes the journal and its folder, which must be empty but for the journal's files."""
        self.__exit__()
        self._log = self._lock = None
        for name in (_LOG, _LOCK):
            (self.folder / name).unlink(missing_ok=True)
        self.folder.rmdir()

    def _locked(self) -> TextIO:
        stream = (self.folder / _LOCK).open("a", encoding="utf-8")
        try:
            import fcntl
        except ImportError:  # Windows: the exclusive creation of the files has to do
            return stream
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.close()
            raise ResourceError(
                "another conversion is writing there", where=str(self.folder.parent)
            ) from None
        return stream


def pretty(content: Mapping[str, Any]) -> bytes:
    """A JSON file for people: keys sorted, indented."""
    return json.dumps(content, ensure_ascii=False, indent=2, sort_keys=True).encode() + b"\n"


def _read(path: Path) -> dict[str, Any]:
    """The last value of every key; {} without a journal."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    state: dict[str, Any] = {}
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            state |= values
    return state
