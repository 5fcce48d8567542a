import random

import pytest

from llamatool.needle.run import first_statement
from llamatool.needle.score import score_answer, spent_in_thinking

OTHERS = {"551204": "silver otter", "907731": "jade comet"}


@pytest.mark.parametrize(
    "answer",
    [
        " 482913.", "482913", " 482913\n", "The magic number is 482913.", "It is **482913**.",
        "４８２９１３。", "482913。", "Answer: 482913, as the text says.", "482913 482913",
        "<think>551204? no, it is the other</think>482913", "“482913”", "(482913)",
    ],
)  # fmt: skip
def test_right_answers(answer):
    score = score_answer(answer, "482913", others=OTHERS)
    assert (score.exact, score.verdict) == (True, "correct")


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("551204", "distractor"),
        ("551204, 482913", "distractor"),
        ("482913 or 551204", "other"),
        ("482914", "other"),
        ("", "none"),
        ("I like boats.", "none"),
        (" not given in the text.", "refusal"),
        ("The text does not say.", "refusal"),
        ("I'm sorry, I cannot find it", "refusal"),
        ("未知的，文中没有提到。", "refusal"),
        ("not 482913", "other"),
        ("482913 is wrong", "other"),
        ("<think>482913", "none"),
    ],
)
def test_verdicts(answer, verdict):
    score = score_answer(answer, "482913", others=OTHERS)
    assert not score.exact
    assert score.verdict == verdict


def test_a_distractor_is_named():
    assert score_answer("551204.", "482913", others=OTHERS).distractor == "silver otter"


def test_contains_is_kept_apart():
    score = score_answer("551204 and 482913", "482913", others=OTHERS)
    assert score.contains
    assert not score.exact


def wide(text: str) -> str:
    return "".join(chr(ord(c) + 0xFEE0) if c.isdigit() else c for c in text)


def adversarial(draw: random.Random) -> tuple[str, str]:
    """(answer, value) where the value is somehow in the answer, and the answer is not right."""
    value = str(draw.randrange(100_000, 1_000_000))
    other = str(draw.randrange(100_000, 1_000_000))
    while other == value:
        other = str(draw.randrange(100_000, 1_000_000))
    third, digit = str(draw.randrange(100_000, 1_000_000)), str(draw.randrange(1, 10))
    longer = [
        f"{digit}{value}", f"{value}{digit}", f"{digit}{value}{digit}", f"{value}000",
        f"{digit},{value}", f"{value},{other}", f"{value}.{digit}", f"{digit}.{value}",
        f"{value}e{digit}", f"x{value}", f"{value}x", f"-{value}", f"{value}-{digit}",
        f"0{value}", f"{value}/{digit}", f"{value}%", f"{digit}'{value}",
    ]  # fmt: skip
    lists = [
        f"{value}, {other}", f"{value} or {other}", f"{value}\n{other}\n{third}",
        f"1. {value} 2. {other}", f"{other}, {value}, {third}", f"{value}; {other}; {third}",
        f"{value} / {other}", f"({value}|{other})", f"[{value}, {other}]", f"{value} {digit}",
        f"either {value} or {other}", f"{other}? {value}?",
    ]  # fmt: skip
    denials = [
        f"not {value}", f"It is not {value}.", f"The number isn't {value}.", f"no, {value}? no",
        f"never {value}", f"anything but {value}", f"It can't be {value}", f"{value} is wrong",
        f"{value} is not the number", f"{value} belongs to another key", f"{value}? I doubt it",
        f"other than {value}", f"不是{value}", f"{value}不对", f"neither {value} nor another",
        f"less than {value}", f"about {value}", f"{value} is incorrect", f"{value}, or not",
        f"The text doesn't say {value}.", f"If it were {value}, I would know.",
    ]  # fmt: skip
    answer = draw.choice(draw.choice((longer, lists, denials)))
    if draw.random() < 0.25:
        answer = wide(answer)
    if draw.random() < 0.3:
        answer = f"The magic number for amber falcon is {answer}"
    return answer, value


def test_no_false_positive_in_a_thousand_adversarial_answers():
    draw = random.Random(11)
    wrong = [adversarial(draw) for _ in range(1_000)]
    assert len(set(wrong)) > 900
    taken = [(answer, value) for answer, value in wrong if score_answer(answer, value).exact]
    assert taken == []


@pytest.mark.parametrize(
    ("answer", "exact"),
    [
        ("Miso", True), (" Miso.", True), ("“Miso”, of course", True), ("miso", True),
        ("Misou", False), ("not Miso", False), ("Mia", False), ("Miso or Mia", False),
        ("Miso is wrong", False), ("Miso-Maki", False),
    ],
)  # fmt: skip
def test_words(answer, exact):
    assert score_answer(answer, "Miso", others={"Mia": "dog"}).exact is exact


def test_phrases_and_uuids():
    assert score_answer(" 30 days after the end.", "30 days").exact
    uuid = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"
    assert score_answer(f" {uuid}.", uuid).exact
    assert not score_answer(f" {uuid}0", uuid).exact


def test_thinking_that_never_ends():
    assert spent_in_thinking("<think>let me see")
    assert not spent_in_thinking("<think>hm</think>482913")


def test_what_a_base_model_writes_on_is_no_part_of_the_answer():
    assert first_statement(" 482913. The farmer is not here") == "482913."
    assert first_statement(" 482913\n\nQuestion: 551204") == "482913"
    assert first_statement(" 3.5 h") == "3.5 h"
