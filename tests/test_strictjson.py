"""JSON from strangers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamatool.errors import InputError
from llamatool.strictjson import parse_object


def parse(text):
    return parse_object(text, where="config.json", what="a config.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found an empty file"),
        ("  \n", "found an empty file"),
        ("<!DOCTYPE html><html>", "found HTML or XML"),
        ("version https://git-lfs.github.com/spec/v1\noid", "found a git-lfs pointer"),
        ('{"a": 1,', "found JSON that ends early"),
        ('{"a": "b', "found JSON that ends early"),
        ('{"a": 1 2}', "found invalid JSON (expecting ',' delimiter)"),
        ("{'a': 1}", "found invalid JSON"),
        ('{"a": 1, "a": 2}', "key `a` occurs twice"),
        ('{"a": {"b": 1, "b": 1}}', "key `b` occurs twice"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": -Infinity}', "-Infinity is not a JSON number"),
        ('{"a": 1e999}', "is out of range"),
        ('{"a": %s}' % ("9" * 5000), "an integer of 5000 digits"),
        ("[1]", "found a JSON list instead of an object"),
        ("null", "found a JSON null instead of an object"),
        ("true", "found a JSON boolean instead of an object"),
        (b"\xff\xfe{}", "bytes that are not UTF-8"),
        ('{"a": ' * 100000, "nests too deeply"),
    ],
)
def test_refused_with_a_reason_and_a_place(text, message):
    with pytest.raises(InputError) as caught:
        parse(text)
    assert message in caught.value.what
    assert "config.json" in caught.value.where
    assert "\n" not in caught.value.what


def test_the_place_of_a_mistake_is_told():
    with pytest.raises(InputError) as caught:
        parse('{\n  "a": 1\n  "b": 2\n}')
    assert caught.value.where == "config.json, line 3, column 3"


def test_a_byte_order_mark_is_no_mistake():
    assert parse(b"\xef\xbb\xbf" + b'{"a": 1}') == {"a": 1}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.text(max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4))
def test_valid_json_comes_out_as_the_standard_library_reads_it(value):
    text = json.dumps(value)
    assert parse(text) == json.loads(text)


@given(st.text(max_size=40))
def test_any_text_is_an_object_or_an_input_error(text):
    try:
        value = parse(text)
    except InputError:
        return
    assert isinstance(value, dict)
