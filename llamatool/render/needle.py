"""The result of a needle test on a terminal, in a pipe, as CSV, SVG and HTML."""

import csv
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from llamatool.errors import one_line
from llamatool.needle.experiment import Design
from llamatool.needle.plan import Plan
from llamatool.needle.report import MEANING, Comparison, Count, Report
from llamatool.needle.session import Shown, Test, replace_file
from llamatool.needle.statistics import Paired
from llamatool.needle.store import RESULTS, Trial
from llamatool.render.blocks import Block, Grid, Lines, is_rich, plain, show
from llamatool.render.needle_html import Palette, colour, ink, subject_of, to_html, to_svg
from llamatool.units import format_bytes, format_tokens

if TYPE_CHECKING:
    from rich.table import Table

MAX_MISSES = 12  # that a terminal shows; all are in the files
ALL_HIT = "."  # in --plain, where a digit is the tenths of hits
_FLOPS = ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"))


def say_plan(test: Test, plan: Plan, *, file: TextIO) -> None:
    """What is about to run, in a line or two, before anything does."""
    for line in (*test.notes(), *_plan_lines(test, plan)[:2]):
        file.write(one_line(line) + "\n")
    file.flush()


def show_plan(test: Test, plan: Plan) -> None:
    """The whole plan."""
    show([Lines((*test.notes(), *_plan_lines(test, plan)))])


def plan_json(test: Test, plan: Plan) -> dict[str, Any]:
    """The plan as an object."""
    return {
        "schema": 1,
        "model": test.subject.name,
        "mode": plan.mode,
        "template": test.subject.frame.why,
        "lengths": list(test.design.lengths),
        "depths": list(test.design.depths),
        "prompts": plan.num_prompts,
        "prefill_tokens": plan.prefill_tokens,
        "naive_prefill_tokens": plan.naive_prefill_tokens,
        "flops": plan.flops,
        "kv_bytes": plan.kv_bytes,
        "seconds": None if plan.seconds is None else round(plan.seconds, 1),
        **({"needles": test.design.needles} if test.design.needles > 1 else {}),
    }


def _plan_lines(test: Test, plan: Plan) -> tuple[str, ...]:
    design, sizes = test.design, test.experiment.sizes
    estimate = "" if plan.seconds is None else f", about {_duration(plan.seconds)}"
    ratio = plan.naive_prefill_tokens / plan.prefill_tokens
    many = design.needles > 1
    needle = f"{design.needles} needles of {sizes.needle}" if many else f"needle {sizes.needle}"
    return (
        f"plan: {plan.mode}, {len(design.lengths)} x {len(design.depths)} cells,"
        f" {design.trials} trials each, {plan.num_prompts} prompts with controls;"
        f" template: {test.subject.frame.why}",
        f"      {plan.prefill_tokens:,} tokens to read ({ratio:.1f} x fewer than prompt by prompt),"
        f" {_flops(plan.flops)}, KV cache {format_bytes(plan.kv_bytes)}{estimate}",
        f"      of each prompt: {needle} tokens, question {sizes.tail}, answer {sizes.budget}",
    )


class LiveGrid:
    """The grid while it fills, on the terminal of standard error."""

    def __init__(self, design: Design, palette: Palette) -> None:
        from rich.console import Console
        from rich.live import Live

        self._design = design
        self._palette = palette
        self._counts: dict[tuple[int, float], list[bool]] = {}
        self._others = 0
        self._started = time.monotonic()
        console = Console(stderr=True)
        self._live = Live(console=console, transient=True, refresh_per_second=4)
        self._width = console.width

    def __enter__(self) -> "LiveGrid":
        self._live.__enter__()
        self.tick()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def add(self, trial: Trial) -> None:
        """Counts a trial."""
        if trial.kind == "needle":
            self._counts.setdefault((trial.length, trial.depth), []).append(trial.hit)
        else:
            self._others += 1
        self.tick()

    def tick(self) -> None:
        """Draws the grid as it is now."""
        counts = {
            cell: Count(cell[0], cell[1], len(hits), sum(hits))
            for cell, hits in self._counts.items()
        }
        table, _ = _rich_grid(
            self._design.lengths, self._design.depths, counts, self._palette, self._width
        )
        seconds = time.monotonic() - self._started
        table.caption = f"{seconds:.0f} s, {self._others} controls"
        self._live.update(table)


