"""`llamatool kv-budget`: what the KV cache costs, whether it fits, and how much would."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llamatool import units
from llamatool.cli.options import (
    JsonOption,
    MemoryOption,
    OptionalSourcesArgument,
    standard_input,
)
from llamatool.errors import InputError, ResourceError, TokenizerError, UsageError, one_line

if TYPE_CHECKING:
    from fractions import Fraction

    from llamatool.sizing.budget import Budget, Document, Question, Subject
    from llamatool.sizing.curve import Crossing
    from llamatool.sizing.hardware import Machine
    from llamatool.sizing.kv_cache import Policy
    from llamatool.tokenizers.base import Tokenizer

_MAX_CURVES = 8
_SAMPLE_BYTES = 2**16
# Up to this many entries a vocabulary is taken for one of that tokenizer's kind.
_VOCABULARY_LIMITS = (("llama-2", 64_000), ("llama-3", 165_000))


def _tokens(text: str) -> int:
    return units.parse_tokens(text)


def _bytes(text: str) -> int:
    return units.parse_bytes(text)


def kv_budget(
    sources: OptionalSourcesArgument = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            "-n",
            metavar="N",
            parser=_tokens,
            help=f"Tokens of one sequence, 8,192 if not said ({units.TOKENS_HELP}).",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch", "--concurrency", metavar="N", help="Sequences at once.")
    ] = 1,
    images: Annotated[
        int, typer.Option("--images", metavar="N", help="Images in each sequence (3.2 Vision).")
    ] = 0,
    document: Annotated[
        Path | None,
        typer.Option(
            "--document",
            metavar="FILE",
            help="A text file whose tokens are asked about, instead of --tokens.",
            show_default=False,
        ),
    ] = None,
    kv_dtype: Annotated[
        str,
        typer.Option(
            "--kv-dtype",
            metavar="TYPE",
            help="Of the cache: bfloat16, float16, float32, fp8, int8, q8_0, q4_0, ...",
        ),
    ] = "bfloat16",
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            metavar="TYPE",
            help="Of all weights: bfloat16, fp8, int8, int4, q4_k, ...; else as the file says.",
            show_default=False,
        ),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="mha|gqa:N|mqa",
            help="What if the model had other KV heads?",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="GPU",
            help="Fit on h100, 2xh100, 2x24GiB, m4-max-128, ...; `smallest` searches the table.",
            show_default=False,
        ),
    ] = None,
    memory: MemoryOption = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            "--tp",
            metavar="N",
            help="Devices that share the model by tensor parallelism, if --gpu gives no count.",
            show_default=False,
        ),
    ] = None,
    utilization: Annotated[
        str | None,
        typer.Option(
            "--utilization",
            metavar="SHARE",
            help="Usable share of the memory; 0.9, and 0.75 of unified memory, if not said.",
            show_default=False,
        ),
    ] = None,
    overhead: Annotated[
        int | None,
        typer.Option(
            "--overhead",
            metavar="SIZE",
            parser=_bytes,
            help="All but weights and cache; if not said, 512MiB and estimated activations.",
            show_default=False,
        ),
    ] = None,
    max_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-batched-tokens",
            metavar="N",
            parser=_tokens,
            help="Tokens of one prefill step, 8,192 if not said.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="What the engine keeps of chunked and sliding layers, for the fit: capped, "
            "no_eviction or vllm_hybrid.",
        ),
    ] = "capped",
    curve: Annotated[
        bool, typer.Option("--curve", help="A table and a plot over the context length.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Write the curve as an SVG file.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what the KV cache costs, whether it fits, and how many tokens and users would.

    Without SOURCE: a table of all published models. The figure is that of the capped cache: a
    chunked or sliding layer holds at most its window. With --gpu or --memory the equation is
    shown line by line, with the constraint that binds, and the exit code is 1 if it does not fit
    (without SOURCE: if no model does).

    Examples:

      llamatool kv-budget --tokens 100000

      llamatool kv-budget llama-3.1-8b --tokens 128k --gpu 24GiB

      llamatool kv-budget ./config.json --gpu 2xh100 --concurrency 16

      llamatool kv-budget llama-3.1-405b --gpu smallest --weights fp8

      llamatool kv-budget llama-4-scout-17b-16e llama-3.1-8b --plot kv.svg

      llamatool kv-budget ./Llama-3.2-3B --document report.txt --gpu 4090
    """
    from llamatool.sizing.budget import DEFAULT_TOKENS, Question, compare
    from llamatool.sizing.fit import Assumptions, Load
    from llamatool.sizing.kv_cache import DEFAULT_MAX_BATCHED_TOKENS

    if tokens is not None and document is not None:
        raise UsageError("--tokens and --document both say how long the text is")
    wants_curve = curve or plot is not None
    if wants_curve and not 1 <= len(sources or ()) <= _MAX_CURVES:
        raise UsageError(f"a curve is readable with 1 to {_MAX_CURVES} models; name them")
    question = Question(
        load=Load(DEFAULT_TOKENS if tokens is None else tokens, batch_size, images),
        kv_dtype=kv_dtype,
        weights_dtype=weights,
        scheme=scheme,
        machine=_machine(gpu, memory, tensor_parallel),
        assumptions=Assumptions(
            utilization=_share(utilization),
            overhead_bytes=overhead,
            max_batched_tokens=(
                DEFAULT_MAX_BATCHED_TOKENS if max_batched_tokens is None else max_batched_tokens
            ),
            policy=_policy(policy),
        ),
        curve=wants_curve,
        alternatives=bool(sources),
    )
    budgets = _answers(sources, question, document)
    crossings = compare(budgets) if wants_curve else ()
    if plot is not None:
        _write_plot(plot, budgets, crossings)
    _show(budgets, crossings, as_json=as_json, curve=curve, named=bool(sources))
    if _is_no(budgets, named=bool(sources)):
        raise typer.Exit(1)


