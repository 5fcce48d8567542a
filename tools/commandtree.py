"""The command line as plain values, for the generators of completions and of docs/cli.md.

Only public attributes of Typer are used. Choices come from the annotations of our own functions,
because an option's `.type` is not the same thing in every release of Typer.
"""

import inspect
import re
import typing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import typer

from llamatool.cli.app import app
from llamatool.generate.formats import FORMATS
from llamatool.sizing.hardware import KEYS
from llamatool.sizing.kv_cache import KV_DTYPES, POLICIES
from llamatool.tokenizers.corpus import LANGUAGES
from llamatool.tokenizers.find import GENERATIONS

Paths = Literal["none", "file", "folder"]

# What the parts of a metavar say about the values they stand for.
_METAVARS: dict[str, Paths] = {
    "SOURCE": "file",
    "MODEL": "file",
    "SPEC": "file",
    "FILE": "file",
    "FILE.svg": "file",
    "PATH": "file",
    "SRC": "file",
    "DST": "folder",
    "A": "file",
    "B": "file",
    "DIR": "folder",
    "FOLDER": "folder",
}
_ARGUMENTS: dict[str, Paths] = {"TEXT": "file"}  # an option's TEXT is none
# Options that take more than a closed set of words; these are worth offering.
WORDS: dict[str, tuple[str, ...]] = {
    "generate --device": ("auto", "cpu", "cuda", "mps"),
    "generate --dtype": ("bfloat16", "float16", "float32"),
    "generate --template": tuple(FORMATS),
    "kv-budget --gpu": (*KEYS, "smallest"),
    "kv-budget --kv-dtype": KV_DTYPES,
    "kv-budget --policy": tuple(POLICIES),
    "kv-budget --weights": (
        *("bfloat16", "fp8", "int8", "int4"),
        *("q8_0", "q6_k", "q5_k", "q4_k", "q4_0"),
    ),
    "needle --device": ("auto", "cpu", "cuda", "mps"),
    "needle models": ("pocket", "pocket-rope"),
    "tokens --lang": tuple(LANGUAGES),
    "tokens --reference": tuple(LANGUAGES),
    "tokens --tokenizer": tuple(GENERATIONS),
}
_MODELS = {"convert --model"}  # takes the name of a built-in model


@dataclass(frozen=True, slots=True)
class Value:
    """What a parameter takes."""

    metavar: str
    words: tuple[str, ...] = ()  # of an enum, of the metavar, or of WORDS
    paths: Paths = "none"
    models: bool = False  # the names of the built-in models


@dataclass(frozen=True, slots=True)
class Option:
    """An option; a flag has no value."""

    names: tuple[str, ...]  # -h and --help; --x and --no-x
    help: str
    value: Value | None
    default: str | None
    multiple: bool


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional argument."""

    name: str
    help: str
    value: Value
    required: bool
    multiple: bool


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or the program itself, whose name is empty."""

    name: str
    help: str
    options: tuple[Option, ...]
    arguments: tuple[Argument, ...]

    @property
    def summary(self) -> str:
        """The first sentence of the help, without its period."""
        return sentence(self.help)


def program() -> tuple[Command, tuple[Command, ...]]:
    """The program and its commands, in the order of the help page."""
    root = typer.main.get_command(app)
    commands: dict[str, Any] = root.commands  # type: ignore[attr-defined]
    functions = {info.name: info.callback for info in app.registered_commands}
    listed = [
        _command(name, command, functions[name], root)
        for name, command in commands.items()
        if not command.hidden
    ]
    return _command("", root, None, root), tuple(listed)


def sentence(text: str) -> str:
    """The first sentence of a help text on one line, without brackets and final period."""
    flat = " ".join(text.split("\n\n")[0].split())
    flat = re.sub(r" \([^()]*\)", "", flat)
    return re.split(r"(?<!\.)\.(?:\s|$)", flat)[0].rstrip(".,;: ")


def _command(name: str, command: Any, function: Any, root: Any) -> Command:
    hints = typing.get_type_hints(function) if function else {}
    options, arguments = [], []
    for param in command.params:
        if getattr(param, "hidden", False):
            continue
        if param.param_type_name == "argument":
            arguments.append(_argument(name, param, hints.get(param.name)))
        elif param.name != "help":
            options.append(_option(name, param, hints.get(param.name)))
    helps = root.context_settings["help_option_names"]
    options.append(Option(tuple(helps), "Show this message and exit.", None, None, False))
    return Command(name, inspect.cleandoc(command.help or ""), tuple(options), tuple(arguments))


def _option(command: str, param: Any, annotation: Any) -> Option:
    names = sorted((*param.opts, *param.secondary_opts), key=lambda name: name.startswith("--"))
    value = None if param.is_flag else _value(command, param, annotation)
    # A callable makes its value when it runs; None and False say nothing to a reader.
    default = param.default if value and not callable(param.default) else None
    shown = None
    if getattr(param, "show_default", True) and default not in (None, (), []):
        shown = str(default.value if isinstance(default, Enum) else default)
    return Option(tuple(names), param.help or "", value, shown, bool(param.multiple))


def _argument(command: str, param: Any, annotation: Any) -> Argument:
    value = _value(command, param, annotation)
    return Argument(param.name, param.help or "", value, bool(param.required), param.nargs == -1)


def _value(command: str, param: Any, annotation: Any) -> Value:
    found = _members(annotation)
    enums = [item for item in found if isinstance(item, type) and issubclass(item, Enum)]
    names = {f"{command} {name}" for name in param.opts}
    words = next((WORDS[name] for name in sorted(names) if name in WORDS), ())
    metavar = re.sub(r"[\[\]{}]|\.\.\.", "", param.metavar or param.name.upper())
    closed = tuple(item for item in found if isinstance(item, str))  # of a Literal
    if enums:
        closed = tuple(str(member.value) for member in enums[0])
    if closed:
        words = closed
        metavar = param.metavar or "|".join(words)
    parts = metavar.split("|")
    if not words:  # json|tiktoken|spm, builtin|DIR
        words = tuple(part for part in parts if part.islower() and part.isalnum())
    known = _METAVARS | (_ARGUMENTS if param.param_type_name == "argument" else {})
    paths: Paths = next((known[part] for part in parts if part in known), "none")
    if paths == "none" and Path in found:
        paths = "file"
    return Value(metavar, words, paths, models="SOURCE" in parts or bool(names & _MODELS))


def _members(annotation: Any) -> list[Any]:
    """The types inside `annotation`: of `list[Shell] | None` they are Shell and None."""
    inner = typing.get_args(annotation)
    if not inner:
        return [annotation]
    return [member for item in inner for member in _members(item)]