def show_report(
    report: Report,
    *,
    palette: Palette,
    plain: bool,
    out: Path | None,
    file: TextIO | None = None,
) -> None:
    """The whole report on standard output."""
    stream = file or sys.stdout
    if plain:
        stream.write(_character_grid(report))
    elif is_rich(stream):
        _show_rich_grid(report, palette, stream)
    else:
        show([_grid(report)], file=stream)
    stream.write("\n")
    # On a terminal they have just been said.
    notes = () if stream.isatty() else report.notes
    show(report_blocks(report, out, notes), file=stream)


def report_blocks(report: Report, out: Path | None, notes: Sequence[str] = ()) -> list[Block]:
    """Everything but the grid."""
    blocks: list[Block] = [_by_length(report)]
    if report.needles > 1:
        blocks.append(_all_needles(report))
    if report.straddle:
        blocks.append(_straddle(report))
    blocks.append(Lines(tuple(_findings(report))))
    if report.misses:
        blocks.append(_misses(report, out))
    compute = report.compute
    ending = [
        f"{compute.prefill_tokens:,} tokens read instead of {compute.naive_prefill_tokens:,}"
        f" in {_duration(compute.seconds)}"
    ]
    if report.num_missing:
        ending.append(f"{report.num_missing} trials have not run")
    if out is not None:
        names = (RESULTS, "summary.json", "grid.csv", "grid.svg", "report.html")
        ending.append("written: " + ", ".join(str(out / name) for name in names))
    ending += notes
    ending.append(MEANING)
    blocks.append(Lines(tuple(ending)))
    return blocks


def _grid(report: Report) -> Grid:
    counts = {(c.length, c.depth): c for c in report.cells}
    return Grid(
        columns=("depth", *(format_tokens(length) for length in report.lengths)),
        rows=tuple(
            (
                _percent(depth),
                *(_hits(counts[length, depth]) for length in report.lengths),
            )
            for depth in report.depths
        ),
        align="r" * (1 + len(report.lengths)),
        title=_title(report),
    )


def _character_grid(report: Report) -> str:
    """One character per cell, depths downwards: `.` for all hits, else the tenths of them."""
    counts = {(c.length, c.depth): c for c in report.cells}
    names = [format_tokens(length) for length in report.lengths]
    height = max(len(name) for name in names)
    lines = [_title(report), f"{ALL_HIT} all trials hit, 0-9 tenths of them, - not run"]
    for row in range(height):
        heads = (name.rjust(height)[row] for name in names)
        lines.append("      " + " ".join(heads).rstrip())
    for depth in report.depths:
        cells = " ".join(_character(counts[length, depth]) for length in report.lengths)
        lines.append(f"{_percent(depth):>5} {cells}")
    return "\n".join(lines) + "\n"


