"""`llamatool needle`: does a model find a fact in a long context?"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llamatool.cli.memory import announce_memory, check_device_map
from llamatool.cli.options import DeviceMapOption, JsonOption
from llamatool.cli.progress import progress
from llamatool.cli.ranks import crew
from llamatool.errors import InputError, MissingExtraError, ResourceError, UsageError

if TYPE_CHECKING:
    from llamatool.model.launch import Crew
    from llamatool.needle.report import Report
    from llamatool.needle.session import Options, Test
    from llamatool.needle.store import Trial

_DTYPES = {"auto": None, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def needle(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A folder, .gguf or .safetensors file, or hub id with weights; pocket (default) "
            "or pocket-rope. `compare A B` compares two result folders.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(
            "--length",
            metavar="N",
            help="64k; a list 1k,4k; a range 1k:64k:x2 or 8k:128k:+8k. Counts the whole prompt "
            "and the answer (k is 1,024). Default: doubling from 1k to 64k or the window.",
            show_default=False,
        ),
    ] = None,
    depths: Annotated[
        str,
        typer.Option(
            "--depths", metavar="N", help="Number of even depths, or a list in percent: 0,50,100."
        ),
    ] = "11",
    depth_scale: Annotated[
        Literal["linear", "sigmoid"],
        typer.Option("--depth-scale", help="sigmoid puts more depths near both ends."),
    ] = "linear",
    trials: Annotated[
        int, typer.Option("--trials", min=1, max=1000, metavar="N", help="Per cell.")
    ] = 6,
    mode: Annotated[
        Literal["single", "packed", "sweep"] | None,
        typer.Option(
            "--mode",
            help="single: one needle per prompt; packed: a needle at every depth, one prefill per "
            "length; sweep: one prefill for all lengths. Default: single on the pocket models, "
            "below 16k and with --needles, else packed.",
            show_default=False,
        ),
    ] = None,
    needle_text: Annotated[
        str | None,
        typer.Option(
            "--needle",
            metavar="T",
            help="Own fact, with {key} and {value} where they vary.",
            show_default=False,
        ),
    ] = None,
    question: Annotated[
        str | None,
        typer.Option("--question", metavar="T", help="Own question.", show_default=False),
    ] = None,
    answer: Annotated[
        str | None,
        typer.Option("--answer", metavar="T", help="Expected answer.", show_default=False),
    ] = None,
    answer_prefix: Annotated[
        str,
        typer.Option(
            "--answer-prefix",
            metavar="T",
            help="How the answer begins, auto or none. Own needles have none.",
        ),
    ] = "auto",
    value: Annotated[
        str, typer.Option("--value", metavar="KIND", help="digits:N, word or uuid.")
    ] = "digits:6",
    keys: Annotated[
        Literal["words", "names", "cities"], typer.Option("--keys", help="Kind of keys.")
    ] = "words",
    distractors: Annotated[
        int,
        typer.Option(
            "--distractors",
            min=0,
            max=1000,
            metavar="N",
            help="Needles with other keys in every prompt (single).",
        ),
    ] = 0,
    needles: Annotated[
        int,
        typer.Option(
            "--needles",
            min=1,
            max=64,
            metavar="N",
            help="In every prompt, each asked for: one at the depth of the cell, the others "
            "evenly over the rest (single).",
        ),
    ] = 1,
    haystack: Annotated[
        str,
        typer.Option(
            "--haystack",
            metavar="grammar|FILE|DIR",
            help="Generated sentences, or own documents (.txt, .md, .rst).",
        ),
    ] = "grammar",
    repeat: Annotated[
        bool, typer.Option("--repeat", help="Repeat documents that are too short.")
    ] = False,
    language: Annotated[
        Literal["en", "zh"], typer.Option("--language", help="Of sentences and questions.")
    ] = "en",
    straddle: Annotated[
        bool,
        typer.Option("--straddle", help="Also put needles across the borders of chunked layers."),
    ] = False,
    score: Annotated[
        Literal["forced", "generate", "both"],
        typer.Option(
            "--score",
            help="forced: would it write the answer? generate: let it write. both: both.",
        ),
    ] = "both",
    max_new: Annotated[
        int,
        typer.Option(
            "--max-new", min=1, max=65536, metavar="N", help="Tokens of a written answer."
        ),
    ] = 24,
    template: Annotated[
        Literal["auto", "raw", "chat"],
        typer.Option(
            "--template", help="auto: a chat model's own format, and raw text for base models."
        ),
    ] = "auto",
    control: Annotated[
        bool,
        typer.Option(
            "--control/--no-control",
            help="Also ask without the needle, with a wrong key, and in a short context.",
        ),
    ] = True,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", metavar="T", help="Stop after 10m, or after 2PF.", show_default=False
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print tokens, FLOPs, memory and time; run nothing.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Write results.jsonl, summary.json, grid.csv, grid.svg and report.html. An "
            "interrupted test goes on there.",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Do not go on from earlier results in DIR.")
    ] = False,
    show: Annotated[
        int | None,
        typer.Option(
            "--show",
            metavar="ROW",
            help="Print the prompt of a line of DIR's results.jsonl, built again.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1 or mps.")
    ] = "auto",
    device_map: DeviceMapOption = None,
    dtype: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"],
        typer.Option("--dtype", help="auto: fp32 for small models on a CPU, else as stored."),
    ] = "auto",
    prefill_chunk: Annotated[
        int,
        typer.Option("--prefill-chunk", min=1, max=2**20, metavar="N", help="Tokens read at once."),
    ] = 2048,
    rope_factor: Annotated[
        float | None,
        typer.Option(
            "--rope-factor",
            min=1.0,
            metavar="F",
            help="What if: another factor of RoPE scaling (linear if the model has none).",
            show_default=False,
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold",
            min=0.0,
            max=1.0,
            metavar="P",
            help="Of the effective length; default 0.85 of the score in a short context.",
            show_default=False,
        ),
    ] = None,
    lower_bound: Annotated[
        bool,
        typer.Option("--lower-bound", help="Compare the interval's lower end with the threshold."),
    ] = False,
    fail_under: Annotated[
        float | None,
        typer.Option(
            "--fail-under",
            min=0.0,
            max=1.0,
            metavar="P",
            help="Exit code 1 if a length scores below.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Of everything.")] = 0,
    palette: Annotated[
        Literal["cividis", "classic"],
        typer.Option("--palette", help="classic: red, yellow, green."),
    ] = "cividis",
    plain: Annotated[
        bool, typer.Option("--plain", help="One character per cell, no colour.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Test whether a model finds a fact at every depth of a long context.

    Prompts are exact to the token of the model's own tokenizer. A needle test shows that positions
    of the context can be addressed; it does not show reasoning over long text, and does not
    predict the quality of other tasks.

    Without MODEL it runs on the built-in pocket model, which proves the pipeline and is no
    language model.

    Examples:

      llamatool needle --length 64k

      llamatool needle pocket-rope --length 2k,4k,8k --out results

      llamatool needle ./Llama-3.1-8B-Instruct --length 8k:128k:x2 --plan

      llamatool needle ./model --haystack handbook.md --length 16k --needle "The office cat is
      called Miso." --question "What is the office cat called?" --answer Miso

      llamatool needle --length 4k,16k --needles 4

      torchrun --nproc-per-node 4 -m llamatool needle ./Llama-3.1-70B-Instruct --length 64k

      llamatool needle compare results-a results-b
    """
    from llamatool.needle.arguments import parse_budget, parse_depths, parse_lengths
    from llamatool.needle.session import Budget, Options

    names = models or []
    if names[:1] == ["compare"]:
        _compare(names[1:], as_json=as_json)
        return
    if show is not None:
        _show_row(out, show, as_json=as_json)
        return
    if len(names) > 1:
        raise UsageError(
            f"one MODEL at a time, not {len(names)}", hint="see `llamatool needle compare`"
        )
    options = Options(
        source=names[0] if names else None,
        lengths=None if length is None else parse_lengths(length),
        depths=parse_depths(depths, depth_scale),
        trials=trials,
        mode=mode,
        needle=needle_text,
        question=question,
        answer=answer,
        answer_prefix=answer_prefix,
        values=value,
        keys=keys,
        distractors=distractors,
        needles=needles,
        haystack=haystack,
        repeat=repeat,
        language=language,
        straddle=straddle,
        scoring=score,
        max_new_tokens=max_new,
        template=template,
        controls=control,
        budget=Budget() if budget is None else parse_budget(budget),
        out=out,
        fresh=fresh,
        device=device,
        device_map=device_map,
        dtype=_DTYPES[dtype],
        prefill_chunk=prefill_chunk,
        rope_factor=rope_factor,
        threshold=threshold,
        lower_bound=lower_bound,
        seed=seed,
    )
    check_device_map(device_map, device)
    with crew(device) as group:
        _test(
            options,
            only_plan=plan,
            fail_under=fail_under,
            palette=palette,
            plain=plain,
            as_json=as_json,
            group=group,
        )


