"""Several needles in a prompt: where they stand, what is asked, what is reported, what it costs."""

import csv
import io
import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamatool.errors import UsageError
from llamatool.needle.experiment import Design, Experiment, Job, Question
from llamatool.needle.grammar import WORDINGS
from llamatool.needle.haystack import DocumentHaystack, Encoder, Filler, GrammarHaystack
from llamatool.needle.places import Stretch, free_stretches, room, spread
from llamatool.needle.plan import plan
from llamatool.needle.report import Compute, compare, make_report, summary
from llamatool.needle.session import Options, load_trials, prepare, show_prompt
from llamatool.needle.statistics import wilson
from llamatool.needle.store import OTHER_NEEDLE, RESULTS, read_rows, sha256_of
from llamatool.render.blocks import plain
from llamatool.render.needle import report_blocks, to_csv, to_text
from llamatool.render.needle_html import to_html
from tests.cli.runner import run
from tests.needle.conftest import TOKENIZERS, experiment, raw_frame
from tests.needle.test_experiment import starts_a_sentence
from tests.needle.test_report import trial

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("one_thread")

ELEVEN = tuple(i / 10 for i in range(11))
SMALL = Options(lengths=(300, 512), depths=(0.0, 0.5, 1.0), trials=2, scoring="forced", needles=3)


# Places.


def test_worked_numbers_of_places():
    assert free_stretches([0, 50], 0, 100, 10) == [Stretch(10, 50), Stretch(60, 100)]
    assert free_stretches([0], 0, 100, 10, [64]) == [Stretch(10, 64), Stretch(64, 100)]
    assert free_stretches([60], 0, 100, 10, [64]) == [Stretch(0, 60), Stretch(70, 100)]
    assert room([Stretch(0, 100)], 10, 5) == 6
    assert spread([Stretch(0, 1_000)], 2, 500, 10, 5) == [250, 740]


@given(st.data())
def test_places_keep_their_distance_and_fit(data):
    width, gap = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 12))
    stretches, position = [], 0
    for size in data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=8)):
        stretches.append(Stretch(position, position + size))
        position += size + width
    most = room(stretches, width, gap)
    how_many = data.draw(st.integers(0, most))
    starts = spread(stretches, how_many, data.draw(st.integers(0, 999)), width, gap)
    assert len(starts) == how_many
    for stretch in stretches:
        inside = [s for s in starts if stretch.start <= s < stretch.stop]
        edges = [stretch.start - width, *inside, stretch.stop]
        if inside:
            assert all(after - before >= width + gap for before, after in pairwise(edges))


@given(st.integers(2, 64), st.integers(0, 999))
def test_places_are_even(how_many, phase):
    starts = spread([Stretch(0, 10_000)], how_many, phase, 12, 6)
    steps = [after - before for before, after in pairwise(starts)]
    assert max(steps) - min(steps) <= 1
    assert starts[0] <= max(steps) + 6


# Prompts.


def all_needles(question: Question) -> list[Question]:
    return [question, *question.also]


def searched(made: Experiment, prompt: tuple[int, ...], text: str) -> int:
    """The token with which `text` begins, found in the bytes of the prompt alone."""
    pieces = [made.encoder.tokenizer.token_bytes(token) for token in prompt]
    whole, wanted = b"".join(pieces), text.encode()
    assert whole.count(wanted) == 1
    at = whole.index(wanted)
    place = 0
    for number, piece in enumerate(pieces):
        if place >= at and piece:  # BOS has no bytes
            assert place == at, "inside a token"
            return number
        place += len(piece)
    raise AssertionError("not found")


