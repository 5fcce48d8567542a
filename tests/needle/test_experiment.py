"""Prompts: exact to the token, needles between sentences, at their depth, with one BOS."""

import random
from collections.abc import Callable
from itertools import islice

import pytest

from llamatool.errors import InputError, UsageError
from llamatool.needle.experiment import Design, Experiment, Job, Question
from llamatool.needle.grammar import WORDINGS, Wording, sentences
from llamatool.needle.haystack import DocumentHaystack, Encoder
from llamatool.needle.subject import Frame
from llamatool.tokenizers.base import Tokenizer
from tests.needle.conftest import TOKENIZERS, experiment, raw_frame

ELEVEN = tuple(i / 10 for i in range(11))
CHAT = Frame((1, 2, 3), (4, 5), True, "chat")
NUM_TRIPLES = 10_000


def own_wording(needle: str, question: str, answer: str) -> Wording:
    return Wording(needle, question, "\nAnswer:", "", " " + answer)


def jobs(made: Experiment, chunk: int | None = None) -> list[Job]:
    return [made.build(outline, chunk) for outline in made.outlines(chunk)]


def check(made: Experiment, job: Job, question: Question, bos: int | None) -> float:
    """Checks one prompt; the distance of its needle from the target, in tokens."""
    prompt, cell, sizes = made.prompt(job, question), question.cell, made.sizes
    assert len(prompt) + sizes.budget == cell.length
    assert prompt[len(prompt) - sizes.tail :] == question.needle.tail
    if bos is not None:
        assert prompt.count(bos) == 1
        assert prompt[0] == bos
    if question.start is None:
        return 0.0
    needle = prompt[question.start : question.start + sizes.needle]
    if cell.kind != "wrong_key":
        assert needle == question.needle.ids
    assert starts_a_sentence(made, prompt, question.start)
    assert starts_a_sentence(made, prompt, question.start + sizes.needle)
    return abs(question.start - made.target(cell.length, cell.depth))


def starts_a_sentence(made: Experiment, prompt: tuple[int, ...], place: int) -> bool:
    """Whether the token before `place` ends a sentence (or is the template's, or BOS)."""
    if place <= len(made.frame.before):
        return True
    token_bytes = made.encoder.tokenizer.token_bytes
    before = b"".join(token_bytes(token) for token in prompt[max(0, place - 3) : place])
    return before.rstrip(b"\n").endswith((b".", "。".encode()))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ten_thousand_prompts_are_exact(tokenizer_of: Callable[[str], Tokenizer], name: str):
    """Random lengths, depths and trials: length exact, no needle in a sentence, depth met."""
    tokenizer = tokenizer_of(name)
    draw = random.Random(f"lengths {name}")
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    num_triples, worst = 0, 0.0
    # Sentences that are encoded once; test_all_modes_are_exact has fresh ones.
    text = " ".join(islice(sentences("en", 7), 4_000))
    haystack = DocumentHaystack(Encoder(tokenizer), "en", "sentences", text, repeats=False)
    design = Design((4096,), (0.5,))
    base = Experiment(design, haystack.encoder, raw_frame(tokenizer), haystack)
    smallest = max(128, base.sizes.smallest_length())
    while num_triples < NUM_TRIPLES:
        length = int(smallest * (1200 / smallest) ** draw.random())
        depths = tuple(sorted({round(draw.random(), 3) for _ in range(40)} | {0.0, 1.0}))
        design = Design((length,), depths, 1, seed=draw.randrange(10**6), controls=False)
        made = Experiment(design, base.encoder, base.frame, haystack)
        for outline in made.outlines():
            job = made.build(outline)
            for question in job.questions:
                worst = max(worst, check(made, job, question, bos))
                num_triples += 1
    assert worst <= 12


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("mode", ["single", "packed", "sweep"])
def test_all_modes_are_exact(tokenizer_of, name, mode):
    tokenizer = tokenizer_of(name)
    design = Design((512, 1024, 1500, 4096), ELEVEN, 2, mode=mode)
    made = experiment(tokenizer, design)
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    kinds = set()
    for job in jobs(made):
        for question in job.questions:
            kinds.add(question.cell.kind)
            if question.cell.kind == "alone":
                continue
            distance = check(made, job, question, bos)
            group = made.trials_per_text(design.lengths)
            if question.cell.kind == "needle" and mode == "single":
                assert distance <= 12
            elif question.cell.kind == "needle":
                # Needles side by side and those of other lengths push each other aside.
                assert distance <= 12 + 3 * group * made.sizes.needle
    assert kinds == {"needle", "no_needle", "wrong_key", "short", "alone"}


def test_every_cell_is_asked_once(pocket_tokenizer):
    for mode in ("single", "packed", "sweep"):
        made = experiment(pocket_tokenizer, Design((256, 1024), ELEVEN, 3, mode=mode))
        asked = [q.cell for job in jobs(made) for q in job.questions]
        assert len(set(asked)) == len(asked)
        grid = {(c.length, c.depth, c.trial) for c in asked if c.kind == "needle"}
        assert grid == {(n, d, t) for n in (256, 1024) for d in ELEVEN for t in range(3)}
        assert asked == [c for job in jobs(made) for c in (q.cell for q in job.questions)]


