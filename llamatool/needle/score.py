"""Is an answer right? Strict: a value among others, denied, or part of a longer number is not."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Literal

from llamatool.records import record

Verdict = Literal["correct", "distractor", "other", "none", "refusal"]


@record
class Score:
    """What an answer is."""

    exact: bool  # the headline
    contains: bool  # the value stands somewhere in it; never used for a headline
    verdict: Verdict
    found: str | None = None  # the value that was taken for the answer
    distractor: str | None = None  # the key of the needle whose value was given


def score_answer(answer: str, value: str, *, others: Mapping[str, str] | None = None) -> Score:
    """The score of what a model wrote behind the answer prefix.

    A value of digits is right if it is the first number of the answer, stands by itself, is not
    denied, and no second number follows. A value of words is right if the answer begins with it.

    Args: others: values of other needles and their keys.
    Example: `482913.` is right for 482913; `1482913`, `not 482913` and `482913 or 551204` are not.
    """
    text = _normal(_after_thinking(answer))
    value = _normal(value)
    others = {_normal(other): key for other, key in (others or {}).items()}
    contains = value in text
    if value.isdecimal():
        return _score_number(text, value, others, contains)
    return _score_words(text, value, others, contains)


def _score_number(text: str, value: str, others: Mapping[str, str], contains: bool) -> Score:
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return Score(False, contains, "refusal" if _REFUSAL.search(text) else "none")
    first = numbers[0]
    found = first[0]
    alone = len({number[0] for number in numbers}) == 1
    if found == value and alone and not _is_denied(text, first):
        return Score(True, True, "correct", found)
    if found in others and found != value:
        return Score(False, contains, "distractor", found, others[found])
    return Score(False, contains, "other", found)


def _score_words(text: str, value: str, others: Mapping[str, str], contains: bool) -> Score:
    said = text.strip(_QUOTES).casefold()
    for candidate in (value, *sorted(others, key=len, reverse=True)):
        wanted = candidate.casefold()
        if not said.startswith(wanted) or _WORD.match(said[len(wanted) : len(wanted) + 1]):
            continue
        rest = said[len(wanted) :]
        if candidate != value:
            return Score(False, contains, "distractor", candidate, others[candidate])
        if any(_holds(rest, other) for other in others if other != value):
            return Score(False, contains, "other", candidate)
        if _DENIAL_BEHIND.search(_sentence(rest)) or _DASHED.match(rest):
            return Score(False, contains, "other", candidate)
        return Score(True, True, "correct", candidate)
    if _REFUSAL.search(text):
        return Score(False, contains, "refusal")
    return Score(False, contains, "other" if said else "none")


def _is_denied(text: str, number: "re.Match[str]") -> bool:
    """Whether the number is denied, or is a part of something longer."""
    before, behind = text[: number.start()], text[number.end() :]
    return bool(
        _PART_BEFORE.search(before)
        or _PART_BEHIND.match(behind)
        or _DENIAL_BEFORE.search(before)
        or _DENIAL_BEHIND.search(behind)
    )


def _after_thinking(answer: str) -> str:
    """What follows a thinking block; nothing if it never ended."""
    for start, end in _THINKING:
        if end in answer:
            return answer.rpartition(end)[2]
        if start in answer:
            return answer.partition(start)[0]
    return answer


def spent_in_thinking(answer: str) -> bool:
    """Whether the answer ended inside its thinking block."""
    return any(start in answer and end not in answer for start, end in _THINKING)


def _holds(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words.casefold())}(?!\w)", text) is not None


def _sentence(text: str) -> str:
    return re.split(r"[.!?\n。！？]", text, maxsplit=1)[0]


def _normal(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


_THINKING: Sequence[tuple[str, str]] = (
    ("<think>", "</think>"),
    ("<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>"),
)
# Digits of any script count as one number: a strange one must not be overlooked.
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"\w")
_QUOTES = " \t\r\n\"'`*_\u201c\u201d\u2018\u2019「」『』:："
# A sign, a letter, or a separator with a digit before it: the number is longer than its digits.
_PART_BEFORE = re.compile(r"(?:[^\W\d]|[-+_#/\\~<>=≠≈^]|\d[\s.,':]{1,2})$")
_PART_BEHIND = re.compile(r"(?:[^\W\d]|[-_/\\%^+=~]|[.,':*]\d|\s?[°²³])")
_DENIAL_BEFORE = re.compile(
    r"\b(?:not|no|never|isn't|isnt|wasn't|cannot|can't|don't|doesn't|neither|nor|none|without"
    r"|except|excluding|but for|instead of|rather than|other than|unlike|anything but|false"
    r"|wrong|incorrect|unknown|maybe|perhaps|either|between|above|below|over|under|than|about"
    r"|approximately|less|more|if)\b|n[’']t\b|不|没|非|错|除了|无法|未|可能|大约|也许",
    re.IGNORECASE,
)
_DENIAL_BEHIND = re.compile(
    r"\b(?:not|no|never|isn't|isnt|wasn't|wrong|incorrect|false|neither|nor|invalid|doesn't|don't"
    r"|cannot|can't|untrue|mistaken|outdated|belongs to|or|minus|plus|times|thousand|million"
    r"|hundred|digits?)\b|n[’']t\b|不|没|错|非|或|[?？]",
    re.IGNORECASE,
)
_DASHED = re.compile(r"[-_/\\]\w")
_REFUSAL = re.compile(
    r"\bnot (?:given|mentioned|stated|specified|provided|found|say|know|in the)\b|\bunknown\b"
    r"|(?:does not|doesn't|do not|don't|cannot|can't|could not|unable to) "
    r"(?:\w+ )?(?:say|mention|contain|give|know|provide|find|answer|determine|specify|state)"
    r"|\bno (?:such|information|mention|number|magic)\b|\bsorry\b"
    r"|没有(?:提|说|给|找)|未(?:知|提及|给出)|无法|不知道",
    re.IGNORECASE,
)
