"""What a test has shown: cells, pooled rows with intervals, effective length, controls, misses."""

from collections.abc import Iterable, Mapping, Sequence

from llamatool.errors import InputError
from llamatool.needle.experiment import Design
from llamatool.needle.statistics import Paired, Share, effective_length, paired, wilson
from llamatool.needle.store import Trial
from llamatool.records import record

MEANING = (
    "It shows that a fact can be fetched by its key from a position of the context. It does not"
    " show reasoning over long text, and does not predict the quality of other tasks."
)
BASE_SHARE = 0.85  # of the short control's score, which a length has to reach
CONTROL_KINDS = ("no_needle", "wrong_key", "short")


@record
class Count:
    """Hits out of trials, with the Wilson interval of the share."""

    length: int | None
    depth: float | None
    trials: int
    hits: int

    @property
    def share(self) -> float:
        """Of the hits; 0 without trials."""
        return self.hits / self.trials if self.trials else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """95 %."""
        return wilson(self.hits, self.trials)


@record
class Compute:
    """What it took."""

    prefill_tokens: int
    naive_prefill_tokens: int
    seconds: float


@record
class Report:
    """The result of a test."""

    model: str
    mode: str
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    cells: tuple[Count, ...]
    by_length: tuple[Count, ...]
    by_depth: tuple[Count, ...]
    straddle: tuple[Count, ...]  # needles across a chunk border, by length
    controls: Mapping[str, Count]
    effective_length: int | None
    threshold: float
    threshold_why: str
    misses: tuple[Trial, ...]
    away_from_borders: Count | None  # of a model with chunks: needles that cross no border
    texts: Mapping[int, int]  # distinct haystacks by length
    compute: Compute
    trials: tuple[Trial, ...]
    needles: int = 1  # in each prompt
    recall: tuple[Count, ...] = ()  # by length, all needles of all prompts; none with one needle
    all_right: tuple[Count, ...] = ()  # by length, prompts whose needles were all found
    cells_recall: tuple[Count, ...] = ()  # by cell
    cells_all_right: tuple[Count, ...] = ()
    notes: tuple[str, ...] = ()
    num_missing: int = 0  # trials not run, where a budget or an error stopped the test
    errors: tuple[str, ...] = ()

    @property
    def overall(self) -> Count:
        """All trials of the grid together."""
        return Count(
            None,
            None,
            sum(count.trials for count in self.by_length),
            sum(count.hits for count in self.by_length),
        )

    @property
    def above_control(self) -> float:
        """Share of hits minus the share of right answers without a needle."""
        return self.overall.share - self.controls["no_needle"].share


def make_report(
    model: str,
    design: Design,
    trials: Sequence[Trial],
    *,
    texts: Mapping[int, int],
    compute: Compute,
    threshold: float | None = None,
    lower_bound: bool = False,
    has_chunks: bool = False,
    notes: Sequence[str] = (),
    num_missing: int = 0,
    errors: Sequence[str] = (),
) -> Report:
    """The report of finished trials.

    Args: threshold: absolute; by default 0.85 of the score in a short context.
    lower_bound: a length has reached the threshold if the lower end of its interval has.
    """
    grid = [trial for trial in trials if trial.kind == "needle"]
    controls = {
        kind: _count([trial for trial in trials if trial.kind == kind]) for kind in CONTROL_KINDS
    }
    of_length = [(n, [t for t in grid if t.length == n]) for n in design.lengths]
    by_length = tuple(_count(found, length=length) for length, found in of_length)
    base = controls["short"]
    if threshold is not None:
        wanted, why = threshold, "as asked for"
    else:
        wanted = BASE_SHARE * (base.share if base.trials else 1.0)
        why = f"{BASE_SHARE} x the score in a short context" if base.trials else "no short control"
    by_cell = [
        (length, depth, [t for t in grid if t.length == length and t.depth == depth])
        for length in design.lengths
        for depth in design.depths
    ]
    several = design.needles > 1
    shares = [Share(c.length or 0, c.hits, c.trials) for c in by_length]
    away = [trial for trial in grid if not trial.border_crossed]
    return Report(
        model=model,
        mode=design.mode,
        lengths=design.lengths,
        depths=design.depths,
        cells=tuple(_count(found, length=n, depth=depth) for n, depth, found in by_cell),
        by_length=by_length,
        by_depth=tuple(
            _count([t for t in grid if t.depth == depth], depth=depth) for depth in design.depths
        ),
        straddle=tuple(
            _count(
                [t for t in trials if t.kind == "straddle" and t.length == length], length=length
            )
            for length in design.lengths
        )
        if design.straddle
        else (),
        controls=controls,
        effective_length=effective_length(shares, wanted, lower_bound=lower_bound)
        if wanted > 0
        else None,
        threshold=wanted,
        threshold_why=why,
        misses=tuple(t for t in trials if not t.hit and t.kind in ("needle", "straddle", "short"))
        + tuple(t for t in trials if t.hit and t.kind in ("no_needle", "wrong_key"))
        + tuple(other for t in grid for other in t.others if not other.hit),
        away_from_borders=_count(away) if has_chunks else None,
        texts=texts,
        compute=compute,
        trials=tuple(trials),
        needles=design.needles,
        recall=tuple(_recall(found, n) for n, found in of_length) if several else (),
        all_right=tuple(_all_right(found, n) for n, found in of_length) if several else (),
        cells_recall=tuple(_recall(found, n, depth) for n, depth, found in by_cell)
        if several
        else (),
        cells_all_right=tuple(_all_right(found, n, depth) for n, depth, found in by_cell)
        if several
        else (),
        notes=tuple(notes),
        num_missing=num_missing,
        errors=tuple(errors),
    )


