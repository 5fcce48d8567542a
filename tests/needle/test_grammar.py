import random
from itertools import islice

import pytest

from llamatool.errors import UsageError
from llamatool.needle.grammar import LANGUAGES, WORDINGS, KeySource, ValueSource, sentences


@pytest.mark.parametrize("language", LANGUAGES)
def test_sentences_never_repeat(language):
    found = list(islice(sentences(language, 3), 30_000))
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("language", LANGUAGES)
def test_sentences_hold_no_digit_and_end_once(language):
    for text in islice(sentences(language, 0), 3_000):
        assert not any(character.isdigit() for character in text)
        assert text[-1] in ".。"
        assert "." not in text[:-1]
        assert "。" not in text[:-1]


def test_a_seed_decides():
    first, again, other = (list(islice(sentences("en", seed), 50)) for seed in (4, 4, 5))
    assert first == again
    assert first != other


def test_small_patterns_run_out_and_the_others_go_on():
    # The smallest English pattern has 320 sentences.
    assert len(set(islice(sentences("en", 0), 60_000))) == 60_000


@pytest.mark.parametrize("kind", ["words", "names", "cities"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_keys_differ_and_none_is_within_another(kind, language):
    source = KeySource(kind, language, random.Random(1))
    keys = [source.next_key() for _ in range(25)]
    for i, key in enumerate(keys):
        assert not any(key in other for j, other in enumerate(keys) if i != j)


@pytest.mark.parametrize("kind", ["digits:6", "digits:2", "word", "uuid"])
def test_values_differ_and_none_is_within_another(kind):
    source = ValueSource(kind, random.Random(1))
    values = [source.next_value() for _ in range(40)]
    for i, value in enumerate(values):
        assert not any(value in other for j, other in enumerate(values) if i != j)


def test_values_have_the_digits_asked_for():
    source = ValueSource("digits:9", random.Random(0))
    assert all(len(source.next_value()) == 9 for _ in range(100))


def test_keys_and_values_that_run_out_are_refused():
    keys = KeySource("cities", "en", random.Random(0))
    with pytest.raises(UsageError, match="more needles than"):
        [keys.next_key() for _ in range(1000)]
    values = ValueSource("digits:2", random.Random(0))
    with pytest.raises(UsageError, match="more needles than 90 different values"):
        [values.next_value() for _ in range(91)]


@pytest.mark.parametrize("kind", ["digits:1", "digits:x", "digits:99", "colour", "word:3", ""])
def test_unknown_kinds_of_values_are_refused(kind):
    with pytest.raises(UsageError):
        ValueSource(kind, random.Random(0))


def test_wordings_have_their_placeholders():
    for wording in WORDINGS.values():
        assert "{key}" in wording.needle
        assert "{value}" in wording.needle
        assert "{key}" in wording.question
        assert "{value}" in wording.answer
