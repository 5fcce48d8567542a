"""A whole test from its options to its report: plan, run or resume, results on disk.

test = prepare(options)          the model's tokenizer, the design, the plan; no weights yet
report = test.run()              reads the weights, runs what is missing, and reports
show_prompt(folder, 17)          the prompt of a row, built again from its recipe
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamatool.errors import InputError, ResourceError, UsageError
from llamatool.needle.experiment import (
    CONTROLS,
    Cell,
    Design,
    Experiment,
    Job,
    Mode,
    Outline,
    Question,
    distinct_texts,
)
from llamatool.needle.grammar import WORDINGS, Language, Wording
from llamatool.needle.haystack import Encoder, open_haystack, seams_are_natural
from llamatool.needle.plan import Plan, naive_tokens, plan
from llamatool.needle.report import Compute, Report, make_report, summary
from llamatool.needle.run import (
    PREFILL_CHUNK,
    Outcome,
    Runner,
    Scoring,
    few_threads,
    load_decoder,
    matmul_flops_per_second,
)
from llamatool.needle.store import RESULTS, SCHEMA, Row, Store, Trial, read_rows, row_key, sha256_of
from llamatool.needle.store import trial_of as trial_of_row
from llamatool.needle.subject import POCKET_NOTE, Subject, Template, open_subject
from llamatool.records import record
from llamatool.source import Progress
from llamatool.units import format_tokens

if TYPE_CHECKING:
    from llamatool.model.launch import Crew
    from llamatool.model.load import Announce

PACKED_FROM = 16 * 1024  # tokens from which on whole prompts are too dear to be read one by one
SUMMARY = "summary.json"


@record
class Budget:
    """Where to stop: after so many seconds, or so many FLOPs of prefill."""

    seconds: float | None = None
    flops: float | None = None


@record
class Options:
    """What is asked for; None is as the subject suggests."""

    source: str | None = None
    lengths: tuple[int, ...] | None = None
    depths: tuple[float, ...] = tuple(i / 10 for i in range(11))
    trials: int = 6
    mode: Mode | None = None
    needle: str | None = None
    question: str | None = None
    answer: str | None = None
    answer_prefix: str = "auto"  # auto, none, or a text
    values: str = "digits:6"
    keys: str = "words"
    distractors: int = 0
    needles: int = 1
    haystack: str = "grammar"
    repeat: bool = False
    language: Language = "en"
    straddle: bool = False
    scoring: Scoring = "both"
    max_new_tokens: int = 24
    template: Template = "auto"
    controls: bool = True
    budget: Budget = Budget()
    out: Path | None = None
    fresh: bool = False
    device: str = "auto"
    device_map: str | None = None
    dtype: str | None = None
    prefill_chunk: int = PREFILL_CHUNK
    rope_factor: float | None = None
    threshold: float | None = None
    lower_bound: bool = False
    seed: int = 0
    wording: Wording | None = None  # instead of the texts above, as a recipe has them
    use_prefix: bool = True


class Test:
    """A test that is ready to run."""

    __test__ = False  # no test case of pytest's

    def __init__(self, options: Options, subject: Subject, crew: "Crew | None" = None) -> None:
        """A test. Args: crew: the ranks that run it together; the first reads and writes."""
        self.crew = crew
        self.options = options if crew is None or crew.is_first else replace(options, out=None)
        self.subject = subject
        self.design = _design(options, subject)
        encoder = Encoder(subject.tokenizer)
        haystack = open_haystack(
            encoder, options.haystack, options.language, repeats=options.repeat
        )
        self.experiment = Experiment(self.design, encoder, subject.frame, haystack)
        self.outlines = self.experiment.outlines(subject.chunk)
        self.recipe = self._recipe()
        self.config_sha256 = sha256_of(self.recipe)

    def plan(self, *, with_speed: bool = True) -> Plan:
        """Tokens, FLOPs and memory; with torch also the time, from a moment's measurement."""
        subject = self.subject
        speed = None
        if with_speed and self.options.device_map is None:  # the CPU may compute a part
            with few_threads(subject):
                speed = matmul_flops_per_second(self._device())
        return plan(
            self.experiment,
            self.outlines,
            subject.layers,
            subject.config.hidden_size,
            chunk=subject.chunk if subject.is_local_below_top else None,
            kv_dtype="float32" if subject.is_pocket else subject.config.dtype or "bfloat16",
            flops_per_second=speed,
        )

    def notes(self) -> tuple[str, ...]:
        """What a reader of the results must know, each in one sentence."""
        subject, haystack = self.subject, self.experiment.haystack
        notes = []
        if subject.is_pocket:
            notes.append(POCKET_NOTE.format(name=subject.name))
        window = subject.config.max_position_embeddings
        beyond = [n for n in self.design.lengths if window is not None and n > window]
        if beyond and window is not None:
            notes.append(
                f"{_names(beyond)} {'is' if len(beyond) == 1 else 'are'} beyond the trained window"
                f" of {format_tokens(window)} tokens"
            )
        if haystack.repeats:
            notes.append("the documents are repeated, which makes the needle easier to find")
        if not seams_are_natural(haystack):
            notes.append(
                "this tokenizer would cut the joined text otherwise at the ends of sentences"
            )
        if self.options.scoring != "generate" and not self.design.use_prefix:
            notes.append("without an answer prefix answers are written, not forced")
        if self.design.needles > 1 and len(self.design.depths) > 1:
            notes.append(
                "needles beside that of the cell are the same at all depths of a trial, so their"
                " answers are not independent"
            )
        if self.options.rope_factor is not None:
            notes.append(f"RoPE is scaled by {self.options.rope_factor:g} instead of as trained")
        return tuple(notes)

    def run(
        self,
        on_trial: Callable[[Trial], None] = lambda trial: None,
        tick: Callable[[], None] = lambda: None,
        announce: "Announce | None" = None,
    ) -> Report:
        """Runs what no earlier run has finished, and reports all of it.

        Args: announce: as in `load_model`.

        Raises: ResourceError if weights and cache do not fit; the errors of reading weights.
        KeyboardInterrupt leaves every finished trial on the disk.
        """
        started = time.perf_counter()
        options = self.options
        store = Store(options.out, self.config_sha256, fresh=options.fresh)
        if self.crew is not None:  # what to do, and to skip, must be the same on every rank
            self.crew.agree(self.config_sha256, "model, tokenizer or documents")
            store.take(json.loads(self.crew.tell(lambda: json.dumps(store.rows))))
        for trial in store.trials():
            on_trial(trial)
        missing = [o for o in self.outlines if not all(store.has(cell) for cell in o.cells)]
        runner, errors = None, []
        if missing:
            with few_threads(self.subject):
                runner = self._runner(announce)
                errors = self._run_jobs(runner, missing, store, on_trial, tick)
        report = self._report(store, runner, time.perf_counter() - started, errors)
        if options.out is not None:
            write_summary(options.out, report)
        return report

    def _runner(self, announce: "Announce | None") -> Runner:
        options, experiment = self.options, self.experiment
        longest = max(max(outline.lengths) for outline in self.outlines)
        decoder = load_decoder(
            self.subject,
            longest,
            device=self._device(),
            dtype=options.dtype,
            rope_factor=options.rope_factor,
            mesh=None if self.crew is None else self.crew.mesh,
            device_map=options.device_map,
            piece_tokens=options.prefill_chunk,
            announce=announce,
        )
        return Runner(
            decoder,
            self.subject,
            experiment,
            scoring=options.scoring,
            prefill_chunk=options.prefill_chunk,
        )

    def _device(self) -> str:
        return self.options.device if self.crew is None else str(self.crew.device)

    def _run_jobs(
        self,
        runner: Runner,
        outlines: Sequence[Outline],
        store: Store,
        on_trial: Callable[[Trial], None],
        tick: Callable[[], None],
    ) -> list[str]:
        """Runs jobs; what fails for lack of memory or by bad numbers becomes error rows."""
        import torch

        errors: list[str] = []
        started = time.perf_counter()
        per_token = self._flops_per_token()
        for outline in outlines:
            spent = time.perf_counter() - started
            if self._is_spent(spent, per_token * runner.prefill_tokens):
                break
            try:
                job = self.experiment.build(outline, self.subject.chunk)
                tick()
                for outcome in runner.run(job, lambda q: not store.has(q.cell), tick):
                    row = self._row(job, outcome, runner)
                    store.add(row)
                    on_trial(trial_of_row(row))
            except (torch.OutOfMemoryError, InputError) as error:
                if isinstance(error, InputError) and not store.rows and not errors:
                    raise  # nothing works: say why at once
                if self.crew is not None and not isinstance(error, InputError):
                    raise ResourceError(str(error).partition("\n")[0]) from None
                errors.append(str(error).partition("\n")[0])
                for cell in outline.cells:
                    if not store.has(cell):
                        store.add(self._error_row(cell, errors[-1]))
        return errors

    def _is_spent(self, seconds: float, flops: float) -> bool:
        budget = self.options.budget
        is_late = budget.seconds is not None and seconds >= budget.seconds
        if self.crew is not None and budget.seconds is not None:  # clocks differ
            is_late = bool(self.crew.tell(lambda: "late" if is_late else ""))
        return is_late or (budget.flops is not None and flops >= budget.flops)

    def _flops_per_token(self) -> float:
        """On average; the plan's FLOPs over its tokens."""
        planned = self.plan(with_speed=False)
        return planned.flops / max(1, planned.prefill_tokens)

    def _report(
        self, store: Store, runner: Runner | None, seconds: float, errors: Sequence[str]
    ) -> Report:
        trials = store.trials()
        wanted = sum(len(outline.cells) for outline in self.outlines)
        naive = naive_tokens(self.outlines, self.experiment.sizes.budget)
        return make_report(
            self.subject.name,
            self.design,
            trials,
            texts=distinct_texts(self.outlines),
            compute=Compute(runner.prefill_tokens if runner else 0, naive, seconds),
            threshold=self.options.threshold,
            lower_bound=self.options.lower_bound,
            has_chunks=self.subject.chunk is not None,
            notes=self.notes(),
            num_missing=wanted - len(trials),
            errors=errors,
        )

    def _row(self, job: Job, outcome: Outcome, runner: Runner) -> Row:
        question, needle = outcome.question, outcome.question.needle
        cell, experiment = question.cell, self.experiment
        prompt = experiment.prompt(job, question)
        chunk = self.subject.chunk
        parts = (outcome, *outcome.also)
        others = [self._other_needle(other) for other in outcome.also]
        return {
            **self._row_head(cell),
            "length_actual": len(prompt) + experiment.sizes.budget,
            **self._found(outcome),
            **({"other_needles": others} if others else {}),
            "n_prefill_tokens": sum(part.new_tokens for part in parts),
            "n_reused_tokens": sum(part.reused_tokens for part in parts),
            "prefill_s": round(sum(part.prefill_seconds for part in parts), 4),
            "decode_s": round(sum(part.decode_seconds for part in parts), 4),
            "peak_kv_bytes": runner.peak_kv_bytes,
            "prompt_sha256": sha256_of(list(prompt)),
            "status": "ok",
            "error": "the answer budget was spent inside the thinking block"
            if any(part.spent_thinking for part in parts)
            else None,
            "recipe": {
                **self.recipe,
                "kind": cell.kind,
                "key": needle.key,
                "foreign_sentences": job.num_foreign,
                "beyond_window": _is_beyond(cell.length, self.subject),
                "needle_border_distance": _border_distance(question.start, chunk),
                "question_border_distance": _border_distance(question.end, chunk),
            },
        }

    def _other_needle(self, outcome: Outcome) -> Row:
        """A needle that the prompt holds besides the one at the depth of its cell."""
        question = outcome.question
        return {
            "key": question.needle.key,
            "depth_target": question.cell.depth,
            **self._found(outcome),
            "needle_border_distance": _border_distance(question.start, self.subject.chunk),
        }

    def _found(self, outcome: Outcome) -> Row:
        """Where a needle stands, and what was said about it."""
        question, needle = outcome.question, outcome.question.needle
        cell, experiment = question.cell, self.experiment
        forced, start = outcome.forced, question.start
        stop = None if start is None else start + experiment.sizes.needle
        return {
            "depth_actual": None if start is None else experiment.depth_of(start, cell.length),
            "needle_token_start": start,
            "needle_token_end": stop,
            "chunk_border_crossed": _crosses(start, stop, self.subject.chunk),
            "needle": needle.text if cell.kind != "no_needle" else None,
            "question": needle.question,
            "gold": needle.value,
            "forced": None
            if forced is None
            else {
                "logprob": forced.logprob,
                "argmax_match": forced.argmax_match,
                "rank": forced.rank,
            },
            "generated": outcome.generated,
            "score": {
                "exact": outcome.score.exact,
                "contains": outcome.score.contains,
                "verdict": outcome.score.verdict,
                "found": outcome.score.found,
                "distractor": outcome.score.distractor,
            },
            "hit": outcome.hit,
        }

    def _error_row(self, cell: Cell, error: str) -> Row:
        return {
            **self._row_head(cell),
            "status": "error",
            "error": error,
            "recipe": {**self.recipe, "kind": cell.kind},
        }

    def _row_head(self, cell: Cell) -> Row:
        subject = self.subject
        return {
            "schema": SCHEMA,
            "key": row_key(self.config_sha256, cell),
            "run_id": self.config_sha256[:12],
            "config_sha256": self.config_sha256,
            "model": {
                "path": subject.name,
                "sha": subject.sha256,
                "arch": subject.config.model_type,
                "dtype": self.options.dtype or "auto",
                "device": self.options.device,
            },
            "tokenizer_sha": subject.tokenizer_sha256,
            "mode": "control" if cell.kind in CONTROLS else self.design.mode,
            "length_target": cell.length,
            "depth_target": cell.depth,
            "trial": cell.trial,
            "seed": self.design.seed,
        }

    def _recipe(self) -> dict[str, object]:
        """Everything that decides a result, so that `rebuild` makes the same prompts."""
        design, subject, options = self.design, self.subject, self.options
        wording = design.wording
        return {
            "model_sha": subject.sha256,
            "tokenizer_sha": subject.tokenizer_sha256,
            "source": subject.name,
            "template_option": options.template,
            "template": subject.frame.why,
            "frame": [list(subject.frame.before), list(subject.frame.after)],
            "haystack": options.haystack,
            "haystack_sha256": self.experiment.haystack.sha256,
            "repeat": options.repeat,
            "language": design.language,
            "lengths": list(design.lengths),
            "depths": list(design.depths),
            "trials": design.trials,
            "design_mode": design.mode,
            "wording": {
                "needle": wording.needle,
                "question": wording.question,
                "cue": wording.cue,
                "answer_prefix": wording.answer_prefix,
                "answer": wording.answer,
            },
            "use_prefix": design.use_prefix,
            "keys": design.keys,
            "values": design.values,
            "distractors": design.distractors,
            "max_new_tokens": design.max_new_tokens,
            "controls": design.controls,
            "straddle": design.straddle,
            "seed": design.seed,
            "scoring": options.scoring,
            "dtype": options.dtype,
            "rope_factor": options.rope_factor,
            # Absent where it changes nothing: results of before there was a choice stay valid.
            **({"needles": design.needles} if design.needles > 1 else {}),
        }


