import random

import pytest

from llamatool.errors import InputError, UsageError
from llamatool.needle.haystack import (
    DocumentHaystack,
    Encoder,
    Filler,
    GrammarHaystack,
    open_haystack,
    read_documents,
    seams_are_natural,
    smallest_gap,
    split_sentences,
    subset_with_sum,
)
from tests.needle.conftest import TOKENIZERS

BOOK = (
    "One day the tall man came. He said: “Go.” Nobody went! \n\n# Rules\n- Be kind.\n"
    "- 3.5 h a day.\n"
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("One. Two?\nThree", ["One.", " Two?\n", "Three"]),
        ("A (b.) c.", ["A (b.)", " c."]),
        ("Pi is 3.14 or so. Yes.", ["Pi is 3.14 or so.", " Yes."]),
        ("他说：“好。”我走。", ["他说：“好。”", "我走。"]),
        ("", []),
    ],
)
def test_sentences_end_where_a_reader_says(text, parts):
    assert split_sentences(text) == parts


def test_parts_add_up_to_the_text():
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choice("ab .!?\n\t“”。，)'") for _ in range(draw.randrange(40)))
        parts = "".join(split_sentences(text))
        assert parts == text or not text.strip() or text.startswith(parts)


def test_documents_come_in_the_order_of_their_names(tmp_path):
    (tmp_path / "b.txt").write_bytes("\ufeffB one.\r\nB two.".encode())
    (tmp_path / "a.md").write_text("A.", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.rst").write_text("C.", encoding="utf-8")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    assert read_documents(tmp_path) == "A.\nB one.\nB two.\nC.\n"


def test_documents_that_are_no_text_are_refused(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"good \xff bad")
    with pytest.raises(InputError, match="byte 5 is 0xff"):
        read_documents(file)
    with pytest.raises(InputError, match="no such file"):
        read_documents(tmp_path / "none")
    file.unlink()
    with pytest.raises(InputError, match="holds no documents"):
        read_documents(tmp_path)


def test_subset_sums():
    assert subset_with_sum([5, 9, 7], 12) == [0, 2]
    assert subset_with_sum([5, 9, 7], 13) is None
    draw = random.Random(2)
    for _ in range(200):
        lengths = [draw.randint(3, 20) for _ in range(12)]
        total = sum(draw.sample(lengths, 4))
        places = subset_with_sum(lengths, total)
        assert places is not None
        assert len(set(places)) == len(places)
        assert sum(lengths[place] for place in places) == total


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_gap_is_filled_exactly(tokenizer_of, name):
    haystack = GrammarHaystack(Encoder(tokenizer_of(name)), "en")
    smallest = smallest_gap(haystack)
    assert smallest <= 16
    filler = Filler(haystack, 0)
    for gap in [0, *range(smallest, smallest + 120), 500, 1000]:
        assert sum(len(unit.ids) for unit in filler.exact(gap)) == gap


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_joined_sentences_are_encoded_as_the_whole_text(tokenizer_of, name, language):
    if name == "sentencepiece" and language == "zh":
        pytest.skip("the small model has no Chinese pieces")
    assert seams_are_natural(GrammarHaystack(Encoder(tokenizer_of(name)), language))


def test_units_hold_no_bos(pocket_tokenizer):
    encoder = Encoder(pocket_tokenizer)
    assert pocket_tokenizer.bos_id not in encoder.ids(" The farmer sold the old boat.")
    # A control token's name in a document stays text.
    assert pocket_tokenizer.bos_id not in encoder.ids("<|begin_of_text|> hello")


def test_an_answer_continues_its_prefix(tokenizer_of):
    encoder = Encoder(tokenizer_of("llama3"))
    assert encoder.continuation("The number is", " 482913") == (220, 21984, 24331)


def test_documents_start_elsewhere_in_each_trial_and_never_repeat(pocket_tokenizer):
    encoder = Encoder(pocket_tokenizer)
    text = "".join(f"Rule number {i} is old. " for i in range(300))
    haystack = DocumentHaystack(encoder, "en", "book", text, repeats=False)
    first, other = list(haystack.units(0)), list(haystack.units(99))
    assert "".join(unit.text for unit in first) == text.rstrip(" ") or first[0] != other[0]
    assert first[0] != other[0]
    assert sorted(unit.text for unit in first) == sorted(unit.text for unit in other)


def test_short_documents_are_refused_unless_repeated(pocket_tokenizer):
    encoder = Encoder(pocket_tokenizer)
    once = DocumentHaystack(encoder, "en", "book", BOOK, repeats=False)
    with pytest.raises(InputError, match="tokens too short"):
        Filler(once, 0).exact(2_000)
    again = DocumentHaystack(encoder, "en", "book", BOOK, repeats=True)
    assert sum(len(unit.ids) for unit in Filler(again, 0).exact(2_000)) == 2_000


def test_generated_sentences_in_documents_are_counted(pocket_tokenizer):
    encoder = Encoder(pocket_tokenizer)
    text = "This rule of the house has a length of its own and is always the same. " * 200
    filler = Filler(DocumentHaystack(encoder, "en", "book", text, repeats=False), 0)
    length = len(encoder.ids(text)) // 200
    filler.exact(10 * length)
    assert filler.num_foreign == 0
    filler.exact(10 * length + 7)
    assert filler.num_foreign > 0


def test_open_haystack(pocket_tokenizer, tmp_path):
    encoder = Encoder(pocket_tokenizer)
    with pytest.raises(UsageError, match="never run out"):
        open_haystack(encoder, "grammar", "en", repeats=True)
    (tmp_path / "a.txt").write_text(BOOK, encoding="utf-8")
    haystack = open_haystack(encoder, str(tmp_path / "a.txt"), "en")
    assert haystack.contains("tall man")
    assert not haystack.contains("short man")
    assert next(haystack.units(0)).text == "One day the tall man came."