def _character(count: Count) -> str:
    if not count.trials:
        return "-"
    return ALL_HIT if count.hits == count.trials else str(10 * count.hits // count.trials)


def _show_rich_grid(report: Report, palette: Palette, stream: TextIO) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    counts = {(c.length or 0, c.depth or 0.0): c for c in report.cells}
    table, hidden = _rich_grid(report.lengths, report.depths, counts, palette, console.width)
    console.print(Text(_title(report), style="bold"))
    console.print(table)
    if hidden:
        console.print(Text(f"{hidden} lengths are not shown: the terminal is too narrow"))


def _rich_grid(
    lengths: Sequence[int],
    depths: Sequence[float],
    counts: dict[tuple[int, float], Count],
    palette: Palette,
    width: int,
) -> "tuple[Table, int]":
    """The coloured grid, and how many lengths were dropped to fit the width."""
    from rich.table import Table
    from rich.text import Text

    cell_columns = 3 + max(
        [len(format_tokens(length)) for length in lengths]
        + [len(_hits(count)) for count in counts.values()]
        + [3]
    )
    room = max(1, (width - 8) // cell_columns)
    shown = _spread(lengths, room)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("depth", justify="right", no_wrap=True)
    for length in shown:
        table.add_column(format_tokens(length), justify="center", no_wrap=True)
    coloured = not os.environ.get("NO_COLOR")
    for depth in depths:
        row = [Text(_percent(depth))]
        for length in shown:
            count = counts.get((length, depth))
            if count is None or not count.trials:
                row.append(Text("."))
                continue
            style = f"{ink(count.share, palette)} on {colour(count.share, palette)}"
            row.append(Text(f" {_hits(count)} ", style=style if coloured else ""))
        table.add_row(*row)
    return table, len(lengths) - len(shown)


def _spread(lengths: Sequence[int], room: int) -> list[int]:
    """At most `room` lengths, evenly chosen, the first and the last among them."""
    if len(lengths) <= room:
        return list(lengths)
    if room == 1:
        return [lengths[-1]]
    return [lengths[i * (len(lengths) - 1) // (room - 1)] for i in range(room)]


def _title(report: Report) -> str:
    trials = max((count.trials for count in report.cells), default=0)
    return f"{subject_of(report)}: hits of {trials} trials by depth and length"


def _by_length(report: Report) -> Grid:
    return Grid(
        columns=("length", "hits", "trials", "share", "95 % interval", "texts"),
        rows=tuple(
            (
                format_tokens(count.length or 0),
                str(count.hits),
                str(count.trials),
                _share(count),
                _interval(count),
                str(report.texts.get(count.length or 0, 0)),
            )
            for count in report.by_length
        ),
        align="rrrrrr",
        title="All depths together",
    )


def _all_needles(report: Report) -> Grid:
    """Recall per needle and prompts without a miss; the grid shows one needle per prompt."""
    return Grid(
        columns=("length", "found", "recall", "95 % interval", "all", "share", "95 % interval"),
        rows=tuple(
            (
                format_tokens(recall.length or 0),
                *(cell for count in (recall, right) for cell in _shown_count(count)),
            )
            for recall, right in zip(report.recall, report.all_right, strict=True)
        ),
        align="rrrrrrr",
        title=f"All {report.needles} needles of each prompt: found, and prompts with all found",
    )


def _shown_count(count: Count) -> tuple[str, str, str]:
    return _hits(count), _share(count), _interval(count)


def _straddle(report: Report) -> Grid:
    return Grid(
        columns=("length", "hits", "trials", "share", "95 % interval"),
        rows=tuple(
            (
                format_tokens(count.length or 0),
                str(count.hits),
                str(count.trials),
                _share(count),
                _interval(count),
            )
            for count in report.straddle
        ),
        align="rrrrr",
        title="Needles across a chunk border, on purpose",
    )


def _findings(report: Report) -> list[str]:
    lines = []
    length = report.effective_length
    found = "none of the tested lengths" if length is None else f"{length:,} tokens"
    lines.append(
        f"effective length: {found} (every length up to it reaches {report.threshold:.1%},"
        f" {report.threshold_why})"
    )
    controls = report.controls
    words = {
        "no_needle": "without the needle",
        "wrong_key": "with another key",
        "short": "in a short context",
    }
    if any(count.trials for count in controls.values()):
        parts = [
            f"{words[kind]} {count.hits}/{count.trials}"
            for kind, count in controls.items()
            if count.trials
        ]
        lines.append("controls: " + ", ".join(parts))
    if controls["no_needle"].trials:
        lines.append(
            "share of hits minus that without a needle:"
            f" {100 * report.above_control:+.1f} percentage points"
        )
    away = report.away_from_borders
    if away is not None and away.trials != report.overall.trials:
        crossing = report.overall.trials - away.trials
        lines.append(
            f"away from chunk borders: {away.hits}/{away.trials} {_interval(away)};"
            f" {crossing} needles lie across one"
        )
    return lines


def _misses(report: Report, out: Path | None) -> Grid:
    rows = tuple(
        (
            trial.kind.replace("_", " "),
            format_tokens(trial.length),
            _percent(trial.depth),
            str(trial.trial),
            trial.verdict,
            trial.gold,
            _shortened(trial.generated),
            "" if trial.logprob is None else f"{trial.logprob:.2f}",
            _border(trial),
        )
        for trial in report.misses[:MAX_MISSES]
    )
    more = len(report.misses) - len(rows)
    return Grid(
        columns=(
            "kind", "length", "depth", "trial", "verdict", "value", "answer", "log p", "border",
        ),
        rows=rows,
        align="lrrrlllrl",
        title="Misses" + (f" ({more} more in {RESULTS if out else '--out DIR'})" if more else ""),
    )  # fmt: skip


def _border(trial: Trial) -> str:
    if trial.needle_border is None:
        return ""
    return "across" if trial.border_crossed else f"{trial.needle_border:+d}"


def comparison_blocks(found: Comparison, folders: Sequence[str]) -> list[Block]:
    """Two runs side by side."""

    def row(name: str, pair: Paired) -> tuple[str, ...]:
        counts = (pair.both, pair.only_first, pair.only_second, pair.neither)
        return (name, *map(str, counts), f"{pair.p_value:.4f}")

    rows = [row(format_tokens(length), pair) for length, pair in found.by_length]
    lines = [f"A is {folders[0]}, B is {folders[1]}; p: exact McNemar test of no difference"]
    if found.num_unpaired:
        lines.append(f"{found.num_unpaired} trials stand in one of them only and are left out")
    return [
        Grid(
            columns=("length", "both", "only A", "only B", "neither", "p"),
            rows=(*rows, row("all", found.pooled)),
            align="rrrrrr",
            title="Hits on the same trials",
        ),
        Lines(tuple(lines)),
    ]


def comparison_json(found: Comparison, folders: Sequence[str]) -> dict[str, Any]:
    """Two runs as an object."""

    def pair(value: Paired) -> dict[str, Any]:
        return {
            "both": value.both,
            "only_a": value.only_first,
            "only_b": value.only_second,
            "neither": value.neither,
            "p_value": value.p_value,
        }

    return {
        "schema": 1,
        "a": folders[0],
        "b": folders[1],
        "pooled": pair(found.pooled),
        "by_length": [{"length": length, **pair(value)} for length, value in found.by_length],
        "unpaired": found.num_unpaired,
    }


def show_prompt(shown: Shown) -> None:
    """The prompt as text; what it is goes to standard error."""
    row = shown.row
    sys.stderr.write(
        f"{len(shown.ids):,} tokens and {shown.num_answer_tokens} kept for the answer;"
        f" value {one_line(str(row.get('gold')))}\n"
    )
    sys.stdout.write(shown.text + "\n")


def shown_json(shown: Shown) -> dict[str, Any]:
    """The prompt with its ids as an object."""
    return {"schema": 1, "ids": list(shown.ids), "text": shown.text, "row": shown.row}


def write_files(folder: Path, report: Report, palette: Palette) -> None:
    """grid.csv, grid.svg and report.html.

    Raises: ResourceError if one cannot be written.
    """
    replace_file(folder / "grid.csv", to_csv(report))
    replace_file(folder / "grid.svg", to_svg(report, palette))
    replace_file(folder / "report.html", to_html(report, palette))


def to_csv(report: Report) -> str:
    """One row per cell; with several needles in a prompt, what was found of all of them."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    several = report.needles > 1
    head = ("length", "depth", "trials", "hits", "share", "low", "high", "mean_logprob")
    writer.writerow((*head, *(("needles", "found", "all_right") if several else ())))
    for number, count in enumerate(report.cells):
        more: tuple[int, ...] = ()
        if several:
            recall, right = report.cells_recall[number], report.cells_all_right[number]
            more = (recall.trials, recall.hits, right.hits)
        low, high = count.interval
        scores = [
            trial.logprob
            for trial in report.trials
            if trial.kind == "needle"
            and (trial.length, trial.depth) == (count.length, count.depth)
            and trial.logprob is not None
        ]
        mean = f"{sum(scores) / len(scores):.4f}" if scores else ""
        writer.writerow(
            (
                count.length,
                count.depth,
                count.trials,
                count.hits,
                f"{count.share:.4f}" if count.trials else "",
                f"{low:.4f}",
                f"{high:.4f}",
                mean,
                *more,
            )
        )
    return stream.getvalue()


def to_text(report: Report, out: Path | None = None) -> str:
    """The report as it stands in a pipe."""
    return plain([_grid(report), *report_blocks(report, out, report.notes)])


def _hits(count: Count) -> str:
    return f"{count.hits}/{count.trials}" if count.trials else "-"


def _share(count: Count) -> str:
    return f"{count.share:.1%}" if count.trials else "-"


def _interval(count: Count) -> str:
    low, high = count.interval
    return f"{low:.1%} to {high:.1%}"


def _percent(depth: float) -> str:
    return f"{100 * depth:.4g}%"


def _shortened(text: str | None, width: int = 24) -> str:
    if text is None:
        return "(forced)"
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def _flops(flops: float) -> str:
    for size, unit in _FLOPS:
        if flops >= size:
            return f"{flops / size:.3g} {unit}"
    return f"{flops:.0f} FLOP"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
