"""The plain sentence on whether a document may be given to a model."""

import pytest

from llamatool.config.catalog import find
from llamatool.config.context import context_verdict
from llamatool.config.huggingface import parse_huggingface
from llamatool.config.layers import plan_layers
from tests.config.helpers import llama


def verdict(name, tokens=None):
    entry = find(name)
    return context_verdict(entry.config, plan_layers(entry.config), entry, tokens)


@pytest.mark.parametrize(
    ("name", "tokens", "fits", "words"),
    [
        ("llama-2-7b", 4096, True, "yes"),
        ("llama-2-7b", 4097, False, "no: 4,097 tokens are more than the 4,096"),
        ("llama-3.1-8b", 131072, True, "yes"),
        ("llama-3.1-8b", 131073, False, "no"),
        (
            "llama-4-scout-17b-16e-instruct",
            100000,
            True,
            "36 of 48 layers see only their own chunk",
        ),
        ("llama-4-scout-17b-16e-instruct", 262145, True, "with care"),
        ("llama-4-scout-17b-16e-instruct", 10485761, False, "no"),
        ("llama-4-maverick-17b-128e-instruct", 500000, True, "beyond the 262,144 of training"),
    ],
)
def test_answers(name, tokens, fits, words):
    found = verdict(name, tokens)
    assert found.fits is fits
    assert words in found.answer


def test_what_is_trained_and_what_is_stated_are_told_apart():
    scout = verdict("llama-4-scout-17b-16e-instruct")
    assert (scout.max_position_embeddings, scout.trained_context) == (10485760, 262144)
    assert "extrapolates" in scout.note
    assert verdict("llama-3.1-8b").note is None


def test_longest_wavelength():
    # 2 pi / 3.068925988914511e-07, the slowest of Llama 3.1's frequencies.
    assert verdict("llama-3.1-8b").longest_wavelength == pytest.approx(20473564.1, rel=1e-6)


def test_a_sliding_window_is_named():
    values = llama(model_type="mistral", sliding_window=64)
    config = parse_huggingface(values, where="c")
    found = context_verdict(config, plan_layers(config), None, 100)
    assert "4 of 4 layers see only the last 64 tokens" in found.answer
