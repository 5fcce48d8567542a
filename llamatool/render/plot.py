"""Line plots, as SVG without a plotting package and as characters for a terminal.

Every series has a letter as well as a colour and a dash, so that a plot can be read in black and
white, by colour-blind eyes, and through a pipe.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise

from llamatool.records import record


@record
class Series:
    """One line: its name and its points, from left to right."""

    name: str
    points: tuple[tuple[float, float], ...]


@record
class Mark:
    """A point of interest, with a word or two beside it."""

    x: float
    y: float
    label: str


@record
class Axis:
    """What an axis shows. A log axis counts in powers of two and needs positive values."""

    label: str
    tick: Callable[[float], str] = "{:g}".format
    log: bool = False
    limits: tuple[float, float] | None = None  # None: those of the points


@record
class Plot:
    """A titled plot of some series."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()


def to_svg(plot: Plot, *, width: int = 760, height: int = 460) -> str:
    """The plot as an SVG document of `width` x `height` pixels.

    Raises: ValueError if there is no point, or one that a log axis cannot show.
    """
    x_scale, y_scale = _scales(plot)
    left, right, bottom = 78, 18, 52
    top = 40 + 20 * -(-len(plot.series) // 2)
    inner_width, inner_height = width - left - right, height - top - bottom

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            round(left + inner_width * x_scale(x), 1),
            round(top + inner_height * (1 - y_scale(y)), 1),
        )

    body = [
        f'<text x="{left}" y="24" font-size="15" font-weight="bold">{escape(plot.title)}</text>'
    ]
    body += _svg_grid(plot, x_scale, y_scale, (left, top, inner_width, inner_height))
    for index, series in enumerate(plot.series):
        style = f'stroke="{_colour(index)}" stroke-dasharray="{_DASHES[index % len(_DASHES)]}"'
        path = " ".join("{:g},{:g}".format(*place(x, y)) for x, y in series.points)
        body.append(f'<polyline points="{path}" fill="none" stroke-width="2" {style}/>')
        body += _svg_legend(index, series.name, style, left, inner_width)
    for mark in plot.marks:
        x, y = place(mark.x, mark.y)
        anchor, shift = ("end", -8) if x > left + 0.6 * inner_width else ("start", 8)
        body.append(f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="black"/>')
        body.append(
            f'<text x="{x + shift:g}" y="{y + 16:g}" text-anchor="{anchor}">'
            f"{escape(mark.label)}</text>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" font-size="12">\n'
        f"<title>{escape(plot.title)}</title>\n"
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def to_text(plot: Plot, *, width: int = 78, height: int = 18) -> str:
    """The plot in characters: one letter per series, `#` where a mark is."""
    x_scale, y_scale = _scales(plot)
    y_ticks = _ticks(plot.y, y_scale.limits, max(2, height // 4))
    gutter = max(len(plot.y.tick(value)) for value in y_ticks) + 2
    columns = width - gutter
    grid = [[" "] * columns for _ in range(height)]

    def row_of(share: float) -> int:
        return min(height - 1, max(0, round((height - 1) * (1 - share))))

    for index, series in enumerate(plot.series):
        _draw(grid, series, letter(index), x_scale, y_scale, row_of)
    for mark in plot.marks:
        grid[row_of(y_scale(mark.y))][round((columns - 1) * x_scale(mark.x))] = "#"
    labels = {row_of(y_scale(value)): plot.y.tick(value) for value in y_ticks}
    lines = [f"{plot.title}  ({plot.y.label} over {plot.x.label})"]
    for number, cells in enumerate(grid):
        label = labels.get(number, "")
        edge = "+" if label else "|"
        lines.append(f"{label:>{gutter - 2}} {edge}{''.join(cells)}".rstrip())
    lines.append(" " * (gutter - 1) + "+" + "-" * columns)
    lines.append(_text_ticks(plot, x_scale, gutter, columns))
    lines += [f"  {letter(i)}  {series.name}" for i, series in enumerate(plot.series)]
    lines += [f"  #  {mark.label}" for mark in plot.marks]
    return "\n".join(lines)


def letter(index: int) -> str:
    """The letter that stands for the series of this number: A, B, ..., Z, a, ..."""
    return _LETTERS[index % len(_LETTERS)]


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# The palette of Okabe and Ito, made to be told apart by colour-blind eyes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("none", "7 3", "2 3", "9 3 2 3")


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


class _Scale:
    """Values to shares of an axis, 0 at its start and 1 at its end."""

    def __init__(self, axis: Axis, values: Sequence[float]) -> None:
        low, high = axis.limits or (min(values), max(values))
        if axis.log and low <= 0:
            raise ValueError(f"a log axis cannot show {low:g}")
        if low == high:
            low, high = (low / 2, high * 2) if axis.log else (low - 1, high + 1)
        self.log = axis.log
        self.limits = (low, high)
        self._low, self._span = self._position(low), self._position(high) - self._position(low)

    def _position(self, value: float) -> float:
        return math.log2(value) if self.log else value

    def __call__(self, value: float) -> float:
        if self.log and value <= 0:
            return 0.0
        return min(1.0, max(0.0, (self._position(value) - self._low) / self._span))


def _scales(plot: Plot) -> tuple[_Scale, _Scale]:
    points = [point for series in plot.series for point in series.points]
    if not points:
        raise ValueError("a plot needs at least one point")
    return _Scale(plot.x, [x for x, _ in points]), _Scale(plot.y, [y for _, y in points])


def _ticks(axis: Axis, limits: tuple[float, float], most: int) -> list[float]:
    """At most about `most` round values between the limits."""
    low, high = limits
    if axis.log:
        first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
        step = max(1, math.ceil((last - first + 1) / most))
        powers = [2.0**power for power in range(first, last + 1, step)]
        return powers or [low]
    rough = (high - low) / most
    scale = 10 ** math.floor(math.log10(rough))
    step_size = next(scale * n for n in (1, 2, 5, 10) if scale * n >= rough)
    first, last = math.ceil(low / step_size), math.floor(high / step_size)
    return [round(n * step_size, 12) for n in range(first, last + 1)]


def _svg_grid(
    plot: Plot, x_scale: _Scale, y_scale: _Scale, box: tuple[int, int, int, int]
) -> list[str]:
    left, top, width, height = box
    lines = []
    for value in _ticks(plot.x, x_scale.limits, 12):
        x = round(left + width * x_scale(value), 1)
        lines.append(f'<path d="M{x:g} {top}V{top + height}" stroke="#ddd"/>')
        lines.append(
            f'<text x="{x:g}" y="{top + height + 17}" text-anchor="middle">'
            f"{escape(plot.x.tick(value))}</text>"
        )
    for value in _ticks(plot.y, y_scale.limits, 8):
        y = round(top + height * (1 - y_scale(value)), 1)
        lines.append(f'<path d="M{left} {y:g}H{left + width}" stroke="#ddd"/>')
        lines.append(
            f'<text x="{left - 8}" y="{y + 4:g}" text-anchor="end">'
            f"{escape(plot.y.tick(value))}</text>"
        )
    middle = top + height / 2
    return [
        *lines,
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#888"/>',
        f'<text x="{left + width / 2:g}" y="{top + height + 40}" text-anchor="middle">'
        f"{escape(plot.x.label)}</text>",
        f'<text transform="translate(18 {middle:g}) rotate(-90)" text-anchor="middle">'
        f"{escape(plot.y.label)}</text>",
    ]


def _svg_legend(index: int, name: str, style: str, left: int, width: int) -> list[str]:
    x = left + (index % 2) * (width // 2)
    y = 42 + 20 * (index // 2)
    return [
        f'<path d="M{x} {y}h26" stroke-width="2" {style}/>',
        f'<text x="{x + 32}" y="{y + 4}">{escape(name)}</text>',
    ]


def _draw(
    grid: list[list[str]],
    series: Series,
    character: str,
    x_scale: _Scale,
    y_scale: _Scale,
    row_of: Callable[[float], int],
) -> None:
    columns = len(grid[0])
    places = [((columns - 1) * x_scale(x), y_scale(y)) for x, y in series.points]
    previous: int | None = None
    for column in range(columns):
        share = _interpolated(places, column)
        if share is None:
            continue
        row = row_of(share)
        # A steep line is filled in, so that it stays one line.
        between = range(min(row, previous), max(row, previous)) if previous is not None else ()
        for filled in (row, *(r for r in between if r != previous)):
            grid[filled][column] = character
        previous = row


def _interpolated(places: Sequence[tuple[float, float]], column: int) -> float | None:
    """Height of the line at a column: straight on the scaled axes, None beside the line."""
    nearest = [y for x, y in places if round(x) == column]
    if nearest:
        return nearest[0]
    for (x0, y0), (x1, y1) in pairwise(places):
        if x0 <= column <= x1:
            return y0 + (y1 - y0) * (column - x0) / (x1 - x0)
    return None


def _text_ticks(plot: Plot, x_scale: _Scale, gutter: int, columns: int) -> str:
    line = [" "] * (gutter + columns)
    used = 0
    for value in _ticks(plot.x, x_scale.limits, columns // 8):
        word = plot.x.tick(value)
        start = gutter + round((columns - 1) * x_scale(value)) - len(word) // 2
        start = max(0, min(start, gutter + columns - len(word)))
        if start < used:
            continue
        line[start : start + len(word)] = word
        used = start + len(word) + 1
    return "".join(line).rstrip()
