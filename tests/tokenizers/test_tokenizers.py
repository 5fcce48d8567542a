"""The interface: special tokens, decoding whole and in a stream, facts about the vocabularies."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamatool.errors import TokenizerError, UsageError
from llamatool.tokenizers.base import Tokenizer
from llamatool.tokenizers.sentencepiece import SentencePieceTokenizer
from llamatool.tokenizers.special import (
    ControlStrings,
    llama3_first_release_specials,
    llama3_specials,
    llama4_specials,
)
from llamatool.tokenizers.tiktoken import TiktokenTokenizer
from tests.tokenizers.conftest import load_fetched, random_text


def test_user_text_never_becomes_a_control_token(tokenizer: Tokenizer) -> None:
    text = "".join(tokenizer.special_ids) + "hi <|eot_id|> <s> </s>"
    controls = set(tokenizer.special_ids.values())
    assert not controls & set(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_eot_in_user_text(llama3: TiktokenTokenizer) -> None:
    assert llama3.encode("hi <|eot_id|>") == [6151, 83739, 68, 354, 851, 91, 29]
    assert llama3.encode("hi <|eot_id|>", specials="all") == [6151, 220, 128009]
    assert llama3.encode("a<|eot_id|><|image|>", specials=["<|image|>"])[-1] == 128011
    assert llama3.encode("", specials="all") == []
    with pytest.raises(UsageError, match="no special token"):
        llama3.encode("x", specials=["<|nothing|>"])


def test_special_tables_of_meta(llama3: TiktokenTokenizer, llama4: TiktokenTokenizer) -> None:
    from tests.tokenizers.conftest import meta_file

    meta = pytest.importorskip("llama_models.llama3.tokenizer")
    assert llama3_specials() == meta.Tokenizer(meta_file("llama3")).special_tokens
    meta4 = pytest.importorskip("llama_models.llama4.tokenizer")
    assert llama4_specials() == meta4.Tokenizer(meta_file("llama4")).special_tokens
    assert (llama3.vocab_size, llama4.vocab_size) == (128_256, 202_048)


def test_names_of_the_first_release() -> None:
    first = llama3_first_release_specials()
    assert len(first) == 256
    assert first["<|eot_id|>"] == 128009
    assert first["<|reserved_special_token_2|>"] == 128004
    assert first["<|reserved_special_token_250|>"] == 128255
    tokenizer = load_fetched("llama31-json/tokenizer.json")
    assert dict(tokenizer.special_ids) == first
    assert [note.code for note in tokenizer.identity.notes] == ["special_names_first_release"]


def test_ids_that_begin_and_end(
    llama3: TiktokenTokenizer, llama4: TiktokenTokenizer, small: SentencePieceTokenizer
) -> None:
    assert (llama3.bos_id, llama3.eos_ids) == (128000, (128001, 128008, 128009))
    assert (llama4.bos_id, llama4.eos_ids) == (200000, (200001, 200007, 200008))
    assert (small.bos_id, small.eos_ids, small.add_bos) == (1, (2,), True)
    assert small.special_ids == {"<unk>": 0, "<s>": 1, "</s>": 2}


def test_facts_about_the_vocabularies(llama3: TiktokenTokenizer, llama4: TiktokenTokenizer) -> None:
    assert (len(llama3.fragment_ids), len(llama4.fragment_ids)) == (1352, 1828)
    lengths = [max((len(t), -i) for t, i in k.ranks.items()) for k in (llama3, llama4)]
    assert (lengths[0], lengths[1][0]) == ((128, -58040), 113)
    unreachable = [
        i
        for token, i in llama4.ranks.items()
        if i not in llama4.fragment_ids and llama4.encode(token.decode()) != [i]
    ]
    assert unreachable == [5384, 7632, 41336, 86364, 87914, 122136, 188085]


def test_every_llama3_token_comes_out_of_its_own_text(llama3: TiktokenTokenizer) -> None:
    for token, i in llama3.ranks.items():
        if i not in llama3.fragment_ids:
            assert llama3.encode(token.decode()) == [i]


@pytest.mark.parametrize("name", ["small", "llama2", "llama3", "llama4"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_decode_inverts_encode(name: str, text: str) -> None:
    tokenizer = _TOKENIZERS[name]
    if tokenizer is None:
        pytest.skip("not there")
    if isinstance(tokenizer, SentencePieceTokenizer):
        text = text.replace("\u2581", "_")  # SentencePiece's own space does not come back
    assert tokenizer.decode(tokenizer.encode(text)) == text


_TOKENIZERS: dict[str, Tokenizer | None] = {}


@pytest.fixture(autouse=True, scope="module")
def _all_loaded(request: pytest.FixtureRequest) -> None:
    for name in ("small", "llama2", "llama3", "llama4"):
        try:
            _TOKENIZERS[name] = request.getfixturevalue(name)
        except pytest.skip.Exception:
            _TOKENIZERS[name] = None


def _streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = tokenizer.stream()
    return "".join(decoder.feed(i) for i in ids) + decoder.finish()


def test_a_stream_adds_up_to_the_whole(tokenizer: Tokenizer) -> None:
    generator = random.Random(3)
    for _ in range(2_000):
        ids = tokenizer.encode(random_text(generator))
        assert _streamed(tokenizer, ids) == tokenizer.decode(ids)
        mixed = generator.choices(range(tokenizer.vocab_size), k=8)
        assert _streamed(tokenizer, mixed) == tokenizer.decode(mixed)


def test_a_stream_behind_a_prompt_keeps_its_first_space(tokenizer: Tokenizer) -> None:
    # transformers#22710: decoded one by one, every token loses its space
    prompt, reply = tokenizer.encode("The river"), tokenizer.encode("The river wakes")
    assert reply[: len(prompt)] == prompt
    decoder = tokenizer.stream(after=prompt)
    text = "".join(decoder.feed(i) for i in reply[len(prompt) :]) + decoder.finish()
    assert text == " wakes"


def test_a_stream_holds_back_an_incomplete_character(tokenizer: Tokenizer) -> None:
    decoder = tokenizer.stream()
    shown = [decoder.feed(i) for i in tokenizer.encode("a\U0001f999b")] + [decoder.finish()]
    assert "".join(shown) == "a\U0001f999b"
    assert not any("\ufffd" in part for part in shown)


def test_what_never_becomes_a_character_comes_at_the_end(llama3: TiktokenTokenizer) -> None:
    decoder = llama3.stream()
    assert decoder.feed(*llama3.encode("\U0001f999")[:2]) == ""
    assert decoder.finish() == "\ufffd"


def test_decoding_random_ids_as_sentencepiece_does(llama2: SentencePieceTokenizer) -> None:
    import sentencepiece

    oracle = sentencepiece.SentencePieceProcessor(model_proto=llama2.data)
    generator = random.Random(4)
    for _ in range(20_000):
        ids = [
            generator.choice(
                (generator.randrange(32000), generator.randrange(3, 259), 29871, 259, 0, 1, 2)
            )
            for _ in range(generator.randint(1, 12))
        ]
        assert llama2.decode(ids) == oracle.decode(ids), ids


def test_control_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    assert tokenizer.bos_id is not None
    name = tokenizer.names_by_id[tokenizer.bos_id]
    ids = [tokenizer.bos_id, *tokenizer.encode("hi"), tokenizer.eos_ids[0]]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, specials=True).startswith(name)
    assert tokenizer.token_bytes(tokenizer.bos_id) == b""


@pytest.mark.parametrize("token_id", [-1, 10**9])
def test_an_id_outside_the_vocabulary(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(TokenizerError, match=f"id {token_id} is not in this vocabulary of"):
        tokenizer.decode([token_id])


def test_text_that_continues_has_no_dummy_prefix(llama2: SentencePieceTokenizer) -> None:
    assert llama2.encode("Hello") == [15043]
    assert llama2.encode_continuation("Hello") == [10994]


def test_words_are_remembered_without_changing_ids(small: SentencePieceTokenizer) -> None:
    import sentencepiece

    oracle = sentencepiece.SentencePieceProcessor(model_proto=small.data)
    generator = random.Random(5)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(generator.choices(letters, k=generator.randint(1, 9))) for _ in range(30_000)]
    unique = " ".join(words)  # hardly a word twice: the other way of encoding
    repeated = " ".join(generator.choices(words[:300], k=40_000))
    for text in (unique, repeated, repeated + "\n" + unique):
        assert small.encode(text) == oracle.encode(text)


def test_control_strings() -> None:
    found = ControlStrings(["<|eot_id|>", "</s>", "[INST]", "odd name"])
    assert found.find("hi <|eot_id|> [INST]x</s> <|no|>") == ["<|eot_id|>", "[INST]", "</s>"]
    assert found.find("an odd name") == ["odd name"]
    assert found.find("nothing here") == []