def summary(report: Report) -> dict[str, object]:
    """The object of --json and summary.json; its keys are frozen.

    `needles` is there where prompts hold several.
    """
    return {
        "schema": 1,
        "model": report.model,
        "mode": report.mode,
        "lengths": list(report.lengths),
        "depths": list(report.depths),
        "cells": [{"length": c.length, "depth": c.depth, **_counted(c)} for c in report.cells],
        "by_length": [{"length": c.length, **_counted(c)} for c in report.by_length],
        "effective_length": report.effective_length,
        "controls": {
            kind: {"trials": count.trials, "hits": count.hits}
            for kind, count in report.controls.items()
        },
        "compute": {
            "prefill_tokens": report.compute.prefill_tokens,
            "naive_prefill_tokens": report.compute.naive_prefill_tokens,
            "seconds": round(report.compute.seconds, 3),
        },
        **({"needles": _needles(report)} if report.needles > 1 else {}),
    }


def _needles(report: Report) -> dict[str, object]:
    return {
        "per_prompt": report.needles,
        "by_length": [
            {"length": recall.length, "recall": _counted(recall), "all_right": _counted(right)}
            for recall, right in zip(report.recall, report.all_right, strict=True)
        ],
    }


@record
class Comparison:
    """Two runs on the same trials."""

    pooled: Paired
    by_length: tuple[tuple[int, Paired], ...]
    num_unpaired: int  # trials that only one of them has


def compare(first: Iterable[Trial], second: Iterable[Trial]) -> Comparison:
    """The paired comparison of two runs, by cell and trial.

    Raises: InputError if they have no trial in common.
    """
    hits = [
        {(t.length, t.depth, t.trial): t.hit for t in run if t.kind == "needle"}
        for run in (first, second)
    ]
    common = sorted(hits[0].keys() & hits[1].keys())
    if not common:
        raise InputError(
            "the two runs have no trial in common",
            hint="compare runs of the same lengths, depths and seed",
        )

    def pairs(cells: Sequence[tuple[int, float, int]]) -> Paired:
        return paired([hits[0][cell] for cell in cells], [hits[1][cell] for cell in cells])

    lengths = sorted({length for length, _, _ in common})
    return Comparison(
        pairs(common),
        tuple(
            (length, pairs([cell for cell in common if cell[0] == length])) for length in lengths
        ),
        len(hits[0].keys() ^ hits[1].keys()),
    )


def _count(
    trials: Sequence[Trial], *, length: int | None = None, depth: float | None = None
) -> Count:
    return Count(length, depth, len(trials), sum(trial.hit for trial in trials))


def _recall(trials: Sequence[Trial], length: int, depth: float | None = None) -> Count:
    """Needles found out of all that stand in the prompts."""
    needles = [needle for trial in trials for needle in (trial, *trial.others)]
    return _count(needles, length=length, depth=depth)


def _all_right(trials: Sequence[Trial], length: int, depth: float | None = None) -> Count:
    """Prompts all of whose needles were found."""
    return Count(length, depth, len(trials), sum(trial.all_right for trial in trials))


def _counted(count: Count) -> dict[str, object]:
    return {
        "trials": count.trials,
        "hits": count.hits,
        "interval": [round(end, 4) for end in count.interval],
    }