@record
class Shown:
    """The prompt of a row."""

    row: Row
    ids: tuple[int, ...]
    text: str
    num_answer_tokens: int  # kept free for the answer


def prepare(
    options: Options, *, progress: Progress | None = None, crew: "Crew | None" = None
) -> Test:
    """The test that `options` describe, without reading weights.

    Args: crew: the ranks that will run it together, every one with the same options.
    Raises: UsageError if it cannot be; the errors of the source, its tokenizer and the haystack.
    """
    subject = open_subject(options.source, template=options.template, progress=progress)
    return Test(options, subject, crew)


def show_prompt(folder: Path, line: int) -> Shown:
    """The prompt of line `line` of the folder's results, rebuilt from its recipe.

    Raises: InputError if there is no such line, or model, tokenizer or documents have changed.
    """
    row = next((row for number, row in read_rows(folder / RESULTS) if number == line), None)
    if row is None:
        raise InputError(f"there is no row {line}", where=str(folder / RESULTS))
    recipe = row["recipe"]
    if not isinstance(recipe, dict):
        raise InputError(f"row {line} has no recipe", where=str(folder / RESULTS))
    test = _rebuilt(recipe)
    for name in ("tokenizer_sha", "haystack_sha256"):
        if test.recipe[name] != recipe[name]:
            raise InputError(
                f"row {line} was made with another "
                + ("tokenizer" if name == "tokenizer_sha" else "haystack"),
                where=str(folder / RESULTS),
            )
    for outline in test.outlines:
        for cell in outline.cells:
            if _is_of(row, cell, str(recipe["kind"])):
                return _shown(test, outline, cell, row)
    raise InputError(f"row {line} does not belong to its recipe", where=str(folder / RESULTS))