def check_layout(made: Experiment, job: Job, question: Question) -> float:
    """Checks a prompt with several needles; how far the first is from its target, in tokens."""
    prompt, sizes, length = made.prompt(job, question), made.sizes, question.cell.length
    assert len(prompt) + sizes.budget == length
    bos = made.encoder.tokenizer.bos_id
    if made.frame.before:
        assert prompt.count(bos) == 1
    space = " {}" if made.design.language == "en" else "{}\n"
    asked = all_needles(question)
    assert len(asked) == made.design.needles
    assert len({q.needle.key for q in asked}) == len({q.needle.value for q in asked}) == len(asked)
    taken = []
    for one in asked:
        # What was found by searching is what was planned and is stored.
        start = searched(made, prompt, space.format(one.needle.text))
        assert start == one.start
        assert starts_a_sentence(made, prompt, start)
        assert starts_a_sentence(made, prompt, start + sizes.needle)
        taken.append(start)
        if one is not question:
            last = made.body_end(length) - sizes.needle
            assert one.cell.depth == (start - sizes.before) / (last - sizes.before)
            # The question to it ends a prompt of the same text and the same length.
            other = made.prompt(job, question, one)
            assert other[: one.end] == prompt[: question.end]
            assert len(other) == len(prompt)
            assert one.needle.key in made.encoder.tokenizer.decode(one.needle.tail)
        rivals = {value for value, _ in one.others}
        assert one.needle.value not in rivals
        assert {q.needle.value for q in asked if q is not one} <= rivals
    taken.sort()
    assert all(after - before >= sizes.needle for before, after in pairwise(taken))
    assert taken[-1] + sizes.needle <= question.end
    return abs(question.start - made.target(length, question.cell.depth))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_random_layouts_are_exact(tokenizer_of, name):
    """Random lengths, depths and numbers of needles, controls and borders included."""
    tokenizer, draw = tokenizer_of(name), random.Random(f"needles {name}")
    num_prompts, worst, refused = 0, 0.0, 0
    while num_prompts < 250:
        needles = draw.choice((2, 3, 4, 8, 20))
        length = int(160 * (2500 / 160) ** draw.random())
        depths = tuple(sorted({round(draw.random(), 3) for _ in range(draw.randrange(6))} | {0.0}))
        design = Design(
            (length,), depths, 1, needles=needles, seed=draw.randrange(10**6),
            distractors=draw.choice((0, 0, 2)), straddle=draw.random() < 0.3,
        )  # fmt: skip
        try:
            made = experiment(tokenizer, design)
            outlines = made.outlines(512)
        except UsageError:
            refused += 1
            continue
        for outline in outlines:
            job = made.build(outline, 512)
            for question in job.questions:
                if question.cell.kind in ("needle", "short", "straddle"):
                    worst = max(worst, check_layout(made, job, question))
                    num_prompts += 1
                if question.cell.kind == "straddle":
                    crossing = [_crosses(made, one, 512) for one in all_needles(question)]
                    assert crossing == [True] + [False] * (needles - 1)
    assert worst <= 12
    assert refused < num_prompts


def _crosses(made: Experiment, question: Question, chunk: int) -> bool:
    start = question.start
    return start // chunk != (start + made.sizes.needle - 1) // chunk


def test_no_room_between_borders_is_a_usage_error(pocket_tokenizer):
    design = Design((1024,), (0.5,), 1, needles=2, straddle=True)
    with pytest.raises(UsageError, match="between borders of chunks of 30"):
        experiment(pocket_tokenizer, design).outlines(30)


def test_chinese_layouts_are_exact(pocket_tokenizer):
    design = Design(
        (700, 2000), ELEVEN, 1, needles=6, language="zh", wording=WORDINGS["zh"], controls=False
    )
    made = experiment(pocket_tokenizer, design)
    found = [
        check_layout(made, job, question)
        for job in map(made.build, made.outlines())
        for question in job.questions
    ]
    assert len(found) == 22
    assert max(found) <= 12


def test_the_needle_of_a_cell_is_the_one_of_a_prompt_with_one(pocket_tokenizer):
    """Depths, keys and distractors stay as they are, so that runs with 1 and N can be paired."""
    places = []
    for needles in (1, 5):
        design = Design((4096,), ELEVEN, 2, needles=needles, distractors=3, controls=False)
        made = experiment(pocket_tokenizer, design)
        questions = [q for o in made.outlines() for q in made.build(o).questions]
        places.append([(q.cell, q.start, q.needle, q.others[:3]) for q in questions])
    assert places[0] == places[1]


