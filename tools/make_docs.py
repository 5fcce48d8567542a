"""Writes docs/cli.md, the reference of the command line, from the command tree.

python tools/make_docs.py [FILE]
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from commandtree import Argument, Command, Option, program

_FILE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"


def main(file: Path = _FILE) -> None:
    """Writes the page into `file`."""
    root, commands = program()
    lines = [
        "# Command line",
        "",
        "<!-- Written by tools/make_docs.py; do not edit. -->",
        "",
        *_text(root.help),
        "| command | what it does |",
        "|---|---|",
        *(
            f"| [`{command.name}`](#llamatool-{command.name}) | {command.summary} |"
            for command in commands
        ),
        "",
        *_options(root),
    ]
    for command in commands:
        lines += ["", *_command(command)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _command(command: Command) -> Iterator[str]:
    yield f"## llamatool {command.name}"
    yield ""
    words = [f"llamatool {command.name}", "[OPTIONS]", *map(_usage, command.arguments)]
    yield f"`{' '.join(words)}`"
    yield ""
    yield from _text(command.help)
    if command.arguments:
        yield "| argument | meaning |"
        yield "|---|---|"
        for argument in command.arguments:
            yield f"| `{_usage(argument)}` | {_cell(argument.help)} |"
        yield ""
    yield from _options(command)


def _usage(argument: Argument) -> str:
    name = argument.value.metavar + ("..." if argument.multiple else "")
    return name if argument.required else f"[{name}]"


def _options(command: Command) -> Iterator[str]:
    yield "| option | meaning |"
    yield "|---|---|"
    for option in command.options:
        yield f"| {_names(option)} | {_cell(_meaning(option))} |"


def _names(option: Option) -> str:
    names = [f"`{name}`" for name in option.names]
    if option.value is not None:
        names[-1] = f"`{option.names[-1]} {option.value.metavar}`"
    return _cell(", ".join(names))


def _meaning(option: Option) -> str:
    parts = [option.help]
    if option.default is not None:
        parts.append(f"Default: `{option.default}`.")
    if option.multiple:
        parts.append("May be given several times.")
    return " ".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _text(help_text: str) -> Iterator[str]:
    """Paragraphs on one line each; indented ones are commands and become one block."""
    commands: list[str] = []
    for paragraph in help_text.split("\n\n"):
        if paragraph.startswith("  "):
            # A long command goes on in the next line.
            commands += re.split(r"(?<=[^|])(?<!-m) (?=llamatool )", " ".join(paragraph.split()))
            continue
        yield from _block(commands)
        commands = []
        yield " ".join(paragraph.split())
        yield ""
    yield from _block(commands)


def _block(commands: list[str]) -> Iterator[str]:
    if commands:
        yield "<!-- not run: examples with files of yours -->"
        yield "```console"
        yield from (f"$ {command}" for command in commands)
        yield "```"
        yield ""


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
