"""The figures of docs/tokenizers.md: each row of its table, and the claims under it."""

import re

import pytest

from llamatool.tokenizers.base import Tokenizer
from tests.tokenizers.conftest import ROOT
from tests.tokenizers.test_vectors import UDHR

LANGUAGES = {
    "en": "English", "zh-Hans": "Chinese (simplified)", "zh-Hant": "Chinese (traditional)",
    "ja": "Japanese", "ko": "Korean", "de": "German", "fr": "French", "hi": "Hindi", "ta": "Tamil",
    "my": "Burmese", "ka": "Georgian",
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> dict[str, list[float]]:
    """The numbers of the table by language."""
    page = (ROOT / "docs" / "tokenizers.md").read_text(encoding="utf-8")
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 10 and re.fullmatch(r"[\d,]+", cells[1]):
            found[cells[0]] = [float(re.sub("[,\u2191]", "", cell)) for cell in cells[1:]]
    return found


def test_the_table_has_every_language(rows: dict[str, list[float]]) -> None:
    assert len(rows) == 34


@pytest.mark.parametrize("code", LANGUAGES)
def test_counts_are_those_of_the_tests(rows: dict[str, list[float]], code: str) -> None:
    assert rows[LANGUAGES[code]][:3] == list(UDHR[code])


def test_premiums_follow_from_the_counts(rows: dict[str, list[float]]) -> None:
    english = rows["English"]
    for numbers in rows.values():
        for column in range(3):
            assert numbers[6 + column] == pytest.approx(
                numbers[column] / english[column], abs=0.006
            )


def test_the_sentences_under_the_table(rows: dict[str, list[float]]) -> None:
    def median(values: list[float]) -> float:
        middle = len(values) // 2
        ordered = sorted(values)
        return (ordered[middle - 1] + ordered[middle]) / 2

    assert round(median([n[1] / n[0] for n in rows.values()]), 2) == 0.89
    assert round(median([n[2] / n[0] for n in rows.values()]), 2) == 0.57
    assert [round(median([n[c] for n in rows.values()]), 1) for c in (6, 7, 8)] == [2.1, 1.9, 1.4]
    worse = sorted(name for name, n in rows.items() if n[1] > n[0])
    assert worse == ["Burmese", "Georgian", "Hungarian", "Tamil", "Tibetan"]
    assert [name for name, n in rows.items() if n[2] > n[1]] == ["English"]
    assert all(n[2] < n[0] for n in rows.values())
    chinese, traditional = rows["Chinese (simplified)"], rows["Chinese (traditional)"]
    halves = [n[c] / n[0] for c in (1, 2) for n in (chinese, traditional)]
    assert [round(value, 2) for value in halves] == [0.58, 0.53, 0.47, 0.45]
    assert (chinese[6], traditional[6]) == (1.67, 1.84)


def test_the_sample_of_code(llama3: Tokenizer, llama4: Tokenizer, llama2: Tokenizer) -> None:
    from llamatool.tokenizers.corpus import builtin

    text = next(item.text for item in builtin() if item.code == "python")
    assert [k.count(text) for k in (llama2, llama3, llama4)] == [334, 251, 249]


def test_memory_of_a_chinese_character(rows: dict[str, list[float]]) -> None:
    # KV bytes per token: Llama 2 7B 512 KiB, Llama 3 8B 128 KiB; 2,832 characters of text
    tokens = rows["Chinese (simplified)"]
    assert round(512 * tokens[0] / 2832) == 718
    assert round(128 * tokens[1] / 2832) == 105