def test_further_needles_stay_while_the_first_moves(pocket_tokenizer):
    made = experiment(pocket_tokenizer, Design((4096,), ELEVEN, 2, needles=6, controls=False))
    phases = set()
    for outline in made.outlines():
        questions = made.build(outline).questions
        assert len(questions) == 11
        rest = {tuple((one.start, one.needle) for one in q.also) for q in questions}
        assert len(rest) == 1
        starts = [start for start, _ in rest.pop()]
        phases.add(starts[0])
        # Evenly, but for slots in between.
        steps = [after - before for before, after in pairwise(starts)]
        assert max(steps) < 1.25 * min(steps)
        assert 3000 < starts[-1] - starts[0] < 4096
    assert len(phases) == 2  # the trials have other places


def test_short_texts_are_parted_until_the_needles_fit(pocket_tokenizer):
    made = experiment(pocket_tokenizer, Design((420,), ELEVEN, 1, needles=8, controls=False))
    outlines = made.outlines()
    assert len(outlines) > 1
    assert sorted(d for outline in outlines for d in outline.depths) == list(ELEVEN)
    for outline in outlines:
        job = made.build(outline)
        for question in job.questions:
            assert check_layout(made, job, question) <= 12


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_smallest_length_is_named_and_works(tokenizer_of, name):
    tokenizer = tokenizer_of(name)
    for needles in (2, 64):
        design = Design((130,), (0.0, 0.3, 1.0), 1, needles=needles, distractors=1)
        with pytest.raises(UsageError, match=f"{needles} needles of") as error:
            experiment(tokenizer, design)
        smallest = int(error.value.hint.rsplit(" ", 1)[1])
        made = experiment(tokenizer, replace(design, lengths=(smallest,)))
        for outline in made.outlines():
            job = made.build(outline)
            for question in job.questions:
                if question.cell.kind in ("needle", "short"):
                    check_layout(made, job, question)


def test_controls_hold_none_or_another(pocket_tokenizer):
    made = experiment(pocket_tokenizer, Design((1024, 2048), ELEVEN, 2, needles=4))
    counts = {}
    for outline in made.outlines():
        job = made.build(outline)
        for question in job.questions:
            prompt, kind = made.prompt(job, question), question.cell.kind
            text = pocket_tokenizer.decode(prompt)
            assert question.also == () or kind in ("needle", "short")
            # The last two are in the question and in the beginning of the answer.
            counts.setdefault(kind, set()).add(text.count("magic number for") - 2)
            if kind == "wrong_key":
                assert f"{question.needle.key} is {question.needle.value}" not in text
                assert question.needle.value in text
            if kind not in ("alone", "short"):
                assert len(prompt) + made.sizes.budget == question.cell.length
    assert counts == {"needle": {4}, "short": {4}, "wrong_key": {4}, "no_needle": {0}, "alone": {1}}
    cells = [c for o in made.outlines() for c in o.cells]
    assert len(set(cells)) == len(cells)
    assert {c.length for c in cells if c.kind == "no_needle"} == {1024, 2048}


def test_documents_hold_several_needles(pocket_tokenizer):
    encoder = Encoder(pocket_tokenizer)
    text = "".join(f"Rule {i}: the door of room {i} stays shut at night.\n" for i in range(400))
    haystack = DocumentHaystack(encoder, "en", "book", text, repeats=False)
    design = Design((1500,), ELEVEN, 1, needles=5, controls=False)
    made = Experiment(design, encoder, raw_frame(pocket_tokenizer), haystack)
    for outline in made.outlines():
        job = made.build(outline)
        for question in job.questions:
            assert check_layout(made, job, question) <= 12


def test_many_short_gaps_can_be_filled(pocket_tokenizer):
    """Once a rare sum had made the filler look far ahead, the next one failed."""
    filler = Filler(GrammarHaystack(Encoder(pocket_tokenizer), "en"), 3)
    for _ in range(40):
        assert sum(len(unit.ids) for unit in filler.exact(7)) == 7


# Answers and costs.


def runner_of(folder: Path, design: Design, **options):
    from tests.needle.test_run import runner_of

    return runner_of(folder, design, prefill_chunk=128, **options)


def outcomes(runner):
    from tests.needle.test_run import outcomes

    return outcomes(runner)


