"""Streamed text is the decoded text, byte for byte, and never half a character."""

import random

import pytest

from llamatool.generate.stream import TextStream
from llamatool.tokenizers.load import from_bytes
from tests.tokenizers.conftest import random_text

KINDS = ["llama2", "small", "llama3", "llama4", "smollm", "pieces_json", "small_json_tokenizer"]
NUM_SEQUENCES = 10_000


@pytest.fixture
def any_tokenizer(request: pytest.FixtureRequest, kind: str):
    if kind == "smollm":
        return request.getfixturevalue("smollm").tokenizer
    if kind == "small_json_tokenizer":
        return from_bytes(request.getfixturevalue("small_json"), where="small")
    if kind == "pieces_json":  # byte pieces, and a first space that is stripped
        from llamatool.tokenizers.export import export

        content = export(request.getfixturevalue("small"), "json").files["tokenizer.json"]
        return from_bytes(content, where="small")
    return request.getfixturevalue(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_is_decoded(kind: str, any_tokenizer) -> None:
    generator = random.Random(5)
    ids = [*any_tokenizer.ordinary_ids()]
    fragments = sorted(any_tokenizer.fragment_ids)
    special = list(any_tokenizer.special_ids.values())[:20]
    for number in range(NUM_SEQUENCES):
        length = generator.randint(1, 12)
        if number % 2:  # texts of many scripts, and a cut anywhere
            sequence = any_tokenizer.encode(random_text(generator))[:length]
        else:  # ids at random, with many halves of characters
            pools = (ids, fragments, special or ids)
            sequence = [
                generator.choice(pools[generator.choices((0, 1, 2), (5, 5, 1))[0]])
                for _ in range(length)
            ]
        stream = TextStream(any_tokenizer)
        pieces = [stream.feed(token_id) for token_id in sequence]
        text = "".join(pieces) + stream.finish()
        assert text == any_tokenizer.decode(sequence), sequence


@pytest.mark.parametrize("kind", KINDS)
def test_no_piece_holds_half_a_character(kind: str, any_tokenizer) -> None:
    text = "\u4e2d\u6587\u5b57 \U0001f999 \U0001f469\u200d\U0001f4bb caf\u00e9 \u0928\u093f \ud55c"
    ids = any_tokenizer.encode(text)
    stream = TextStream(any_tokenizer)
    pieces = [stream.feed(token_id) for token_id in ids] + [stream.finish()]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == any_tokenizer.decode(ids)
    for piece in pieces:
        assert piece == piece.encode().decode()


@pytest.mark.parametrize("kind", ["llama3", "small"])
def test_an_incomplete_character_is_shown_at_the_end_only(kind: str, any_tokenizer) -> None:
    first = "\U0001f999".encode()[:1]
    byte = next(i for i in any_tokenizer.fragment_ids if any_tokenizer.token_bytes(i) == first)
    stream = TextStream(any_tokenizer)
    assert stream.feed(byte) == ""
    assert stream.finish() == "\ufffd"


def test_the_answer_goes_on_from_the_prompt(small) -> None:
    """Behind a prompt the first piece keeps its space; at the start of a text it has none."""
    (hello, *_) = small.encode("the")
    assert TextStream(small).feed(hello) == small.decode([hello])
    prompt = [1, *small.encode("a")]
    assert TextStream(small, after=prompt).feed(hello) == " " + small.decode([hello])


def test_stop_text_across_tokens(llama3) -> None:
    ids = llama3.encode("One two.\n\nThree")
    stream = TextStream(llama3, stops=("\n\nTh",))
    text = "".join(stream.feed(i) for i in ids) + stream.finish()
    assert text == "One two."
    assert stream.stopped_at == "\n\nTh"
