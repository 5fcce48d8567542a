"""A command that several processes run together: one speaks, and all end together.

`torchrun --nproc-per-node N -m llamatool generate ...` starts the command N times. Rank 0 reads
standard input and writes; what the others write is thrown away, but for an error that rank 0 does
not meet itself.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from llamatool.errors import (
    LlamatoolError,
    LostRankError,
    MissingExtraError,
    ResourceError,
    UsageError,
)

if TYPE_CHECKING:
    from llamatool.model.launch import Crew, Launch

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_COMMANDS = ("generate", "needle")  # that several ranks run together
_real_stderr: TextIO | None = None
_is_broken = False  # a group that some of its ranks have left


def is_shared() -> bool:
    """Whether a launcher started this process as one of several."""
    return all(name in os.environ for name in _NEEDED) and os.environ["WORLD_SIZE"] != "1"


def mute_followers() -> None:
    """Lets what ranks above 0 write go nowhere, in the commands that ranks run together.

    On every machine the first one may still say what is wrong with its arguments.
    """
    if not _is_shared_command():
        return
    # When a rank is lost, torch's connections tell of it in stack traces of C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if os.environ["RANK"] != "0":
        sys.stdout = _nowhere()
        if os.environ.get("LOCAL_RANK", "1") != "0":
            _mute()


@contextmanager
def crew(device: str) -> "Iterator[Crew | None]":
    """The processes that run this command together; None if this is the only one.

    The first error ends all of them, with one message and its exit code.
    Args: device: as --device says.
    """
    global _is_broken
    if not is_shared():
        yield None
        return
    if os.environ["RANK"] != "0":
        _mute()
    try:
        found = _meet()
    except LlamatoolError as error:
        raise _spoken(error) from None
    in_order = False
    try:
        found.form(device, sys.argv[1:])
        yield found
        in_order = True
    except (typer.Exit, typer.Abort):  # all ranks come to the same answer
        in_order = True
        raise
    except KeyboardInterrupt:
        found.claim(130)
        raise
    except BaseException as error:
        code = _exit_code(error)
        if isinstance(error, LostRankError) and (lost := found.missing()):
            error = LostRankError(
                f"rank {', '.join(map(str, lost))} of this run ended without a word",
                hint="killed, or out of memory: `llamatool kv-budget` shows what a rank needs",
            )
        if not found.claim(code):
            raise SystemExit(code) from None
        if isinstance(error, LlamatoolError):
            raise _spoken(error) from None
        _unmute()
        raise
    finally:
        _is_broken = not in_order
        found.leave(in_order=in_order)


def end_broken(code: object) -> None:
    """Ends the process, if its group is broken, without closing what others may wait for."""
    if _is_broken:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _is_shared_command() -> bool:
    return is_shared() and sys.argv[1:2] != [] and sys.argv[1] in _COMMANDS


def _meet() -> "Crew":
    """The crew of this run. Raises: the errors of `meet`; those of an environment without torch."""
    try:
        import torch
    except ModuleNotFoundError:
        raise MissingExtraError("generate", "PyTorch", "torch") from None
    if not torch.distributed.is_available():
        raise ResourceError("this PyTorch is built without torch.distributed, which ranks need")
    from llamatool.model.launch import meet

    return meet(_launch(), say=_say_aloud, on_end=_show_cursor)


def _launch() -> "Launch":
    """What the environment says. Raises: UsageError if it makes no sense."""
    from llamatool.model.launch import JOIN_SECONDS, Launch

    environment = os.environ
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < size:
        raise UsageError(f"RANK={rank} and WORLD_SIZE={size} contradict each other")
    port = _number("MASTER_PORT")
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT is {port}: a port is from 1 to 65535")
    join_seconds = _number("LLAMATOOL_JOIN_SECONDS", default=int(JOIN_SECONDS))
    if not join_seconds:
        raise UsageError("LLAMATOOL_JOIN_SECONDS is 0: at least 1")
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(
        rank=rank,
        size=size,
        local_rank=_number("LOCAL_RANK", default=rank),
        address=environment["MASTER_ADDR"],
        port=port,
        hosts_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        name=f"llamatool/{environment.get('TORCHELASTIC_RUN_ID', 'run')}/{attempt}",
        join_seconds=join_seconds,
    )


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise UsageError(
            f"the environment variable {name} is `{(text or '')[:40]}`: no number",
            hint="torchrun sets it; unset it to run alone",
        )
    return int(text)


def _exit_code(error: BaseException) -> int:
    """As `llamatool.cli.app.main` has it."""
    match error:
        case LlamatoolError():
            return error.exit_code
        case SystemExit(code=int(code)):
            return code
        case BrokenPipeError():
            return 1
        case OSError() | MemoryError():
            return 4
    return 70


def _spoken(error: LlamatoolError) -> LlamatoolError:
    """The error, to be printed by this rank, and naming it if it is not the first."""
    if _real_stderr is not None:
        _unmute()
        names_it = error.what.startswith(f"rank {os.environ['RANK']} ")
        if not names_it and not isinstance(error, LostRankError):  # which is about another rank
            error.what = f"rank {os.environ['RANK']}: {error.what}"
    return error


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def _mute() -> None:
    global _real_stderr
    if _real_stderr is None:
        _real_stderr = sys.stderr
        sys.stdout = sys.stderr = _nowhere()


def _unmute() -> None:
    if _real_stderr is not None:
        sys.stderr = _real_stderr


def _say(message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def _say_aloud(message: str) -> None:
    """From a rank that is muted, too."""
    _unmute()
    _say(message)


def _show_cursor() -> None:
    """A grid that grows on the terminal hides it, and is given no time to show it again."""
    with suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")
            sys.stderr.flush()
