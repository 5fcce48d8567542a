"""Results on disk: one line per trial, written for good before the next begins.

results.jsonl is only ever appended to, and each line is flushed to the disk, so that a run that is
killed loses the trial in progress and no other. Every line carries a key of everything that could
change its result; a later run takes lines of its own key and computes the rest. Lines of other
runs in the same folder are kept and never mixed in.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from llamatool.errors import InputError, ResourceError
from llamatool.needle.experiment import Cell
from llamatool.records import record

SCHEMA = 1
RESULTS = "results.jsonl"
MAX_LINE_BYTES = 2**20
OTHER_NEEDLE = "other_needle"  # in place of a kind of trial

Row = dict[str, object]


@record
class Trial:
    """What the statistics need of a row."""

    kind: str
    length: int
    depth: float
    trial: int
    hit: bool
    verdict: str
    length_actual: int
    depth_actual: float | None
    start: int | None
    border_crossed: bool
    needle_border: int | None  # tokens from the needle's begin to the nearest chunk border
    question_border: int | None
    key: str
    gold: str
    generated: str | None
    logprob: float | None
    rank: int | None
    seconds: float
    line: int = 0  # in results.jsonl, from 1
    others: tuple["Trial", ...] = ()  # the other needles of its prompt

    @property
    def all_right(self) -> bool:
        """Whether every needle of its prompt was found."""
        return self.hit and all(other.hit for other in self.others)

    @property
    def cell(self) -> Cell:
        """Which trial of the grid or of a control it is."""
        return Cell(self.kind, self.length, self.depth, self.trial)  # type: ignore[arg-type]


def sha256_of(value: object) -> str:
    """sha256 of a value as canonical JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def row_key(config_sha256: str, cell: Cell) -> str:
    """The key of one trial: of the whole configuration and its place in the grid."""
    return sha256_of([config_sha256, cell.kind, cell.length, cell.depth, cell.trial])


class Store:
    """The results of one folder; None keeps them in memory only."""

    def __init__(self, folder: Path | None, config_sha256: str, *, fresh: bool = False) -> None:
        """Opens the folder, and drops a torn last line.

        Args: fresh: forgets rows of the same configuration (they stay in the file, superseded).
        Raises: InputError if results.jsonl is damaged; ResourceError if nothing can be written.
        """
        self.folder = folder
        self.config_sha256 = config_sha256
        self.rows: dict[str, Row] = {}
        self.num_resumed = 0
        self._line = 0
        self._lines: dict[str, int] = {}
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / RESULTS
            self._drop_torn_line(path)
            for number, row in read_rows(path):
                self._line = number
                if row.get("config_sha256") == config_sha256:
                    self._keep(row, number)
            if fresh:
                self.rows.clear()
            self.num_resumed = len(self.rows)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ResourceError(
                f"cannot write the results: {error.strerror}", where=str(folder)
            ) from None

    def take(self, rows: Mapping[str, Row]) -> None:
        """Counts these finished rows, by their keys, as here."""
        for number, (key, row) in enumerate(rows.items(), 1):
            if key not in self.rows:
                self._keep(row, number)

    def has(self, cell: Cell) -> bool:
        """Whether the trial is done; one that failed is not."""
        return row_key(self.config_sha256, cell) in self.rows

    def add(self, row: Row) -> None:
        """Appends a row, on the disk before this returns.

        Raises: ResourceError if the disk is full.
        """
        self._line += 1
        if self.folder is not None:
            line = json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"
            try:
                _write_all(self._file, line.encode())
                os.fsync(self._file)
            except OSError as error:
                raise ResourceError(
                    f"cannot write the results: {error.strerror}", where=str(self.folder)
                ) from None
        self._keep(row, self._line)

    def trials(self) -> list[Trial]:
        """All finished trials, in an order that does not depend on when they ran."""
        found = [trial_of(row, self._lines[key]) for key, row in self.rows.items()]
        return sorted(found, key=lambda t: (t.kind, t.length, t.depth, t.trial))

    def _keep(self, row: Row, line: int) -> None:
        key = str(row.get("key"))
        if row.get("status") == "ok":
            self.rows[key] = row
            self._lines[key] = line
        else:
            self.rows.pop(key, None)

    def _drop_torn_line(self, path: Path) -> None:
        if not path.exists():
            return
        with path.open("r+b") as stream:
            size = stream.seek(0, os.SEEK_END)
            tail = min(size, MAX_LINE_BYTES)
            stream.seek(size - tail)
            data = stream.read()
            if data and not data.endswith(b"\n"):
                stream.truncate(size - tail + data.rfind(b"\n") + 1)


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """(line number, row) of a results.jsonl. Raises: InputError for a line that is no row."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.endswith(b"\n"):
                return  # torn: its trial was in progress
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict) or row.get("schema") != SCHEMA:
                raise InputError(f"line {number} is no row of results", where=str(path))
            yield number, row


def trial_of(row: Mapping[str, object], line: int = 0) -> Trial:
    """The trial of a row. Raises: InputError if the row is incomplete."""
    try:
        return _trial(row, line)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(f"row {line} is incomplete", where=RESULTS) from None


def _trial(row: Mapping[str, object], line: int) -> Trial:
    score, forced = _part(row, "score"), row.get("forced")
    recipe = _part(row, "recipe")
    assert forced is None or isinstance(forced, dict)
    generated = row["generated"]
    others = row.get("other_needles", [])
    if not isinstance(others, list):
        raise TypeError("other_needles")
    return Trial(
        kind=str(recipe["kind"]),
        length=int(str(row["length_target"])),
        depth=float(str(row["depth_target"])),
        trial=int(str(row["trial"])),
        hit=bool(row["hit"]),
        verdict=str(score["verdict"]),
        length_actual=int(str(row["length_actual"])),
        depth_actual=_number(row["depth_actual"]),
        start=_integer(row["needle_token_start"]),
        border_crossed=bool(row["chunk_border_crossed"]),
        needle_border=_integer(recipe["needle_border_distance"]),
        question_border=_integer(recipe["question_border_distance"]),
        key=str(recipe["key"]),
        gold=str(row["gold"]),
        generated=None if generated is None else str(generated),
        logprob=None if forced is None else _number(forced["logprob"]),
        rank=None if forced is None else _integer(forced["rank"]),
        seconds=float(str(row["prefill_s"])) + float(str(row["decode_s"])),
        line=line,
        others=tuple(_trial({**row, **_other_needle(row, other)}, line) for other in others),
    )


def _other_needle(row: Mapping[str, object], other: Mapping[str, object]) -> dict[str, object]:
    """What differs in a row for another needle of its prompt."""
    recipe = {
        **_part(row, "recipe"),
        "kind": OTHER_NEEDLE,
        "key": other["key"],
        "needle_border_distance": other["needle_border_distance"],
    }
    seconds = {"prefill_s": 0.0, "decode_s": 0.0}  # told with the prompt
    return {**other, **seconds, "recipe": recipe, "other_needles": []}


def _part(row: Mapping[str, object], name: str) -> Mapping[str, object]:
    part = row[name]
    if not isinstance(part, dict):
        raise TypeError(name)
    return part


def _number(value: object) -> float | None:
    return None if value is None else float(str(value))


def _integer(value: object) -> int | None:
    return None if value is None else int(str(value))


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
