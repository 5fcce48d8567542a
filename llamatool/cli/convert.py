"""`llamatool convert`: checkpoints between Meta's and Hugging Face's layout, and from GGUF."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamatool import units
from llamatool.cli.options import SOURCE_HELP, JsonOption

if TYPE_CHECKING:
    from llamatool.checkpoint.folder import Progress


class To(StrEnum):
    """Layouts that can be written."""

    hf = "hf"
    meta = "meta"


class Keep(StrEnum):
    """Types that can be written."""

    keep = "keep"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class ParamsStyle(StrEnum):
    """How params.json gives the size of the vocabulary."""

    actual = "actual"
    original = "original"


class Verify(StrEnum):
    """How the result is proven."""

    none = "none"
    size = "size"
    hash = "hash"
    full = "full"


def _bytes(text: str) -> int:
    return units.parse_bytes(text)


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help=SOURCE_HELP, show_default=False)],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder to write.", show_default=False)
    ],
    to: Annotated[
        To | None,
        typer.Option("--to", help="Layout to write; the other one if not said."),
    ] = None,
    num_shards: Annotated[
        int | None,
        typer.Option(
            "--mp",
            min=1,
            max=1024,
            metavar="N",
            help="Files of Meta's layout, one per model-parallel rank; as published if not said.",
            show_default=False,
        ),
    ] = None,
    shard_bytes: Annotated[
        int,
        typer.Option(
            "--shard-size",
            parser=_bytes,
            metavar="SIZE",
            help=f"Largest .safetensors file ({units.BYTES_HELP}).",
        ),
    ] = "5GB",  # type: ignore[assignment]
    dtype: Annotated[
        Keep, typer.Option("--dtype", help="Type to write; keep changes no bit.")
    ] = Keep.keep,
    instruct: Annotated[
        bool | None,
        typer.Option(
            "--instruct/--base",
            help="Which of the two it is; else guessed from the file or the folder's name.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="The published model it is.", show_default=False
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="FILE",
            help="Its tokenizer, if not beside it.",
            show_default=False,
        ),
    ] = None,
    no_tokenizer: Annotated[
        bool, typer.Option("--no-tokenizer", help="Write no tokenizer files.")
    ] = False,
    params_style: Annotated[
        ParamsStyle,
        typer.Option(
            "--params-style", help="original: params.json says vocab_size -1, as Llama 2's does."
        ),
    ] = ParamsStyle.actual,
    keep_replicated_kv: Annotated[
        bool,
        typer.Option("--keep-replicated-kv", help="Keep heads that Meta's files hold twice."),
    ] = False,
    strict_replicas: Annotated[
        bool,
        typer.Option("--strict-replicas", help="Refuse shards whose common tensors differ."),
    ] = False,
    verify_input: Annotated[
        bool, typer.Option("--verify-input", help="Check the MD5 sums in checklist.chk first.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and write nothing.")
    ] = False,
    verify: Annotated[
        Verify,
        typer.Option(
            "--verify",
            help="size: headers; hash: every piece read is found again; full: read both again.",
        ),
    ] = Verify.hash,
    resume: Annotated[
        bool, typer.Option("--resume", help="Finish an interrupted conversion.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier conversion.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            max=256,
            metavar="N",
            help="As many as processors, up to 8.",
            show_default=False,
        ),
    ] = None,
    max_memory: Annotated[
        int,
        typer.Option("--max-memory", parser=_bytes, metavar="SIZE", help="Memory for buffers."),
    ] = "256MiB",  # type: ignore[assignment]
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Convert a checkpoint between Meta's layout and Hugging Face's, or from GGUF, and prove it.

    Tensors are moved byte by byte unless --dtype says otherwise, in bounded memory and without
    PyTorch. The result is verified before the files get their names.

    Examples:

      llamatool convert Llama-3.1-8B/original ./Llama-3.1-8B-hf --dry-run

      llamatool convert ./Meta-Llama-3-70B ./Llama-3-70B-hf

      llamatool convert ./Llama-3.1-8B ./meta --to meta --mp 2

      llamatool convert SmolLM2-135M-Instruct.Q4_1.gguf ./smollm2 --dtype bf16
    """
    # numpy only moves bytes here, and its matrix library would start threads that spin.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from llamatool import conversion
    from llamatool.render.blocks import show, show_json

    options = conversion.ConvertOptions(
        to=to.value if to else None,
        num_shards=num_shards,
        shard_bytes=shard_bytes,
        dtype=None if dtype is Keep.keep else dtype.value,
        variant=None if instruct is None else "instruct" if instruct else "base",
        model=model,
        tokenizer=tokenizer,
        with_tokenizer=not no_tokenizer,
        original_style=params_style is ParamsStyle.original,
        keep_replicated_kv=keep_replicated_kv,
        strict_replicas=strict_replicas,
        verify=verify.value,
        verify_input=verify_input,
        resume=resume,
        overwrite=overwrite,
        num_threads=threads or min(8, os.cpu_count() or 2),
        max_memory_bytes=max_memory,
    )
    with _interruptible(resumable=not dry_run):
        loaded = conversion.load_weights(source)
        if not dry_run:
            conversion.check_destination(loaded, destination, options)
        prepared = conversion.prepare(loaded, options)
        if dry_run:
            from llamatool.render.convert import plan_blocks, plan_json

            show_json(plan_json(prepared)) if as_json else show(plan_blocks(prepared))
            return
        _say(f"needs {units.format_bytes(prepared.num_bytes)} in {destination}", quiet)
        with steps(quiet=quiet) as tell:
            report = conversion.run(prepared, destination, options, progress=tell)
    from llamatool.render.convert import report_blocks, report_json

    show_json(report_json(report)) if as_json else show(report_blocks(report))
    if report.written.problem is not None:
        raise typer.Exit(1)


@contextmanager
def steps(*, quiet: bool) -> "Iterator[Progress]":
    """Progress by bytes: a bar on a terminal, a line for every tenth in a pipe."""
    if quiet:
        yield lambda step, done, total, name: None
        return
    if not sys.stderr.isatty():
        yield _Lines()
        return
    with ExitStack() as stack:
        yield _Bars(stack)


class _Bars:
    """One bar after the other, each opened when its step begins."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._step = ""
        self._update: Callable[[int, int], None] = lambda done, total: None

    def __call__(self, step: str, done: int, total: int, name: str) -> None:
        if step != self._step:
            from llamatool.cli.progress import progress

            self._stack.close()
            self._step = step
            self._update = self._stack.enter_context(progress(step.capitalize(), unit="bytes"))
        self._update(done, total)


class _Lines:
    """A line on standard error for every tenth of the work."""

    def __init__(self) -> None:
        self._last = ("", -1)

    def __call__(self, step: str, done: int, total: int, name: str) -> None:
        tenth = 10 * done // total if total else 10
        if (step, tenth) != self._last and tenth:
            self._last = (step, tenth)
            size = units.format_bytes(total)
            sys.stderr.write(f"{step}: {10 * tenth} % of {size}\n")


@contextmanager
def _interruptible(*, resumable: bool) -> Iterator[None]:
    """Treats a request to end like Ctrl-C, and says how to go on."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        if resumable:
            _say("interrupted: run the same command with --resume to go on", quiet=False)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        sys.stderr.write(text + "\n")