def _answers(
    sources: list[str] | None, question: "Question", document: Path | None
) -> "list[Budget]":
    from llamatool.sizing.budget import kv_budget as budget

    text = None if document is None else _read_size(document)
    budgets = []
    for subject in _subjects(sources):
        asked = question
        if document is not None and text is not None:
            counted = _count(document, text, subject)
            load = replace(question.load, num_tokens=max(1, counted.num_tokens))
            asked = replace(question, load=load, document=counted)
        budgets.append(budget(subject, asked))
    return budgets


def _subjects(sources: list[str] | None) -> "list[Subject]":
    from llamatool.sizing.budget import Subject

    if not sources:
        from llamatool.config.catalog import entries

        return [Subject(entry.id, entry.id, entry.config, entry) for entry in entries()]
    from llamatool.source import load_source

    subjects = []
    for source in sources:
        loaded = load_source(source, stdin=standard_input())
        config, identity = loaded.need_config()
        stored = sum(table.num_bytes for table in loaded.tables) if loaded.kind == "gguf" else None
        subjects.append(
            Subject(source, identity.model, config, identity.entry, stored, loaded.notes)
        )
    return subjects


def _machine(
    gpu: str | None, memory: int | None, tensor_parallel: int | None
) -> "Machine | Literal['smallest'] | None":
    from llamatool.sizing.hardware import MAX_DEVICES, Machine, memory_only, parse_machine

    if gpu is not None and memory is not None:
        raise UsageError("--gpu and --memory both name a device")
    if tensor_parallel is not None and not 1 <= tensor_parallel <= MAX_DEVICES:
        raise UsageError(f"--tp must be 1 to {MAX_DEVICES}")
    if gpu is None and memory is None:
        if tensor_parallel is not None:
            raise UsageError("--tp needs a device", hint="say --gpu h100 or --memory 80GiB")
        return None
    if memory is not None:
        return Machine(memory_only(memory), tensor_parallel or 1)
    assert gpu is not None
    if gpu.strip().lower() == "smallest":
        if tensor_parallel is not None:
            raise UsageError("`--gpu smallest` chooses the number of devices itself")
        return "smallest"
    machine, counted = parse_machine(gpu)
    if tensor_parallel is None or tensor_parallel == machine.count:
        return machine
    if counted:
        raise UsageError(
            f"--gpu {gpu} has {machine.count} devices, --tp asks for {tensor_parallel}",
            hint="the devices of --gpu share one model; name those that do",
        )
    return replace(machine, count=tensor_parallel)


def _share(text: str | None) -> "Fraction | None":
    """A share such as `0.9` or `90%`, exactly."""
    if text is None:
        return None
    from fractions import Fraction

    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        if len(number) > 20:
            raise ValueError
        share = Fraction(number) / (100 if percent else 1)
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"`{text}` is no share of memory", hint="say 0.9 or 90%") from None
    if not 0 < share <= 1:
        raise UsageError(f"`{text}`: the usable share is above 0 and at most 1")
    return share


def _policy(name: str) -> "Policy":
    from llamatool.sizing.kv_cache import POLICIES

    for policy in POLICIES:
        if policy == name.lower().replace("-", "_"):
            return policy
    raise UsageError(f"`{name}` is no policy", hint=f"known are {', '.join(POLICIES)}")