@pytest.mark.parametrize("name", ["dense", "layered", "local"])
def test_every_fork_gives_the_numbers_of_a_fresh_prompt(tiny_models, name):
    design = Design((350, 700), (0.0, 0.4, 1.0), 1, needles=3, straddle=name != "dense")
    runner = runner_of(tiny_models[name], design)
    num_asked = 0
    for job, outcome in outcomes(runner):
        for one in (outcome, *outcome.also):
            prompt = runner.experiment.prompt(job, outcome.question, one.question)
            gold = one.question.needle.gold
            ids = torch.tensor([[*prompt, *gold[:-1]]])
            logits = runner.decoder(ids, logits_to_keep=len(gold))[0].log_softmax(-1)
            fresh = float(sum(logits[i, token] for i, token in enumerate(gold)))
            assert one.forced.logprob == pytest.approx(fresh, rel=1e-6, abs=1e-5)
            num_asked += 1
    # Three to each prompt of the grid, the borders and the short control; one to the others.
    num_straddled = 0 if name == "dense" else 6
    assert num_asked == 3 * (6 + num_straddled + 1) + 2 + 2 + 1


@pytest.mark.parametrize("name", ["dense", "layered", "local"])
@pytest.mark.parametrize("needles", [2, 5])
def test_the_plan_foretells_the_tokens(tiny_models, name, needles):
    design = Design((1024, 2048), (0.0, 0.25, 0.5, 0.75, 1.0), 2, needles=needles)
    runner = runner_of(tiny_models[name], design, with_rank=False)
    planned = plan(
        runner.experiment, runner.experiment.outlines(64), runner.subject.layers, 128,
        chunk=runner.local_chunk, kv_dtype="float32",
    )  # fmt: skip
    found = [outcome for _, outcome in outcomes(runner)]
    assert planned.num_prompts == sum(1 + len(outcome.also) for outcome in found)
    assert planned.num_prompts == 20 * needles + 4 + 4 + 2 * needles + 2
    everything = [one for outcome in found for one in (outcome, *outcome.also)]
    assert planned.naive_prefill_tokens == sum(
        one.new_tokens + one.reused_tokens for one in everything
    )
    if name != "local":  # where nobody in particular pays for the text
        assert sum(one.new_tokens for one in everything) == runner.prefill_tokens
    # Slots give way by some tokens where a gap cannot be filled.
    assert runner.prefill_tokens == pytest.approx(planned.prefill_tokens, rel=0.01)


@pytest.mark.parametrize("needles", [1, 4, 16])
def test_counted_tokens_of_eleven_depths(tiny_models, needles):
    """The grid reads 6.5 L whatever the number of needles; each costs a tail per prompt."""
    lengths, sums = (1024, 2048), {}
    for controls in (False, True):
        design = Design(lengths, ELEVEN, 1, needles=needles, controls=controls)
        runner = runner_of(tiny_models["dense"], design, with_rank=False)
        found = [o for _, o in outcomes(runner) if o.question.cell.kind not in ("short", "alone")]
        asked = [one for outcome in found for one in (outcome, *outcome.also)]
        assert len(asked) == 22 * needles + (4 if controls else 0)
        sums[controls] = sum(one.new_tokens for one in asked)
        sums[controls] -= len(asked) * runner.experiment.sizes.tail
    assert sums[False] <= 6.6 * sum(lengths)
    # The text without any needle is another one, where there are several.
    assert sums[True] <= (6.6 if needles == 1 else 7.6) * sum(lengths)


def test_a_local_grid_costs_about_one_text(tiny_models):
    design = Design((4096,), ELEVEN, 1, needles=6, controls=False)
    runner = runner_of(tiny_models["local"], design, with_rank=False)
    num_asked = sum(1 + len(outcome.also) for _, outcome in outcomes(runner))
    assert num_asked == 66
    tails = num_asked * runner.experiment.sizes.tail
    assert runner.prefill_tokens - tails <= 4096 + 11 * 2 * 64


# A whole test.


def without_timings(folder: Path) -> bytes:
    content = json.loads((folder / "summary.json").read_bytes())
    del content["compute"]["seconds"], content["compute"]["prefill_tokens"]
    return json.dumps(content).encode()


