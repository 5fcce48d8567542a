"""Forked, packed and swept prompts against fresh ones, on local and other models."""

import pytest

from llamatool.needle.experiment import Design, Experiment
from llamatool.needle.haystack import Encoder, GrammarHaystack
from llamatool.needle.plan import plan
from llamatool.needle.run import Outcome, Runner, few_threads, load_decoder
from llamatool.needle.subject import open_subject

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("one_thread")

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def runner_of(folder, design: Design, **options) -> Runner:
    subject = open_subject(str(folder))
    encoder = Encoder(subject.tokenizer)
    experiment = Experiment(
        design, encoder, subject.frame, GrammarHaystack(encoder, design.language)
    )
    decoder = load_decoder(subject, max(design.lengths), device="cpu", dtype="float32")
    return Runner(decoder, subject, experiment, **{"scoring": "forced", **options})


def outcomes(runner: Runner) -> list[tuple[object, Outcome]]:
    chunk = runner.subject.chunk
    found = []
    for outline in runner.experiment.outlines(chunk):
        job = runner.experiment.build(outline, chunk)
        found += [(job, outcome) for outcome in runner.run(job)]
    return found


def fresh_logprob(runner: Runner, job, question) -> float:
    """The gold answer's log-probability with the whole prompt read at once."""
    prompt, gold = runner.experiment.prompt(job, question), question.needle.gold
    ids = torch.tensor([[*prompt, *gold[:-1]]])
    logits = runner.decoder(ids, logits_to_keep=len(gold))[0].log_softmax(-1)
    return float(sum(logits[i, token] for i, token in enumerate(gold)))


@pytest.mark.parametrize("mode", ["single", "packed", "sweep"])
@pytest.mark.parametrize("name", ["dense", "layered", "local"])
def test_every_way_gives_the_numbers_of_a_fresh_prompt(tiny_models, name, mode):
    design = Design((200, 413, 700), DEPTHS, 1, mode=mode, straddle=name != "dense")
    runner = runner_of(tiny_models[name], design, prefill_chunk=128)
    assert (runner.local_chunk == 64) is (name == "local")
    found = outcomes(runner)
    assert len(found) > 18
    for job, outcome in found:
        fresh = fresh_logprob(runner, job, outcome.question)
        assert outcome.forced.logprob == pytest.approx(fresh, rel=1e-6, abs=1e-5)


@pytest.mark.parametrize("mode", ["single", "packed", "sweep"])
@pytest.mark.parametrize("name", ["dense", "layered", "local"])
def test_the_plan_foretells_the_tokens(tiny_models, name, mode):
    design = Design((1024, 2048), DEPTHS, 2, mode=mode)
    runner = runner_of(tiny_models[name], design)
    outlines = runner.experiment.outlines(64)
    planned = plan(
        runner.experiment, outlines, runner.subject.layers, 128,
        chunk=runner.local_chunk, kv_dtype="float32",
    )  # fmt: skip
    found = outcomes(runner)
    assert planned.num_prompts == len(found)
    # Slots give way by some tokens where a gap cannot be filled.
    assert runner.prefill_tokens == pytest.approx(planned.prefill_tokens, rel=0.02)


def test_counted_tokens_of_eleven_depths(tiny_models):
    depths = tuple(i / 10 for i in range(11))
    lengths = (512, 1024, 2048)
    limits = {"single": 6.6 * sum(lengths), "packed": 1.05 * sum(lengths), "sweep": 1.05 * 2048}
    for mode, limit in limits.items():
        design = Design(lengths, depths, 1, mode=mode, controls=False)
        runner = runner_of(tiny_models["dense"], design)
        found = outcomes(runner)
        tails = len(found) * runner.experiment.sizes.tail
        assert runner.prefill_tokens - tails <= limit
        assert len(found) == 33


def test_a_local_grid_costs_about_one_text(tiny_models):
    depths = tuple(i / 10 for i in range(11))
    runner = runner_of(tiny_models["local"], Design((4096,), depths, 1, controls=False))
    tails = len(outcomes(runner)) * runner.experiment.sizes.tail
    assert runner.prefill_tokens - tails <= 4096 + 11 * 2 * 64


def test_pieces_of_any_size_give_the_same(tiny_models):
    scores = []
    for piece in (7, 64, 2048):
        runner = runner_of(tiny_models["layered"], Design((413,), DEPTHS, 1), prefill_chunk=piece)
        scores.append([outcome.forced.logprob for _, outcome in outcomes(runner)])
    for other in scores[1:]:
        assert other == pytest.approx(scores[0], rel=1e-6, abs=1e-5)


def test_rivals_are_ranked_by_their_own_log_probability(tiny_models):
    runner = runner_of(tiny_models["dense"], Design((413,), (0.5,), 1, controls=False))
    ((job, outcome),) = outcomes(runner)
    question = outcome.question
    rivals = runner._rivals(question)
    assert len(rivals) == 8
    prompt = runner.experiment.prompt(job, question)
    better = 0
    for ids in rivals.values():
        logits = runner.decoder(torch.tensor([[*prompt, *ids[:-1]]]), logits_to_keep=len(ids))[0]
        rows = logits.log_softmax(-1)
        better += float(sum(rows[i, t] for i, t in enumerate(ids))) > outcome.forced.logprob
    assert outcome.forced.rank == 1 + better


def test_skipping_questions_changes_no_number(tiny_models):
    """A resumed run answers some questions only, and must find what a whole run finds."""
    for name in ("dense", "local"):
        runner = runner_of(tiny_models[name], Design((413,), DEPTHS, 1))
        whole = {o.question.cell: o.forced.logprob for _, o in outcomes(runner)}
        outline = runner.experiment.outlines(64)[0]
        job = runner.experiment.build(outline, 64)
        some = list(runner.run(job, lambda question: question.cell.depth == 0.75))
        assert len(some) == 1
        assert some[0].forced.logprob == whole[some[0].question.cell]


def test_generation_is_greedy_decoding(tiny_models):
    runner = runner_of(
        tiny_models["dense"], Design((413,), (0.5,), 1, controls=False), scoring="generate"
    )
    ((job, outcome),) = outcomes(runner)
    ids = list(runner.experiment.prompt(job, outcome.question))
    start, text = len(ids), ""
    for _ in range(runner.experiment.design.max_new_tokens):
        token = int(runner.decoder(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)
        text = runner.subject.tokenizer.decode(ids[start:])
        if token in runner.subject.stop_ids or "\n" in text.lstrip("\n"):
            break
    assert outcome.generated == text
    assert outcome.forced is None


def test_memory_is_the_cache_of_the_longest_prompt(tiny_models):
    runner = runner_of(tiny_models["local"], Design((512, 2048), (0.5,), 1))
    outcomes(runner)
    assert runner.peak_kv_bytes <= runner.decoder.new_cache(2048).num_bytes


def test_threads_are_given_back(tiny_models, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    subject = open_subject(str(tiny_models["dense"]))
    torch.set_num_threads(2)
    with few_threads(subject):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_another_rope_factor_changes_the_rotation(tiny_models):
    subject = open_subject(str(tiny_models["dense"]))
    decoder = load_decoder(subject, 64, device="cpu", rope_factor=32.0)
    assert decoder.rope.rope.factor == 32.0
    assert decoder.rope.rope.type == "llama3"