def _test(
    options: "Options",
    *,
    only_plan: bool,
    fail_under: float | None,
    palette: Literal["cividis", "classic"],
    plain: bool,
    as_json: bool,
    group: "Crew | None",
) -> None:
    from llamatool.needle.session import prepare
    from llamatool.render import needle as render
    from llamatool.render.blocks import show_json

    with progress("Reading headers", unit="files") as update:
        test = prepare(options, progress=update, crew=group)
    if only_plan:
        planned = test.plan(with_speed=_has_torch())
        if as_json:
            show_json(render.plan_json(test, planned))
        else:
            render.show_plan(test, planned)
        return
    _require_torch()
    if not as_json:
        render.say_plan(test, test.plan(), file=sys.stderr)
    try:
        with _live(test, palette, quiet=as_json) as (on_trial, tick):
            report = test.run(on_trial, tick, announce_memory)
    except KeyboardInterrupt:
        kept = "" if options.out is None else ": the same command goes on from here"
        sys.stderr.write(f"interrupted{kept}\n")
        raise SystemExit(130) from None
    if test.options.out is not None:
        render.write_files(test.options.out, report, palette)
    if as_json:
        from llamatool.needle.report import summary

        show_json(summary(report))
    else:
        render.show_report(report, palette=palette, plain=plain, out=options.out)
    _exit(report, fail_under)


