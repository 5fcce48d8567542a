"""Stop ids from every source, and stop texts across pieces."""

import random

import pytest

from llamatool.generate.stop import StopTexts, stop_ids
from llamatool.tokenizers.special import llama3_first_release_specials


def test_llama3_instruct_stops_although_its_tokenizer_says_otherwise(llama3) -> None:
    """vllm-project/vllm#4180, ollama/ollama#3759, oobabooga/textgen#5885,
    PaddlePaddle/PaddleNLP#8351: the tokenizer's end is 128001, and turns end with 128009.
    """
    found = stop_ids(llama3, tokenizer_config="<|end_of_text|>", is_instruct=True)
    assert found.ids == {128001, 128008, 128009}
    assert dict(found.sources)["tokenizer_config.json"] == (128001,)


def test_base_models_do_not_stop_at_the_end_of_a_turn(llama3, llama4, small) -> None:
    assert stop_ids(llama3, config=(128001,)).ids == {128001}
    assert stop_ids(llama4).ids == {200001}
    assert stop_ids(small, config=(2,)).ids == {2}


def test_names_are_looked_up_not_ids(llama3, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first Llama 3, 128008 was still reserved."""
    monkeypatch.setattr(llama3, "special_ids", llama3_first_release_specials())
    assert stop_ids(llama3, is_instruct=True).ids == {128001, 128009}


def test_the_union_of_all_files(llama3) -> None:
    found = stop_ids(llama3, generation_config=(7,), config=(8, -1), names=("<|python_tag|>", "?"))
    assert found.ids == {7, 8, 128001, 128010}
    assert [source for source, _ in found.sources] == [
        "generation_config.json", "config.json", "the tokenizer's names", "the prompt format",
    ]  # fmt: skip


def test_smollm2(smollm) -> None:
    assert smollm.stop_ids(smollm.prompt("hi")).ids == {0, 2}


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "found"),
    [
        (["END"], ["a E", "N", "D b"], "a ", "END"),
        (["END"], ["a E", "N", "F b"], "a ENF b", None),
        (["END"], ["EEN", "D"], "E", "END"),
        (["aa", "aab"], ["xaab"], "x", "aa"),
        (["b", "abc"], ["abc"], "a", "b"),
        (["b", "ab"], ["xa", "b"], "x", "ab"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (["", "x"], ["a", "bx"], "ab", "x"),
        ([], ["a", "b"], "ab", None),
        (["\u516d"], ["\u4e2d", "\u516d"], "\u4e2d", "\u516d"),
    ],
)
def test_stop_texts(stops: list[str], pieces: list[str], text: str, found: str | None) -> None:
    looking = StopTexts(stops)
    assert "".join(map(looking.feed, pieces)) + looking.finish() == text
    assert looking.found == found


def test_pieces_do_not_matter() -> None:
    """Cut anywhere, the result is that of the whole text; nothing of a stop text is let through."""
    generator = random.Random(0)
    for _ in range(3000):
        text = "".join(generator.choices("ab", k=12))
        stops = ["".join(generator.choices("ab", k=generator.randint(1, 5))) for _ in range(2)]
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        expected = text[: min(ends)[1]] if ends else text
        looking, shown, position = StopTexts(stops), "", 0
        while position < len(text):
            step = generator.randint(1, 4)
            shown += looking.feed(text[position : position + step])
            assert expected.startswith(shown)
            position += step
        assert shown + looking.finish() == expected
        assert (looking.found is not None) == bool(ends)