def test_outlines_foretell_the_cells(pocket_tokenizer):
    for mode in ("single", "packed", "sweep"):
        made = experiment(pocket_tokenizer, Design((512, 2048), (0.0, 0.5, 1.0), 2, mode=mode))
        for outline in made.outlines():
            built = {question.cell for question in made.build(outline).questions}
            assert built == set(outline.cells)


def test_a_chat_template_stands_around_the_text(pocket_tokenizer):
    made = experiment(pocket_tokenizer, Design((400,), (0.0, 1.0), 1), CHAT)
    job = jobs(made)[0]
    prompt = made.prompt(job, job.questions[0])
    assert prompt[:3] == (1, 2, 3)
    text = pocket_tokenizer.decode(job.questions[0].needle.tail)
    assert "Answer:" not in text
    assert text.rstrip().endswith("is")
    tail = job.questions[0].needle.tail
    at = next(i for i in range(len(tail)) if tail[i : i + 2] == (4, 5))
    assert pocket_tokenizer.decode(tail[at + 2 :]).startswith("The magic number for")


def test_depth_means_the_same_in_every_mode(pocket_tokenizer):
    made = experiment(pocket_tokenizer, Design((2048,), (0.0, 0.5, 1.0), 1))
    first, last = made.sizes.before, made.body_end(2048)
    assert made.target(2048, 0.0) == first
    assert made.target(2048, 1.0) == last - made.sizes.needle
    assert made.depth_of(first, 2048) == 0.0
    assert made.depth_of(last - made.sizes.needle, 2048) == 1.0


def test_trials_differ_and_lengths_share_their_needles(pocket_tokenizer):
    made = experiment(pocket_tokenizer, Design((512, 1024), (0.5,), 4, controls=False))
    needles = {}
    for job in jobs(made):
        for question in job.questions:
            needles[question.cell.length, question.cell.trial] = question.needle.text
    assert len({text for (length, _), text in needles.items() if length == 512}) == 4
    for trial in range(4):
        assert needles[512, trial] == needles[1024, trial]
    texts = {job.ids for job in jobs(made)}
    assert len(texts) == 8


def test_a_seed_changes_everything(pocket_tokenizer):
    prompts = set()
    for seed in (0, 1, 2):
        made = experiment(pocket_tokenizer, Design((512,), (0.5,), 1, seed=seed, controls=False))
        (job,) = jobs(made)
        prompts.add(made.prompt(job, job.questions[0]))
    assert len(prompts) == 3


def test_prompts_of_a_trial_differ_in_their_slots_only(pocket_tokenizer):
    made = experiment(pocket_tokenizer, Design((1024,), (0.2, 0.8), 1, controls=False))
    (job,) = jobs(made)
    first, second = (made.prompt(job, question) for question in job.questions)
    starts = [question.start for question in job.questions]
    size = made.sizes.needle
    differing = {i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b}
    assert differing <= {i for start in starts for i in range(start, start + size)}


def test_keys_and_values_are_never_shared(pocket_tokenizer):
    design = Design((4096,), ELEVEN, 6, mode="packed")
    made = experiment(pocket_tokenizer, design)
    for job in jobs(made):
        needles = {q.needle for q in job.questions if q.cell.kind == "needle"}
        for trial in range(6):
            asked = [q.needle for q in job.questions if q.cell.trial == trial]
            keys = [needle.key for needle in asked if needle in needles]
            values = [needle.value for needle in asked if needle in needles]
            assert len(set(keys)) == len(keys)
            assert not any(a in b for a in values for b in values if a != b)
        for question in job.questions:
            if question.cell.kind == "wrong_key":
                assert question.needle.key not in {needle.key for needle in needles}


def test_distractors_stand_in_every_prompt(pocket_tokenizer):
    made = experiment(pocket_tokenizer, Design((2048,), (0.0, 0.5, 1.0), 1, distractors=8))
    job = jobs(made)[0]
    text = pocket_tokenizer.decode(made.prompt(job, job.questions[0]))
    assert text.count("The magic number for") == 8 + 1 + 1  # with the answer prefix
    assert len(job.questions[0].others) == 8
    for value, key in job.questions[0].others:
        assert f"for {key} is {value}." in text


def test_borders_are_straddled_exactly(pocket_tokenizer):
    """Needles across a border exist, are marked, and the rest is where it should be."""
    made = experiment(pocket_tokenizer, Design((1024,), ELEVEN, 2, straddle=True))
    straddles = [
        (job, question)
        for job in jobs(made, 64)
        for question in job.questions
        if question.cell.kind == "straddle"
    ]
    assert len(straddles) == 2 * 11
    for job, question in straddles:
        check(made, job, question, pocket_tokenizer.bos_id)
        assert question.start // 64 != (question.start + made.sizes.needle - 1) // 64
    with pytest.raises(UsageError, match="chunked layers"):
        made.outlines(None)


