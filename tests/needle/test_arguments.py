import pytest

from llamatool.errors import UsageError
from llamatool.needle.arguments import parse_budget, parse_depths, parse_lengths


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("64k", (65536,)),
        ("1k,4k", (1024, 4096)),
        ("4k, 1k,1k", (1024, 4096)),
        ("1k:8k:x2", (1024, 2048, 4096, 8192)),
        ("8k:24k:+8k", (8192, 16384, 24576)),
        ("500,1k:2k:+500", (500, 1024, 1524, 2024)),
        ("1M", (1048576,)),
    ],
)
def test_lengths(text, lengths):
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize(
    "text", ["", "x", "0", "1k:", "8k:1k:x2", "1k:8k:x1", "1k:8k:-1k", "0:8k:x2", "1:9999:+1"]
)
def test_lengths_that_are_none(text):
    with pytest.raises(UsageError):
        parse_lengths(text)


def test_depths():
    assert parse_depths("3") == (0.0, 0.5, 1.0)
    assert parse_depths("1") == (0.5,)
    assert parse_depths("100,0,25") == (0.0, 0.25, 1.0)
    assert parse_depths("5", "sigmoid") == (0.0, 0.0701, 0.5, 0.9299, 1.0)
    assert len(parse_depths("11")) == 11


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "x", "50,101", "201", "nan", "inf"])
def test_depths_that_are_none(text):
    with pytest.raises(UsageError):
        parse_depths(text)


def test_budgets():
    assert parse_budget("90s").seconds == 90
    assert parse_budget("10m").seconds == 600
    assert parse_budget("1.5h").seconds == 5400
    assert parse_budget("2PF").flops == 2e15
    for text in ("", "10", "m", "2pf", "-1m"):
        with pytest.raises(UsageError):
            parse_budget(text)
