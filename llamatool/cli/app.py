"""The `llamatool` command: its table of commands, and how errors become exit codes."""

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer

from llamatool import __version__
from llamatool.cli import (
    completion,
    convert,
    generate,
    inspect,
    kv_budget,
    models,
    needle,
    ranks,
    tokens,
    verify,
)
from llamatool.errors import LlamatoolError

app = typer.Typer(
    name="llamatool",
    add_completion=False,  # completions are static files: see `llamatool completion`
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("inspect", inspect.inspect),
    ("kv-budget", kv_budget.kv_budget),
    ("tokens", tokens.tokens),
    ("generate", generate.generate),
    ("needle", needle.needle),
    ("convert", convert.convert),
    ("verify", verify.verify),
    ("models", models.models),
    ("completion", completion.completion),
)
for _name, _function in COMMANDS:
    app.command(_name)(_function)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"llamatool {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Inspect, size, convert and run Llama checkpoints.

    SOURCE is a config.json, params.json, folder, .safetensors or .gguf file, a built-in model's
    name, a hub id, or - for standard input.

    Exit codes: 0 done, 1 the answer is no, 2 usage, 3 bad input, 4 something is missing here,
    5 hub or network, 70 a bug, 130 interrupted.
    """


def main() -> None:
    """Runs the command line and exits with the code that errors.py assigns."""
    _tolerant_output()
    ranks.mute_followers()
    try:
        _explained()
    except SystemExit as ending:
        ranks.end_broken(ending.code)
        raise


def _explained() -> None:
    """Runs the command line; an error becomes one line and its exit code."""
    try:
        _run()
    except LlamatoolError as error:
        if os.environ.get("LLAMATOOL_DEBUG"):
            raise
        _say(f"error: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _say("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe went away
        _discard_output()
        sys.exit(1)
    except OSError as error:
        if os.environ.get("LLAMATOOL_DEBUG"):
            raise
        if not _output_failed(error):
            _bug(error)
        _discard_output()
        _say(f"error: the output cannot be written: {error.strerror}")
        sys.exit(4)
    except MemoryError:
        _say("error: out of memory")
        sys.exit(4)
    except Exception as error:  # a bug of ours must not look like the answer "no"
        if os.environ.get("LLAMATOOL_DEBUG"):
            raise
        _bug(error)


def _run() -> None:
    try:
        app()
    finally:
        sys.stdout.flush()  # so that a full disk is found while it can still be told


def _bug(error: Exception) -> NoReturn:
    _say(
        f"error: a bug in llamatool: {type(error).__name__}: {error}\n"
        "hint: run again with LLAMATOOL_DEBUG=1 and report the traceback"
    )
    sys.exit(70)


def _output_failed(error: OSError) -> bool:
    """Whether it was standard output that failed, and not a file that a command opened."""
    return error.filename is None and error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT)


def _discard_output() -> None:
    """Lets what is left in the buffer go nowhere, so that the exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str) -> None:
    with suppress(OSError):  # nobody may be listening
        sys.stderr.write(message + "\n")


def _tolerant_output() -> None:
    """Closed streams lead nowhere; a locale that lacks a character gets an escape of it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None and stream.encoding.lower() not in ("utf-8", "utf8"):
            reconfigure(errors="backslashreplace")