def write_summary(folder: Path, report: Report) -> None:
    """Writes summary.json, whole or not at all.

    Raises: ResourceError if nothing can be written.
    """
    text = json.dumps(summary(report), indent=2) + "\n"
    replace_file(folder / SUMMARY, text)


def replace_file(path: Path, text: str) -> None:
    """Writes a file beside its place and moves it there.

    Raises: ResourceError if nothing can be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ResourceError(f"cannot write: {error.strerror}", where=str(path)) from None


def load_trials(folder: Path) -> list[Trial]:
    """The trials of the latest run in a folder.

    Raises: InputError if there is none.
    """
    rows = [row for _, row in read_rows(folder / RESULTS)]
    done = [row for row in rows if row.get("status") == "ok"]
    if not done:
        raise InputError("the folder holds no finished results", where=str(folder))
    latest = done[-1].get("config_sha256")
    by_key = {row.get("key"): row for row in done if row.get("config_sha256") == latest}
    return [trial_of_row(row) for row in by_key.values()]


def _design(options: Options, subject: Subject) -> Design:
    lengths = options.lengths or default_lengths(subject)
    if not lengths or min(lengths) < 1:
        raise UsageError("there is no length to test")
    wording, use_prefix = _wording(options)
    short_or_pocket = subject.is_pocket or max(lengths) < PACKED_FROM
    has_keys = "{key}" in wording.needle and "{key}" in wording.question
    is_single = short_or_pocket or not has_keys or options.needles > 1
    mode = options.mode or ("single" if is_single else "packed")
    if mode == "sweep" and subject.config.rope.type in ("dynamic", "longrope"):
        raise UsageError(
            f"RoPE of the type `{subject.config.rope.type}` depends on the length of the prompt, so"
            " one prefill cannot serve several lengths",
            hint="use --mode packed",
        )
    return Design(
        lengths=tuple(sorted(set(lengths))),
        depths=tuple(sorted(set(options.depths))),
        trials=options.trials,
        mode=mode,
        wording=wording,
        language=options.language,
        keys=options.keys,
        values=options.values,
        distractors=options.distractors,
        needles=options.needles,
        max_new_tokens=options.max_new_tokens,
        use_prefix=use_prefix,
        controls=options.controls,
        straddle=options.straddle,
        seed=options.seed,
    )


def default_lengths(subject: Subject) -> tuple[int, ...]:
    """Doubling from 1k to 64k, or to the trained window where that is shorter."""
    window = subject.config.max_position_embeddings or 65_536
    lengths = [1024 << i for i in range(7) if 1024 << i <= window]
    return tuple(lengths or [window])


def _wording(options: Options) -> tuple[Wording, bool]:
    if options.wording is not None:
        return options.wording, options.use_prefix
    wording, use_prefix = WORDINGS[options.language], options.answer_prefix != "none"
    if options.needle is not None:
        if options.question is None:
            raise UsageError("--needle needs --question")
        if "{value}" not in options.needle and options.answer is None:
            raise UsageError("--needle without {value} needs --answer")
        answer = " " + (options.answer or "{value}").strip()
        wording = replace(
            wording,
            needle=options.needle.strip(),
            question=options.question.strip(),
            answer_prefix="",
            answer=answer,
        )
        use_prefix = False
    elif options.question is not None or options.answer is not None:
        raise UsageError("--question and --answer belong to --needle")
    if options.answer_prefix not in ("auto", "none"):
        prefix = options.answer_prefix.strip()
        wording, use_prefix = replace(wording, answer_prefix=" " + prefix), bool(prefix)
    if not use_prefix:
        if options.scoring == "forced":
            raise UsageError(
                "--score forced needs an answer prefix, behind which the answer comes at once",
                hint="give --answer-prefix TEXT, or use --score generate",
            )
        wording = replace(wording, answer_prefix="")
    return wording, use_prefix


def _rebuilt(recipe: Mapping[str, Any]) -> Test:
    """The test of a recipe. Raises: InputError if the recipe is incomplete."""
    try:
        options = Options(
            source=str(recipe["source"]),
            lengths=tuple(recipe["lengths"]),
            depths=tuple(recipe["depths"]),
            trials=recipe["trials"],
            mode=recipe["design_mode"],
            values=recipe["values"],
            keys=recipe["keys"],
            distractors=recipe["distractors"],
            needles=recipe.get("needles", 1),
            haystack=recipe["haystack"],
            repeat=recipe["repeat"],
            language=recipe["language"],
            straddle=recipe["straddle"],
            max_new_tokens=recipe["max_new_tokens"],
            template=recipe["template_option"],
            controls=recipe["controls"],
            seed=recipe["seed"],
            scoring=recipe["scoring"],
            dtype=recipe["dtype"],
            rope_factor=recipe["rope_factor"],
            wording=Wording(**recipe["wording"]),
            use_prefix=recipe["use_prefix"],
        )
    except (KeyError, TypeError):
        raise InputError("the recipe of this row is incomplete") from None
    return prepare(options)


def _shown(test: Test, outline: Outline, cell: Cell, row: Row) -> Shown:
    job = test.experiment.build(outline, test.subject.chunk)
    question: Question = next(q for q in job.questions if q.cell == cell)
    ids = test.experiment.prompt(job, question)
    if row.get("status") == "ok" and sha256_of(list(ids)) != row["prompt_sha256"]:
        raise InputError("the prompt that the recipe gives now is not the one that was tested")
    text = test.subject.tokenizer.decode(ids, specials=True)
    return Shown(row, ids, text, test.experiment.sizes.budget)


def _is_of(row: Row, cell: Cell, kind: str) -> bool:
    return (cell.kind, cell.length, cell.depth, cell.trial) == (
        kind,
        row["length_target"],
        row["depth_target"],
        row["trial"],
    )


def _crosses(start: int | None, stop: int | None, chunk: int | None) -> bool:
    if start is None or stop is None or chunk is None:
        return False
    return start // chunk != (stop - 1) // chunk


def _border_distance(position: int | None, chunk: int | None) -> int | None:
    """Tokens from a position to the nearest border, negative if the border comes behind it."""
    if position is None or chunk is None:
        return None
    behind = position % chunk
    return behind if 2 * behind <= chunk else behind - chunk


def _is_beyond(length: int, subject: Subject) -> bool:
    window = subject.config.max_position_embeddings
    return window is not None and length > window


def _names(lengths: Sequence[int]) -> str:
    return ", ".join(format_tokens(length) for length in lengths)
