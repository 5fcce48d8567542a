"""Quantities with units, and their one meaning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamatool.errors import UsageError
from llamatool.units import (
    format_bytes,
    format_count,
    format_gib,
    format_tokens,
    parse_bytes,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100000", 100_000),
        ("100,000", 100_000),
        ("100_000", 100_000),
        ("64k", 65_536),
        ("64K", 65_536),
        ("1.5k", 1_536),
        ("1M", 1_048_576),
        ("10m", 10_485_760),
        (" 8 k ", 8_192),
        ("0", 0),
    ],
)
def test_tokens(text, expected):
    assert parse_tokens(text) == expected


@pytest.mark.parametrize(
    "text", ["", "k", "-1", "1.5", "1e3", "64kb", "6 4", "0x10", "\u0663", "nan", "9" * 60, "1..5k"]
)
def test_what_is_no_number_of_tokens(text):
    with pytest.raises(UsageError, match="is not a number of tokens"):
        parse_tokens(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 85_899_345_920),
        ("80GB", 80_000_000_000),
        ("80 gb", 80_000_000_000),
        ("1.5GiB", 1_610_612_736),
        ("512MiB", 536_870_912),
        ("7B", 7),
        ("1TiB", 1_099_511_627_776),
    ],
)
def test_bytes_are_read_literally(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["80", "80G", "80Gi", "GiB", "-1GiB", "80 giga", "1.5B"])
def test_bytes_need_a_unit(text):
    with pytest.raises(UsageError, match="is not an amount of memory"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (16_060_522_496, "14.96 GiB"),
        (131_072, "128.00 KiB"),
        (1023, "1023 B"),
        (0, "0 B"),
        (2**40, "1.00 TiB"),
    ],
)
def test_bytes_are_labelled_as_what_they_are(value, expected):
    assert format_bytes(value) == expected


def test_other_formats():
    assert format_gib(16_060_522_496) == "14.96"
    assert format_count(8_030_261_248) == "8.03B"
    assert format_count(401_583_781_376) == "402B"
    assert format_count(134_515_008) == "135M"
    assert format_count(999) == "999"
    assert format_tokens(131_072) == "128k"
    assert format_tokens(10_485_760) == "10M"
    assert format_tokens(100_000) == "100,000"
    assert format_tokens(0) == "0"


@given(st.integers(min_value=0, max_value=2**50))
def test_every_printed_length_is_read_back_as_itself(value):
    assert parse_tokens(format_tokens(value)) == value


@given(st.text(max_size=30))
def test_any_text_is_a_number_or_a_usage_error(text):
    for parse in (parse_tokens, parse_bytes):
        try:
            value = parse(text)
        except UsageError:
            continue
        assert 0 <= value <= 2**62