def _exit(report: "Report", fail_under: float | None) -> None:
    """Failed trials are an error; below the wanted share, the answer is no.

    Raises: ResourceError, typer.Exit.
    """
    if report.errors:
        raise ResourceError(
            f"{report.num_missing} trials failed: {report.errors[0]}",
            hint="run the same command with --out DIR again to try only these",
        )
    if fail_under is not None and any(c.share < fail_under for c in report.by_length if c.trials):
        raise typer.Exit(1)


@contextmanager
def _live(
    test: "Test", palette: Literal["cividis", "classic"], *, quiet: bool
) -> "Iterator[tuple[Callable[[Trial], None], Callable[[], None]]]":
    """Two functions to call: with every trial, and now and then. A grid grows on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield (lambda trial: None), (lambda: None)
        return
    from llamatool.render.needle import LiveGrid

    with LiveGrid(test.design, palette) as grid:
        yield grid.add, grid.tick


def _compare(folders: list[str], *, as_json: bool) -> None:
    from llamatool.needle.report import compare
    from llamatool.needle.session import load_trials
    from llamatool.render import needle as render
    from llamatool.render.blocks import show, show_json

    if len(folders) != 2:
        raise UsageError(
            f"`compare` takes two result folders, not {len(folders)}",
            hint="llamatool needle compare A B",
        )
    for folder in folders:
        if not Path(folder).is_dir():
            raise InputError("there is no such folder of results", where=folder)
    found = compare(*(load_trials(Path(folder)) for folder in folders))
    if as_json:
        show_json(render.comparison_json(found, folders))
    else:
        show(render.comparison_blocks(found, folders))


def _show_row(out: Path | None, row: int, *, as_json: bool) -> None:
    from llamatool.needle.session import show_prompt
    from llamatool.render import needle as render
    from llamatool.render.blocks import show_json

    if out is None:
        raise UsageError("--show ROW needs --out DIR, the folder with the results")
    shown = show_prompt(out, row)
    if as_json:
        show_json(render.shown_json(shown))
    else:
        render.show_prompt(shown)


def _has_torch() -> bool:
    from importlib.util import find_spec

    return find_spec("torch") is not None


def _require_torch() -> None:
    if not _has_torch():
        raise MissingExtraError("needle", "PyTorch", "torch")
