"""A command that several processes run together: one speaks, and all end together.

`torchrun --nproc-per-node N -m llamatool generate ...` starts the command N times. Rank 0 reads
standard input and writes; what the others write is thrown away, but for an error that rank 0 does
not meet itself.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from llamatool.errors import LlamatoolError, LostRankError, MissingExtraError, UsageError
from llamatool.units import format_bytes

if TYPE_CHECKING:
    from llamatool.model.launch import Crew, Launch
    from llamatool.sizing.ranks import RankMemory

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_real_stderr: TextIO | None = None


def is_shared() -> bool:
    """Whether a launcher started this process as one of several."""
    return all(name in os.environ for name in _NEEDED) and os.environ["WORLD_SIZE"] != "1"


def mute_followers() -> None:
    """Lets what ranks above 0 write go nowhere."""
    global _real_stderr
    if not is_shared():
        return
    # When a rank is lost, torch's connections tell of it in stack traces of C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if os.environ["RANK"] != "0":
        _real_stderr = sys.stderr
        sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


@contextmanager
def crew(device: str) -> "Iterator[Crew | None]":
    """The processes that run this command together; None if this is the only one.

    The first error ends all of them, with one message and its exit code.
    Args: device: as --device says.
    """
    if not is_shared():
        yield None
        return
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise _spoken(MissingExtraError("generate", "PyTorch", "torch")) from None
    from llamatool.model.launch import ABORT_EXIT, EndedElsewhere, join

    try:
        found = join(_launch(), device)
    except EndedElsewhere:
        raise SystemExit(ABORT_EXIT) from None
    except LlamatoolError as error:
        raise _spoken(error) from None
    found.watch.say = _say_aloud
    in_order = False
    try:
        yield found
        in_order = True
    except (typer.Exit, typer.Abort):  # all ranks come to the same answer
        in_order = True
        raise
    except KeyboardInterrupt:
        found.claim(130)
        raise
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", 70)
        if isinstance(error, LostRankError) and (lost := found.missing()):
            error = LostRankError(
                f"rank {', '.join(map(str, lost))} of this run ended without a word",
                hint="killed, or out of memory: `llamatool kv-budget` shows what a rank needs",
            )
        if not found.claim(int(code or 0)):
            raise SystemExit(code) from None
        if isinstance(error, LlamatoolError):
            raise _spoken(error) from None
        _unmute()
        raise
    finally:
        found.leave(in_order=in_order)


def announce_ranks(memory: "RankMemory") -> None:
    """One line, before loading: what each rank will hold."""
    _say(
        f"{memory.num_ranks} ranks: each holds {format_bytes(memory.weight_bytes)} of weights and"
        f" {format_bytes(memory.kv_bytes)} of KV cache for {memory.num_tokens:,} tokens"
    )


def _launch() -> "Launch":
    """What the environment says. Raises: UsageError if it makes no sense."""
    from llamatool.model.launch import JOIN_SECONDS, Launch

    environment = os.environ
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < size:
        raise UsageError(f"RANK={rank} and WORLD_SIZE={size} contradict each other")
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(
        rank=rank,
        size=size,
        local_rank=_number("LOCAL_RANK", default=rank),
        local_size=_number("LOCAL_WORLD_SIZE", default=size),
        address=environment["MASTER_ADDR"],
        port=_number("MASTER_PORT"),
        hosts_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        name=f"llamatool/{environment.get('TORCHELASTIC_RUN_ID', 'run')}/{attempt}",
        join_seconds=_number("LLAMATOOL_JOIN_SECONDS", default=int(JOIN_SECONDS)),
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


def _spoken(error: LlamatoolError) -> LlamatoolError:
    """The error, to be printed by this rank, and naming it if it is not the first."""
    if _real_stderr is not None:
        _unmute()
        if not isinstance(error, LostRankError):  # which is about another rank
            error.what = f"rank {os.environ['RANK']}: {error.what}"
    return error


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