def _read_size(document: Path) -> int:
    """Bytes of a text file; a file that is no text is refused before it is sized."""
    try:
        if not document.is_file():
            # A pipe has no size, and a device may have no end.
            what = "is no regular file" if document.exists() else "does not exist"
            raise InputError(f"the document {what}", where=str(document))
        num_bytes = document.stat().st_size
        with document.open("rb") as file:
            start = file.read(_SAMPLE_BYTES)
    except OSError as error:
        raise InputError(
            f"cannot read the document: {error.strerror}", where=str(document)
        ) from None
    if not start:
        raise InputError("the document is empty", where=str(document))
    # Up to three bytes of a character may be cut off at the end of the sample.
    if b"\0" in start or not any(_is_text(start[: len(start) - cut]) for cut in range(4)):
        raise InputError(
            "the document is no UTF-8 text",
            where=str(document),
            hint="extract its text first, for example with pdftotext",
        )
    return num_bytes


def _is_text(sample: bytes) -> bool:
    try:
        sample.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _count(document: Path, num_bytes: int, subject: "Subject") -> "Document":
    """The document in tokens: counted if the model's tokenizer is at hand, else estimated."""
    from llamatool.sizing.budget import Document

    tokenizer = _tokenizer_of(subject.source)
    if tokenizer is None:
        return _estimated(document, num_bytes, subject)
    return Document(
        name=document.name,
        num_bytes=num_bytes,
        num_tokens=tokenizer.count(_parts(document)),
        exact=True,
        counted_by=f"counted with {tokenizer.identity.label}",
    )


def _estimated(document: Path, num_bytes: int, subject: "Subject") -> "Document":
    """The document by the measured rates of the tokenizer whose vocabulary is nearest in size."""
    from llamatool.sizing.budget import Document
    from llamatool.tokenizers.estimate import ESTIMATED, LARGEST_ERROR, Estimator

    size = subject.config.vocab_size
    name = next((name for name, limit in _VOCABULARY_LIMITS if size <= limit), "llama-4")
    estimator = Estimator(name)
    for part in _parts(document):
        estimator.add(part)
    return Document(
        name=document.name,
        num_bytes=num_bytes,
        num_tokens=estimator.num_tokens,
        exact=False,
        counted_by=f"estimated by the rates of the tokenizer of {ESTIMATED[name]}, within "
        f"{LARGEST_ERROR[name]:.0%} on most texts",
    )


def _tokenizer_of(source: str) -> "Tokenizer | None":
    """The tokenizer in the model's folder or GGUF, or beside its configuration; None without one.

    Raises: TokenizerError if there is one and it is damaged.
    """
    from llamatool.tokenizers.load import load, tokenizer_file

    path = Path(source)
    if source == "-" or not path.exists():
        return None
    folder = path if path.is_dir() or path.suffix.lower() == ".gguf" else path.parent
    try:
        file = tokenizer_file(folder)
    except TokenizerError:
        return None
    return load(file, read_gguf=_gguf_metadata)


def _gguf_metadata(path: Path) -> Mapping[str, object]:
    from llamatool.checkpoint.gguf import GgufArray, read_file

    return {
        key: value.read() if isinstance(value, GgufArray) else value
        for key, value in read_file(path).metadata.items()
        if key.startswith(("tokenizer.", "general."))
    }


def _parts(document: Path) -> Iterator[str]:
    """The text in parts of a million characters, so that its size does not matter."""
    try:
        with document.open(encoding="utf-8", newline="") as file:
            while part := file.read(2**20):
                yield part
    except UnicodeDecodeError:
        raise InputError("the document is no UTF-8 text", where=str(document)) from None


def _show(
    budgets: "Sequence[Budget]",
    crossings: "Sequence[Crossing]",
    *,
    as_json: bool,
    curve: bool,
    named: bool,
) -> None:
    from llamatool.render.blocks import show, show_json
    from llamatool.render.kv_budget import to_blocks, to_json

    if not as_json:
        show(to_blocks(budgets, crossings, with_curve=curve))
        return
    show_json(to_json(budgets, crossings))
    if named:  # without SOURCE the same few would be said of most models
        for budget in budgets:
            for note in budget.notes:
                sys.stderr.write(f"warning: {one_line(budget.subject.source)}: {note.message}\n")


def _is_no(budgets: "Sequence[Budget]", *, named: bool) -> bool:
    """Whether the answer is no: for any model that was named, or for every one of the table."""
    answers = [
        budget.fit.fits
        if budget.fit is not None
        else budget.unshared is None and budget.context.fits is not False
        for budget in budgets
        if budget.question.machine is not None or budget.document is not None
    ]
    if not answers:
        return False
    return not all(answers) if named else not any(answers)


def _write_plot(path: Path, budgets: "Sequence[Budget]", crossings: "Sequence[Crossing]") -> None:
    from llamatool.render.kv_budget import plot_of
    from llamatool.render.plot import to_svg

    picture = to_svg(plot_of(budgets, crossings))
    if path.is_dir() or not path.name:
        raise ResourceError("cannot write the plot: this is a folder", where=str(path))
    unfinished = path.with_name(path.name + ".part")
    try:
        unfinished.write_text(picture, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ResourceError(f"cannot write the plot: {error.strerror}", where=str(path)) from None
