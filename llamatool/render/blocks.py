"""Blocks of output, written as plain aligned text into a pipe and with Rich on a terminal.

Both hold the same words and numbers. In a pipe there is no colour, no box and no wrapping; on a
terminal long lines wrap to its width.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from llamatool.errors import one_line
from llamatool.records import record

if TYPE_CHECKING:
    from rich.console import Console


@record
class Grid:
    """A table. `align` has one `l` or `r` for each column; marked rows are stressed."""

    rows: tuple[tuple[str, ...], ...]
    columns: tuple[str, ...] = ()  # headings; none where there are none
    align: str = ""
    title: str | None = None
    marked: frozenset[int] = frozenset()


@record
class Lines:
    """Sentences, each on a line of its own."""

    lines: tuple[str, ...]
    title: str | None = None


Block = Grid | Lines


def show(blocks: Sequence[Block], *, file: TextIO | None = None) -> None:
    """Writes `blocks` to `file` (standard output), an empty line between them."""
    stream = file or sys.stdout
    if is_rich(stream):
        _show_rich(blocks, stream)
    else:
        stream.write(plain(blocks))


def plain(blocks: Sequence[Block]) -> str:
    """`blocks` as aligned text without any colour, wrapping or box."""
    return "\n".join(_plain_block(block) for block in blocks)


def show_json(value: dict[str, Any], *, file: TextIO | None = None) -> None:
    """Writes one JSON object and a newline."""
    stream = file or sys.stdout
    stream.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def is_rich(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that takes more than plain text (or FORCE_COLOR asks so)."""
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _plain_block(block: Block) -> str:
    title = [block.title] if block.title else []
    indent = "  " if block.title else ""
    if isinstance(block, Lines):
        return "".join(
            f"{line}\n" for line in [*title, *(indent + one_line(x) for x in block.lines)]
        )
    rows = [block.columns, *block.rows] if block.columns else list(block.rows)
    offset = len(rows) - len(block.rows)
    widths = _widths(rows)
    lines = list(title)
    for number, row in enumerate(rows):
        cells = [
            _aligned(one_line(cell), width, block.align[i : i + 1])
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        mark = ("* " if number - offset in block.marked else "  ") if block.marked else indent
        lines.append((mark + "  ".join(cells)).rstrip())
    return "".join(f"{line}\n" for line in lines)


def _widths(rows: Sequence[tuple[str, ...]]) -> list[int]:
    columns = max((len(row) for row in rows), default=0)
    return [max(cell_width(row[i]) for row in rows if i < len(row)) for i in range(columns)]


def _aligned(cell: str, width: int, align: str) -> str:
    space = " " * (width - cell_width(cell))
    return space + cell if align == "r" else cell + space


def cell_width(text: str) -> int:
    """Columns that `text` takes on a terminal: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    import unicodedata

    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) != 0 for c in text)


def _show_rich(blocks: Sequence[Block], stream: TextIO) -> None:
    from rich.console import Console

    console = Console(file=stream, highlight=False, soft_wrap=False)
    for number, block in enumerate(blocks):
        if number:
            console.print()
        _rich_block(block, console)


def _rich_block(block: Block, console: "Console") -> None:
    from rich.padding import Padding
    from rich.text import Text

    if block.title:
        console.print(Text(block.title, style="bold"))
    indent = (0, 0, 0, 2) if block.title else (0, 0, 0, 0)
    if isinstance(block, Lines):
        for line in block.lines:
            console.print(Padding(Text(one_line(line)), indent))
        return
    console.print(Padding(_rich_table(block), indent))


def _rich_table(grid: Grid) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=bool(grid.columns), pad_edge=False, padding=(0, 2, 0, 0))
    count = max(len(row) for row in (grid.columns, *grid.rows))
    for i in range(count):
        right = grid.align[i : i + 1] == "r"
        heading = grid.columns[i] if i < len(grid.columns) else ""
        table.add_column(
            Text(heading),
            header_style="bold dim",
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
            style="cyan" if i == 0 and not grid.columns else "",
        )
    for number, row in enumerate(grid.rows):
        style = "bold yellow" if number in grid.marked else None
        cells = [one_line(cell) for cell in row]
        if grid.marked:  # by a sign as well as by a style: colour alone tells nothing to some
            cells[0] = ("* " if number in grid.marked else "  ") + cells[0]
        table.add_row(*map(Text, cells), style=style)
    return table