def test_shortest_length_is_named(pocket_tokenizer):
    with pytest.raises(UsageError, match="tokens do not hold") as error:
        experiment(pocket_tokenizer, Design((40,), (0.5,)))
    smallest = int(error.value.hint.rsplit(" ", 1)[1])
    made = experiment(pocket_tokenizer, Design((smallest,), ELEVEN, 1))
    for job in jobs(made):
        for question in job.questions:
            if question.cell.kind != "alone":
                check(made, job, question, pocket_tokenizer.bos_id)


def test_own_needle(pocket_tokenizer):
    wording = own_wording("The office cat is called Miso.", "What is the cat called?", "Miso")
    design = Design((600,), (0.0, 1.0), 2, wording=wording, use_prefix=False)
    made = experiment(pocket_tokenizer, design)
    for job in jobs(made):
        for question in job.questions:
            if question.cell.kind == "alone":
                continue
            prompt = made.prompt(job, question)
            assert len(prompt) + made.sizes.budget == question.cell.length
            text = pocket_tokenizer.decode(prompt)
            assert text.count("Miso") == (0 if question.cell.kind == "no_needle" else 1)
    with pytest.raises(UsageError, match=r"needs \{key\}"):
        experiment(pocket_tokenizer, Design((600,), (0.5,), mode="packed", wording=wording))


def test_a_needle_that_is_already_in_the_documents_is_refused(pocket_tokenizer):
    encoder = Encoder(pocket_tokenizer)
    text = "The cat Miso sleeps. The dog barks all day long. " * 200
    haystack = DocumentHaystack(encoder, "en", "book", text, repeats=False)
    wording = own_wording("The office cat is called Miso.", "What is the cat called?", "Miso")
    design = Design((600,), (0.5,), wording=wording, use_prefix=False)
    with pytest.raises(InputError, match="already stands in the haystack"):
        Experiment(design, encoder, raw_frame(pocket_tokenizer), haystack)
    with pytest.raises(UsageError, match="does not stand in the needle"):
        experiment(
            pocket_tokenizer,
            Design((600,), (0.5,), wording=own_wording("A cat.", "Which?", "Miso")),
        )


def test_keys_and_values_of_documents_are_avoided(pocket_tokenizer):
    plain = experiment(pocket_tokenizer, Design((600,), (0.5,), 1, controls=False))
    (job,) = jobs(plain)
    used = job.questions[0].needle
    encoder = Encoder(pocket_tokenizer)
    text = f"Long ago {used.key} was here. Then {used.value} people came to the house. " * 100
    haystack = DocumentHaystack(encoder, "en", "book", text, repeats=False)
    made = Experiment(plain.design, encoder, plain.frame, haystack)
    (job,) = jobs(made)
    assert job.questions[0].needle.key != used.key
    assert job.questions[0].needle.value != used.value


def test_documents_that_are_too_short_are_named_before_anything_runs(pocket_tokenizer):
    encoder = Encoder(pocket_tokenizer)
    haystack = DocumentHaystack(encoder, "en", "book", "One. Two. Three.", repeats=False)
    with pytest.raises(InputError, match="tokens too short for 1k") as error:
        Experiment(Design((1024,), (0.5,)), encoder, raw_frame(pocket_tokenizer), haystack)
    assert "--repeat" in error.value.hint


@pytest.mark.parametrize("name", ["llama3", "sentencepiece", "pocket"])
def test_documents_are_exact_too(tokenizer_of, name):
    tokenizer = tokenizer_of(name)
    encoder = Encoder(tokenizer)
    text = "".join(
        f"## Rule {i}\n\nEverybody comes at {i % 12} o'clock, and goes. Keys: ask room {i}.\n\n"
        for i in range(300)
    )
    haystack = DocumentHaystack(encoder, "en", "book", text, repeats=False)
    made = Experiment(Design((1500, 3001), ELEVEN, 2), encoder, raw_frame(tokenizer), haystack)
    for job in jobs(made):
        for question in job.questions:
            if question.cell.kind != "alone":
                prompt = made.prompt(job, question)
                assert len(prompt) + made.sizes.budget == question.cell.length
                if question.cell.kind == "needle":
                    assert (
                        abs(question.start - made.target(question.cell.length, question.cell.depth))
                        <= 12
                    )


def test_template_text_is_not_edited(pocket_tokenizer):
    """Braces that are no placeholders stay as they are."""
    wording = Wording(
        "The {magic} number are {value} for {key}.", "Which {number} are for {key}?", "\nA:",
        " It are", " {value}",
    )  # fmt: skip
    made = experiment(pocket_tokenizer, Design((600,), (0.5,), 1, wording=wording))
    needle = jobs(made)[0].questions[0].needle
    assert needle.text == f"The {{magic}} number are {needle.value} for {needle.key}."


@pytest.mark.parametrize("language", ["en", "zh"])
def test_both_languages(pocket_tokenizer, language):
    design = Design((512,), ELEVEN, 1, language=language, wording=WORDINGS[language])
    made = experiment(pocket_tokenizer, design)
    for job in jobs(made):
        for question in job.questions:
            if question.cell.kind not in ("alone", "wrong_key"):
                assert check(made, job, question, pocket_tokenizer.bos_id) <= 12