def test_pocket_finds_all_of_them(tmp_path):
    report = prepare(replace(SMALL, out=tmp_path, scoring="both")).run()
    assert [(c.hits, c.trials) for c in report.by_length] == [(6, 6), (6, 6)]
    assert [(c.hits, c.trials) for c in report.recall] == [(18, 18), (18, 18)]
    assert [(c.hits, c.trials) for c in report.all_right] == [(6, 6), (6, 6)]
    assert report.controls["no_needle"].hits == report.controls["wrong_key"].hits == 0
    for number, row in read_rows(tmp_path / RESULTS):
        kind = row["recipe"]["kind"]
        assert ("other_needles" in row) is (kind in ("needle", "short"))
        shown = show_prompt(tmp_path, number)
        assert sha256_of(list(shown.ids)) == row["prompt_sha256"]
        for other in row.get("other_needles", ()):
            assert {"key", "gold", "depth_target", "depth_actual", "hit"} <= set(other)
            assert other["needle"] in shown.text
            assert other["generated"].strip().startswith(other["gold"])
            assert other["hit"] is other["forced"]["argmax_match"] is True
            assert other["depth_target"] == pytest.approx(other["depth_actual"], abs=1e-9)
            ids = shown.ids[other["needle_token_start"] : other["needle_token_end"]]
            pieces = prepare(SMALL).subject.tokenizer
            assert pieces.decode(ids).strip() == other["needle"]


@pytest.mark.parametrize(
    "change", [{}, {"needles": 1, "mode": "packed"}, {"needles": 1, "distractors": 4}]
)
def test_forcing_claims_no_copies(monkeypatch, change):
    """Among values some always rank first; a wrong key counts only what would be written."""
    from llamatool.needle.run import Runner

    options = replace(SMALL, lengths=(1024,), **change)
    for scoring in ("forced", "both"):
        report = prepare(replace(options, scoring=scoring)).run()
        assert (report.controls["wrong_key"].hits, report.controls["wrong_key"].trials) == (0, 2)
    asked, copied = Runner._predict, []

    def predict(self, question, cache):
        copied[:] = [value for value, _ in question.others[-1:]]
        return asked(self, question, cache)

    monkeypatch.setattr(Runner, "_predict", predict)
    monkeypatch.setattr(Runner, "_write", lambda self, row, cache: f" {copied[0]}.")
    report = prepare(options).run()
    assert report.controls["wrong_key"].hits == 2
    assert report.overall.hits == report.overall.trials  # which are forced


def test_summary_gains_one_key_and_loses_none(tmp_path):
    report = prepare(replace(SMALL, out=tmp_path)).run()
    one = summary(prepare(replace(SMALL, needles=1)).run())
    content = summary(report)
    assert list(content) == [*one, "needles"]
    assert list(content["cells"][0]) == list(one["cells"][0])
    assert content["needles"]["per_prompt"] == 3
    first = content["needles"]["by_length"][0]
    assert list(first) == ["length", "recall", "all_right"]
    assert first["recall"] == {
        "trials": 18, "hits": 18, "interval": [round(end, 4) for end in wilson(18, 18)],
    }  # fmt: skip
    assert first["all_right"]["trials"] == 6
    assert json.loads((tmp_path / "summary.json").read_bytes()) == content


def test_that_answers_depend_on_each_other_is_said():
    def said(options: Options) -> bool:
        return any("not independent" in note for note in prepare(options).notes())

    assert said(SMALL)
    assert not said(replace(SMALL, needles=1))
    assert not said(replace(SMALL, depths=(0.5,)))


def test_one_needle_leaves_the_recipe_as_it_was():
    """Results of before there was a choice go on: no word of it in recipe, key and rows."""
    assert "needles" not in prepare(replace(SMALL, needles=1)).recipe
    several = prepare(SMALL)
    assert several.recipe["needles"] == 3
    without = {name: value for name, value in several.recipe.items() if name != "needles"}
    assert sha256_of(without) == prepare(replace(SMALL, needles=1)).config_sha256
    assert several.config_sha256 != sha256_of(without)


