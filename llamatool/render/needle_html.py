"""The needle grid as SVG, and the report as one HTML file that needs nothing but a browser."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Literal

from llamatool.needle.report import MEANING, Count, Report
from llamatool.needle.store import Trial
from llamatool.units import format_tokens

Palette = Literal["cividis", "classic"]

# cividis (Nunez, Anderton and Renslow 2018) looks the same to colour-blind eyes; the classic
# colours are those of the first needle plots.
_COLOURS: dict[Palette, tuple[str, ...]] = {
    "cividis": (
        *("#00224e", "#123570", "#3b496c", "#575d6d", "#707173"),
        *("#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"),
    ),
    "classic": ("#f0496e", "#ebb839", "#0cd79f"),
}
_EMPTY = "#e6e6e6"  # a cell without trials
_CELL, _ROW, _LEFT, _TOP = 58, 26, 62, 66  # pixels
MAX_TRIALS_IN_TITLE = 12
MAX_MISSES = 700  # in the report; with several needles in a prompt there may be many thousand


def colour(share: float, palette: Palette) -> str:
    """The colour of a share from 0 to 1, as #rrggbb.

    Example: 1 -> #fee838 (cividis), #0cd79f (classic).
    """
    stops = _COLOURS[palette]
    place = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    low = min(int(place), len(stops) - 2)
    first, second = (_rgb(stop) for stop in stops[low : low + 2])
    part = place - low
    mixed = (round(a + (b - a) * part) for a, b in zip(first, second, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def ink(share: float, palette: Palette) -> str:
    """Black or white, whichever is easier to read on the colour of a share."""
    red, green, blue = (value / 255 for value in _rgb(colour(share, palette)))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "#000000" if luminance > 0.18 else "#ffffff"


def to_svg(report: Report, palette: Palette, *, with_titles: bool = True) -> str:
    """The grid: length from left to right, depth from top to bottom, hits in every cell.

    Args: with_titles: the answers of a cell appear when the pointer rests on it.
    """
    lengths, depths = report.lengths, report.depths
    width = max(420, _LEFT + _CELL * len(lengths) + 20, 24 + 9 * len(_title(report)))
    height = _TOP + _ROW * len(depths) + 46
    counts = {(count.length, count.depth): count for count in report.cells}
    trials: dict[tuple[int, float], list[Trial]] = {}
    for trial in report.trials:
        if trial.kind == "needle":
            trials.setdefault((trial.length, trial.depth), []).append(trial)
    body = [
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(_title(report))}</text>',
        f'<text x="{_LEFT}" y="{_TOP - 26}">context length in tokens</text>',
        f'<text x="12" y="{_TOP - 8}">depth</text>',
    ]
    for column, length in enumerate(lengths):
        x = _LEFT + _CELL * column + _CELL / 2
        body.append(
            f'<text x="{x:g}" y="{_TOP - 8}" text-anchor="middle">{format_tokens(length)}</text>'
        )
    for row, depth in enumerate(depths):
        y = _TOP + _ROW * row
        body.append(
            f'<text x="{_LEFT - 8}" y="{y + 17}" text-anchor="end">{100 * depth:.4g} %</text>'
        )
        for column, length in enumerate(lengths):
            x = _LEFT + _CELL * column
            cell = counts[length, depth]
            title = _cell_title(cell, trials.get((length, depth), ())) if with_titles else ""
            body.append(_cell(x, y, cell, title, palette))
    body.append(_legend(_TOP + _ROW * len(depths) + 14, palette))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" font-size="12">\n'
        f"<title>{escape(_title(report))}</title>\n"
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _cell(x: float, y: float, cell: Count, title: str, palette: Palette) -> str:
    fill = colour(cell.share, palette) if cell.trials else _EMPTY
    text_fill = ink(cell.share, palette) if cell.trials else "#000000"
    text = f"{cell.hits}/{cell.trials}" if cell.trials else "-"
    note = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<g>{note}<rect x="{x:g}" y="{y:g}" width="{_CELL - 2}" height="{_ROW - 2}" '
        f'fill="{fill}"/><text x="{x + _CELL / 2 - 1:g}" y="{y + 16:g}" text-anchor="middle" '
        f'fill="{text_fill}">{text}</text></g>'
    )


def _cell_title(cell: Count, trials: Sequence[Trial]) -> str:
    low, high = cell.interval
    lines = [
        f"{format_tokens(cell.length or 0)} tokens, depth {100 * (cell.depth or 0):.4g} %:"
        f" {cell.hits} of {cell.trials}, 95 % interval {low:.2f} to {high:.2f}"
    ]
    for trial in trials[:MAX_TRIALS_IN_TITLE]:
        answer = "" if trial.generated is None else " ".join(trial.generated.split())[:60]
        logprob = "" if trial.logprob is None else f", log p {trial.logprob:.3f}"
        border = ""
        if trial.needle_border is not None:
            border = (
                ", across a border"
                if trial.border_crossed
                else (f", border {trial.needle_border:+d}")
            )
        others = ""
        if trial.others:
            found = sum(needle.hit for needle in (trial, *trial.others))
            others = f", {found} of {1 + len(trial.others)} needles"
        lines.append(
            f"{trial.verdict}: {answer or trial.gold}{logprob}{border}{others},"
            f" {trial.seconds:.2f} s"
        )
    return "\n".join(lines)


def _legend(y: float, palette: Palette) -> str:
    parts = [f'<text x="{_LEFT - 8}" y="{y + 12:g}" text-anchor="end">0 %</text>']
    for step in range(11):
        x = _LEFT + 18 * step
        parts.append(
            f'<rect x="{x}" y="{y:g}" width="18" height="14" fill="{colour(step / 10, palette)}"/>'
        )
    parts.append(f'<text x="{_LEFT + 18 * 11 + 6}" y="{y + 12:g}">100 % of the trials</text>')
    return "".join(parts)


def to_html(report: Report, palette: Palette) -> str:
    """The report: both palettes, pooled rows, controls, misses, and what the test means."""
    other: Palette = "classic" if palette == "cividis" else "cividis"
    parts = [
        f"<h1>{escape(_title(report))}</h1>",
        f"<p>{escape(MEANING)}</p>",
        *(f'<p class="note">{escape(note)}</p>' for note in report.notes),
        '<input type="checkbox" id="palette"><label for="palette"> other colours</label>',
        f'<div class="one">{to_svg(report, palette)}</div>',
        f'<div class="two">{to_svg(report, other, with_titles=False)}</div>',
        "<p>Rest the pointer on a cell to see its answers.</p>",
        "<h2>By length</h2>",
        _count_table(report.by_length, "length"),
        *(
            (
                f"<h2>All {report.needles} needles of each prompt</h2>",
                "<p>Needles found, of all that stand in the prompts:</p>",
                _count_table(report.recall, "length"),
                "<p>Prompts whose needles were all found:</p>",
                _count_table(report.all_right, "length"),
            )
            if report.needles > 1
            else ()
        ),
        "<h2>By depth</h2>",
        _count_table(report.by_depth, "depth"),
        *(
            ("<h2>Needles across a chunk border</h2>", _count_table(report.straddle, "length"))
            if report.straddle
            else ()
        ),
        "<h2>Effective length and controls</h2>",
        _facts(report),
        "<h2>Misses</h2>",
        _miss_table(report.misses),
    ]
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(_title(report))}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#111}"
    "table{border-collapse:collapse}th,td{padding:.15em .8em;text-align:right;"
    "border-bottom:1px solid #ddd}td.t,th.t{text-align:left}.note{color:#7a4b00}"
    "div{overflow-x:auto}.two{display:none}#palette:checked~.one{display:none}"
    "#palette:checked~.two{display:block}"
)


def _facts(report: Report) -> str:
    length = report.effective_length
    compute = report.compute
    rows = [
        ("effective length", "none of the tested lengths" if length is None else f"{length:,}"),
        ("threshold", f"{report.threshold:.1%}, {report.threshold_why}"),
        *(
            (f"control: {kind.replace('_', ' ')}", f"{count.hits} of {count.trials}")
            for kind, count in report.controls.items()
        ),
        ("tokens read", f"{compute.prefill_tokens:,}"),
        ("tokens, prompt by prompt", f"{compute.naive_prefill_tokens:,}"),
        ("seconds", f"{compute.seconds:.1f}"),
    ]
    if report.num_missing:
        rows.append(("trials not run", str(report.num_missing)))
    cells = (
        f'<tr><td class="t">{escape(name)}</td><td class="t">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return "<table>" + "".join(cells) + "</table>"


def _count_table(counts: Sequence[Count], by: Literal["length", "depth"]) -> str:
    rows = []
    for count in counts:
        low, high = count.interval
        name = format_tokens(count.length or 0)
        if by == "depth":
            name = f"{100 * (count.depth or 0):.4g} %"
        rows.append(
            f"<tr><td>{name}</td><td>{count.hits}</td><td>{count.trials}</td>"
            f"<td>{count.share:.1%}</td><td>{low:.1%} to {high:.1%}</td></tr>"
        )
    head = f"<tr><th>{by}</th><th>hits</th><th>trials</th><th>share</th><th>95 % interval</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _miss_table(misses: Sequence[Trial]) -> str:
    if not misses:
        return "<p>None.</p>"
    rows = []
    for trial in misses[:MAX_MISSES]:
        answer = "" if trial.generated is None else " ".join(trial.generated.split())[:120]
        border = "" if trial.needle_border is None else f"{trial.needle_border:+d}"
        cells = (
            trial.kind.replace("_", " "),
            format_tokens(trial.length),
            f"{100 * trial.depth:.4g} %",
            str(trial.trial),
            trial.verdict,
            trial.gold,
            answer,
            "" if trial.logprob is None else f"{trial.logprob:.3f}",
            "across" if trial.border_crossed else border,
        )
        rows.append("<tr>" + "".join(f'<td class="t">{escape(c)}</td>' for c in cells) + "</tr>")
    names = ("kind", "length", "depth", "trial", "verdict", "value", "answer", "log p", "border")
    head = "<tr>" + "".join(f'<th class="t">{name}</th>' for name in names) + "</tr>"
    more = len(misses) - len(rows)
    note = f"<p>{more:,} more in results.jsonl.</p>" if more else ""
    return f"<table>{head}{''.join(rows)}</table>{note}"


def _title(report: Report) -> str:
    trials = max((count.trials for count in report.cells), default=0)
    return f"Needle test: {subject_of(report)}, {trials} trials per cell"


def subject_of(report: Report) -> str:
    """Model and kind of prompts.

    Example: `pocket, single`; with several needles in a prompt `pocket, single, 4 needles`.
    """
    needles = f", {report.needles} needles" if report.needles > 1 else ""
    return f"{short_name(report)}, {report.mode}{needles}"


def short_name(report: Report) -> str:
    """The model without the folders it lies in.

    Example: `./models/Llama-3.2-1B/` -> `Llama-3.2-1B`.
    """
    return report.model.rstrip("/\\").replace("\\", "/").rpartition("/")[2] or report.model


def _rgb(text: str) -> tuple[int, int, int]:
    red, green, blue = (int(text[i:j], 16) for i, j in pairwise((1, 3, 5, 7)))
    return red, green, blue