def test_a_run_that_was_cut_anywhere_ends_as_a_whole_one(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = replace(SMALL, straddle=True, lengths=(700,))
    prepare(replace(options, out=whole)).run()
    lines = (whole / RESULTS).read_bytes().splitlines(keepends=True)
    for keep in (1, len(lines) // 2, len(lines) - 1):
        cut.mkdir(exist_ok=True)
        (cut / RESULTS).write_bytes(b"".join(lines[:keep]) + lines[min(keep, len(lines) - 1)][:50])
        prepare(replace(options, out=cut)).run()
        assert without_timings(cut) == without_timings(whole)
        by_key = {row["key"]: row for row in map(json.loads, lines)}
        for _, row in read_rows(cut / RESULTS):
            for name in ("forced", "hit", "prompt_sha256"):
                assert row[name] == by_key[row["key"]][name]
            assert row.get("other_needles") == by_key[row["key"]].get("other_needles")


def test_runs_with_one_and_with_several_share_a_folder_and_can_be_compared(tmp_path):
    prepare(replace(SMALL, out=tmp_path / "one", needles=1)).run()
    prepare(replace(SMALL, out=tmp_path / "many")).run()
    found = compare(load_trials(tmp_path / "one"), load_trials(tmp_path / "many"))
    assert found.pooled.both == 12
    assert found.num_unpaired == 0
    again = prepare(replace(SMALL, out=tmp_path / "many", needles=1)).run()
    assert again.compute.prefill_tokens > 0
    back = prepare(replace(SMALL, out=tmp_path / "many")).run()
    assert back.compute.prefill_tokens == 0
    assert [c.trials for c in back.recall] == [18, 18]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "packed"}, "packed has a needle at every depth already"),
        ({"mode": "sweep"}, "sweep has a needle at every depth already"),
        (
            {"needle": "Miso lives.", "question": "Who?", "answer": "Miso"},
            "needs {key} and {value}",
        ),
        (
            {"needle": "{key} is here.", "question": "Is {key}?", "answer": "here"},
            "needs {key} and {value}",
        ),
        (
            {"needle": "{key} is {value}.", "question": "What is {key}?", "answer": "gold"},
            "needs {value} in --answer",
        ),
        ({"needles": 65}, "at most 64"),
        ({"needles": 60, "keys": "cities", "lengths": (4096,)}, "keys"),
        ({"needles": 40}, "the smallest length that works is"),
    ],
)
def test_contradictions_are_usage_errors(change, message):
    with pytest.raises(UsageError) as error:
        prepare(replace(SMALL, **{"scoring": "both", **change}))
    assert message in str(error.value)


def test_own_needles_with_key_and_value():
    own = {
        "needle": "The door code of {key} is {value}.",
        "question": "What is the door code of {key}?",
        "answer_prefix": "The door code of {key} is",
    }
    test = prepare(replace(SMALL, **own))
    job = test.experiment.build(test.outlines[0], test.subject.chunk)
    for question in job.questions:
        if question.also:
            check_layout(test.experiment, job, question)


def test_large_models_are_asked_in_single_mode(tiny_models):
    source = str(tiny_models["dense"])
    assert prepare(Options(source=source, lengths=(16384,))).design.mode == "packed"
    assert prepare(Options(source=source, lengths=(16384,), needles=2)).design.mode == "single"


# The report.


def several(misses: int, lengths=(2048, 4096)):
    """Of four needles in each prompt; `misses` prompts of each length lack one of the others."""
    found = []
    for length in lengths:
        for number in range(6):
            others = tuple(
                trial(length, 0.2 * place, number, not (place == 2 and number < misses),
                      OTHER_NEEDLE, key=f"key {place}", gold=str(100_000 + place))
                for place in (1, 2, 3)
            )  # fmt: skip
            found.append(trial(length, 0.5, number, number != 5, others=others))
    return make_report(
        "model-x", Design(lengths, (0.5,), 6, needles=4), found,
        texts=dict.fromkeys(lengths, 6), compute=Compute(1, 2, 1.0),
    )  # fmt: skip


def test_recall_counts_needles_and_all_right_counts_prompts():
    report = several(misses=2)
    assert [(c.hits, c.trials) for c in report.by_length] == [(5, 6), (5, 6)]
    assert [(c.hits, c.trials) for c in report.recall] == [(21, 24), (21, 24)]
    assert [(c.hits, c.trials) for c in report.all_right] == [(3, 6), (3, 6)]
    assert report.recall[0].interval == wilson(21, 24)
    assert summary(report)["by_length"][0]["hits"] == 5
    missed = [t for t in report.misses if t.kind == OTHER_NEEDLE]
    assert [(t.length, t.depth, t.key) for t in missed] == [
        (length, 0.4, "key 2") for length in (2048, 4096) for _ in range(2)
    ]


def test_the_report_shows_both():
    report = several(misses=2)
    text = to_text(report)
    assert "model-x, single, 4 needles: hits of 6 trials" in text
    row = next(line for line in text.splitlines() if "21/24" in line)
    assert row.split() == [
        "2k", "21/24", "87.5%", "69.0%", "to", "95.7%", "3/6", "50.0%", "18.8%", "to", "81.2%",
    ]  # fmt: skip
    assert "other needle" in text
    block = plain(report_blocks(report, None)[1:2])
    assert max(len(line) for line in block.splitlines()) <= 80
    html = to_html(report, "cividis")
    assert "All 4 needles of each prompt" in html
    assert "<td>2k</td><td>21</td><td>24</td><td>87.5%</td><td>69.0% to 95.7%</td>" in html
    assert "<td>2k</td><td>3</td><td>6</td><td>50.0%</td><td>18.8% to 81.2%</td>" in html
    assert ", 3 of 4 needles, " in html
    rows = list(csv.DictReader(io.StringIO(to_csv(report))))
    assert [(r["needles"], r["found"], r["all_right"]) for r in rows] == [("24", "21", "3")] * 2


def test_the_report_stays_small_when_everything_is_missed():
    """64 needles in each of 660 prompts, and none is found."""
    found = []
    for length in (1024 << i for i in range(10)):
        for depth in ELEVEN:
            others = (trial(length, depth, 0, False, OTHER_NEEDLE),) * 63
            found += [trial(length, depth, n, False, others=others) for n in range(6)]
    lengths = tuple(1024 << i for i in range(10))
    report = make_report(
        "model-x", Design(lengths, ELEVEN, 6, needles=64), found,
        texts=dict.fromkeys(lengths, 6), compute=Compute(1, 2, 1.0),
    )  # fmt: skip
    html = to_html(report, "cividis")
    assert "41,540 more in results.jsonl" in html
    assert len(html.encode()) <= 400_000
    assert len(to_text(report)) < 10_000


def test_with_one_needle_nothing_more_is_shown():
    found = [trial(2048, 0.5, number, True) for number in range(6)]
    report = make_report(
        "model-x", Design((2048,), (0.5,), 6), found, texts={2048: 6}, compute=Compute(1, 2, 1.0)
    )
    assert report.recall == report.all_right == ()
    assert "needles" not in summary(report)
    assert "of each prompt" not in to_text(report) + to_html(report, "cividis")
    assert "all_right" not in to_csv(report)


def test_the_shell_sees_it(tmp_path):
    quick = ("--length", "512", "--depths", "3", "--trials", "1", "--score", "forced")
    one_thread = {"OMP_NUM_THREADS": "1"}
    found = run("needle", "pocket", *quick, "--needles", "4", "--plan", "--json", env=one_thread)
    planned = json.loads(found.out)
    assert planned["needles"] == 4
    assert planned["prompts"] == 3 * 4 + 2 + 4 + 1
    done = run("needle", "pocket", *quick, "--needles", "4", "--json", env=one_thread)
    assert done.code == 0, done.err
    content = json.loads(done.out)
    assert content["needles"]["by_length"][0]["recall"]["trials"] == 12
    assert content["compute"]["prefill_tokens"] == planned["prefill_tokens"]
    assert content["compute"]["naive_prefill_tokens"] == planned["naive_prefill_tokens"]
    packed = run("needle", "--mode", "packed", *quick, "--needles", "2", env=one_thread)
    assert packed.code == 2
    assert "has a needle at every depth already" in packed.err
    assert run("needle", "--needles", "65", env=one_thread).code == 2
