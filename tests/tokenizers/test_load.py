"""What a file is, told by its content; and what is said about files that are none."""

import json
import random
import struct
from pathlib import Path

import pytest

from llamatool.errors import InputError, TokenizerError, UnsupportedError
from llamatool.tokenizers.detect import file_kind
from llamatool.tokenizers.load import from_bytes, from_gguf, load, tokenizer_file
from llamatool.tokenizers.modelproto import build_model, parse_model
from llamatool.tokenizers.sentencepiece import SentencePieceTokenizer
from llamatool.tokenizers.tiktoken import TiktokenTokenizer, parse_ranks
from tests.tokenizers.builders import bpe_metadata, spm_metadata, write_gguf
from tests.tokenizers.conftest import load_fetched


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"IQ== 0\nIg== 1\n", "tiktoken"),
        (b"IQ== 0\r\n", "tiktoken"),
        (b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02", "sentencepiece"),
        (b'{\n  "version": "1.0"', "tokenizer.json"),
        (b'\xef\xbb\xbf{"version"', "tokenizer.json"),
        (b'{"config": {}, "vocab": [{"rank": 0, "token_bytes": "AA=="', "tekken"),
        (b"GGUF\x03\0\0\0", "gguf"),
    ],
)
def test_kinds_by_the_first_bytes(head: bytes, kind: str) -> None:
    assert file_kind(head, where="x") == kind


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\n\n<html>", "a web page"),
        (b"PK\x03\x04" + bytes(30), "a zip archive"),
        (b"\x1f\x8b" + bytes(30), "a gzip archive"),
        (struct.pack("<Q", 20) + b'{"a": 1}            ', "a safetensors file"),
        (b"what is this", "unknown content"),
        (bytes(40), "unknown content"),
    ],
)
def test_what_is_no_tokenizer(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        load(path)
    assert caught.value.where == str(path)


def test_a_missing_file_and_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot read the file"):
        load(tmp_path / "no.model")
    with pytest.raises(TokenizerError, match="the folder holds no tokenizer"):
        load(tmp_path)


def test_the_json_comes_first_in_a_folder(tmp_path: Path, small_file: Path) -> None:
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "tokenizer.model").write_bytes(small_file.read_bytes())
    assert tokenizer_file(tmp_path).name == "tokenizer.model"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_file(tmp_path).name == "tokenizer.json"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"IQ== 0\nIg== 2\n", "not 0, 1, 2"),
        (b"IQ== 0\nIg==\n", "not 0, 1, 2"),
        (b"IQ== 0\nIg== x\n", "line 2"),
        (b"IQ== 0\nI!== 1\n", "line 2"),
        (b"IQ== 0\nIQ== 1\n", "1 tokens occur twice"),
        (b"IQ== 0\n", "255 of the 256 bytes are no tokens"),
    ],
)
def test_damaged_ranks(data: bytes, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        parse_ranks(data, where="x")


def test_ranks_of_another_model(llama3: TiktokenTokenizer) -> None:
    from llamatool.tokenizers.tiktoken import ranks_file

    some = dict(list(llama3.ranks.items())[:100_000])
    with pytest.raises(UnsupportedError, match="100,000 ranks"):
        from_bytes(ranks_file(some), where="cl100k")


def test_a_damaged_sentencepiece_model(small_file: Path) -> None:
    data = small_file.read_bytes()
    for length in (100, 5_000, len(data) - 3):
        with pytest.raises(TokenizerError, match="damaged or cut off"):
            parse_model(data[:length], where="x")
    with pytest.raises(TokenizerError, match="damaged"):
        parse_model(b"\n\xff\xff\xff\xff\x7f", where="x")


def test_the_model_is_read_as_the_library_reads_it(
    small: SentencePieceTokenizer, small_file: Path
) -> None:
    import sentencepiece

    oracle = sentencepiece.SentencePieceProcessor(model_file=str(small_file))
    model = parse_model(small_file.read_bytes(), where="x")
    ids = range(oracle.get_piece_size())
    assert list(model.pieces) == [oracle.id_to_piece(i) for i in ids]
    assert list(model.scores) == [oracle.get_score(i) for i in ids]
    assert (model.unk_id, model.bos_id, model.eos_id, model.pad_id) == (
        oracle.unk_id(),
        oracle.bos_id(),
        oracle.eos_id(),
        oracle.pad_id(),
    )
    assert model.add_dummy_prefix
    assert parse_model(build_model(model), where="x") == model


def test_ids_of_special_pieces_come_from_the_file(tmp_path: Path) -> None:
    # transformers#25611: a model with other ids than 0, 1, 2
    from sentencepiece import SentencePieceTrainer

    text = tmp_path / "text.txt"
    text.write_text("a b c d e f g h a b c d\n" * 20)
    prefix = tmp_path / "odd"
    SentencePieceTrainer.train(
        input=str(text), model_prefix=str(prefix), vocab_size=20, hard_vocab_limit=False,
        model_type="bpe", bos_id=0, eos_id=1, unk_id=2, minloglevel=2,
    )  # fmt: skip
    tokenizer = load(prefix.with_suffix(".model"))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1,))
    assert tokenizer.special_ids["<unk>"] == 2


@pytest.mark.parametrize(
    ("name", "recognised", "engine", "notes"),
    [
        ("llama2/tokenizer.model", "llama-2", "sentencepiece", []),
        ("mistral-v1/tokenizer.model", "mistral-v1", "sentencepiece", []),
        ("mistral-as-llama2/tokenizer.json", "mistral-v1", "tokenizers", []),
        ("llama3-json/tokenizer.json", "llama-3", "tiktoken", ["special_names_first_release"]),
        ("llama32-token-counter/tokenizer.json", "llama-3", "tokenizers", ["ignore_merges_false"]),
        ("qwen3/tokenizer.json", "qwen-3", "tokenizers", []),
    ],
)
def test_known_files(name: str, recognised: str, engine: str, notes: list[str]) -> None:
    identity = load_fetched(name).identity
    assert (identity.name, identity.engine) == (recognised, engine)
    assert [note.code for note in identity.notes] == notes


def test_the_flag_on_ignore_merges_counts_the_unreachable() -> None:
    identity = load_fetched("llama32-token-counter/tokenizer.json").identity
    assert identity.notes[0].message.startswith("`ignore_merges` is false: 588 tokens unreachable")


def test_llama_files_are_recognised(llama3: TiktokenTokenizer, llama4: TiktokenTokenizer) -> None:
    assert llama3.identity.name == "llama-3"
    assert llama3.identity.sha256 is not None
    assert llama3.identity.sha256.startswith("82e9d319")
    assert llama4.identity.name == "llama-4"
    assert llama4.identity.title == "Meta Llama 4"


def test_a_changed_vocabulary_of_known_size_is_said(llama3: TiktokenTokenizer) -> None:
    from llamatool.tokenizers.tiktoken import ranks_file

    tokens = list(llama3.ranks)
    tokens[-1], tokens[-2] = tokens[-2], tokens[-1]
    changed = {token: i for i, token in enumerate(tokens)}
    identity = from_bytes(ranks_file(changed), where="changed").identity
    assert identity.name is None
    assert [note.code for note in identity.notes] == ["vocabulary_unknown"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a tokenizer.json"),
        ("[]", "unknown content"),
        ('{"model": 1}', "no `model` with a `vocab`"),
        ('{"added_tokens_decoder": {}, "bos_token": "<s>"}', "no `model` with a `vocab`"),
        ('{"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}}', "no id"),
        ('{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', "no id"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": [1]}', "added_tokens"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0, "a": 1}}}', "twice"),
        ('{"model": {"type": "Nope", "vocab": {"a": 0}}}', "tokenizers refuses the file"),
    ],
)
def test_damaged_json(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_bytes(text.encode(), where="tokenizer.json")


def test_damaged_files_are_refused_in_words(small_file: Path, small_json: bytes) -> None:
    """Bytes changed or left out at random: an error of ours or a tokenizer, nothing else."""
    generator = random.Random(6)
    for data in (small_file.read_bytes(), small_json):
        for _ in range(150):
            damaged = bytearray(data)
            if generator.random() < 0.3:
                del damaged[generator.randrange(len(damaged)) :]
            for _ in range(generator.randint(1, 6)):
                if damaged:
                    end = generator.choice((400, len(damaged)))
                    damaged[generator.randrange(min(end, len(damaged)))] = generator.randrange(256)
            _survives(bytes(damaged))


def test_json_of_odd_types_is_refused_in_words(small_json: bytes) -> None:
    generator = random.Random(7)
    for _ in range(300):
        content = json.loads(small_json)
        for _ in range(generator.randint(1, 3)):
            _change(content, generator)
        _survives(json.dumps(content).encode())


def _survives(data: bytes) -> None:
    try:
        tokenizer = from_bytes(data, where="damaged")
    except InputError:
        return
    tokenizer.decode(tokenizer.encode("Hello \u4e2d\U0001f999"))


def _change(value: object, generator: random.Random, depth: int = 0) -> None:
    """Replaces something inside `value` by something of another type."""
    odd = generator.choice((None, 0, -1, "x", [], {}, True, 1e9, [1], {"a": 1}))
    keys = list(value) if isinstance(value, dict) else []
    if isinstance(value, list):
        keys = list(range(len(value)))
    if not keys:
        return
    key = generator.choice(keys)
    if generator.random() < 0.3 or depth > 3:
        value[key] = odd  # type: ignore[index]
    else:
        _change(value[key], generator, depth + 1)  # type: ignore[index]


def test_tekken_is_named() -> None:
    data = b'{"config": {"pattern": ""}, "vocab": [{"rank": 0, "token_bytes": "AA=="}]}'
    with pytest.raises(UnsupportedError, match="Tekken"):
        from_bytes(data, where="tekken.json")


def _content(small_json: bytes) -> dict:
    return json.loads(small_json)


def _engine_of(content: dict) -> str:
    return from_bytes(json.dumps(content).encode(), where="x").identity.engine


def test_routing_to_tiktoken(small_json: bytes) -> None:
    assert _engine_of(_content(small_json)) == "tiktoken"


def test_merges_as_pairs_are_routed_too(small_json: bytes) -> None:
    content = _content(small_json)
    content["model"]["merges"] = [merge.split(" ") for merge in content["model"]["merges"]]
    assert _engine_of(content) == "tiktoken"


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["model"].update(ignore_merges=False),
        lambda c: c["model"].update(byte_fallback=True),
        lambda c: c["model"].update(dropout=0.1),
        lambda c: c["model"].update(unk_token="!"),
        lambda c: c["model"].update(merges=c["model"]["merges"][:-1]),
        lambda c: c["model"]["merges"].insert(0, c["model"]["merges"].pop()),
        lambda c: c.update(normalizer={"type": "NFC"}),
        lambda c: c.update(pre_tokenizer=None),
        lambda c: c["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\s+|\S+"),
        lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
        lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(invert=True),
        lambda c: c["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
        lambda c: c["pre_tokenizer"]["pretokenizers"][1].update(use_regex=True),
        lambda c: c["added_tokens"].append(
            {"id": 1003, "content": "zqx", "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": False}
        ),
    ],
    ids=[
        "ignore_merges", "byte_fallback", "dropout", "unk_token", "merge missing", "merge order",
        "normalizer", "no pre_tokenizer", "expression", "behavior", "invert", "prefix", "regex",
        "added token that is not special",
    ],
)  # fmt: skip
def test_what_must_not_be_routed(small_json: bytes, change) -> None:
    content = _content(small_json)
    change(content)
    tokenizer = from_bytes(json.dumps(content).encode(), where="x")
    assert tokenizer.identity.engine == "tokenizers"


def test_an_added_token_that_is_not_special_is_matched_as_the_library_does(
    small_json: bytes,
) -> None:
    content = _content(small_json)
    token = {**content["added_tokens"][0], "id": 1003, "content": "zqx", "special": False}
    content["added_tokens"].append(token)
    tokenizer = from_bytes(json.dumps(content).encode(), where="x")
    assert 1003 in tokenizer.encode("a zqx b")
    assert tokenizer.vocab_size == 1004


def test_gguf_of_sentencepiece(small: SentencePieceTokenizer, tmp_path: Path) -> None:
    from llamatool.cli.tokens import _gguf_metadata

    path = tmp_path / "vocab.gguf"
    write_gguf(path, spm_metadata(small.model))
    tokenizer = load(tmp_path, read_gguf=_gguf_metadata)
    assert tokenizer.identity.kind == "gguf"
    text = "The river wakes, 1893! \U0001f999"
    assert tokenizer.encode(text) == small.encode(text)
    with pytest.raises(UnsupportedError):
        load(path)


def test_gguf_of_llama4(llama4: TiktokenTokenizer) -> None:
    metadata = bpe_metadata(llama4, "llama4")
    tokenizer = from_gguf(metadata, where="x")
    assert (tokenizer.identity.name, tokenizer.identity.engine) == ("llama-4", "tiktoken")
    assert tokenizer.special_ids == llama4.special_ids
    text = "I'm here\n//\n and THERE 12345"
    assert tokenizer.encode(text) == llama4.encode(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": None}, "holds no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "kind `bert`"),
        ({"tokenizer.ggml.scores": [0.0]}, "1 entries for"),
        ({"tokenizer.ggml.scores": None}, "missing or no list"),
        ({"tokenizer.ggml.tokens": "abc"}, "missing or no list"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "more than strings"),
        ({"tokenizer.ggml.unknown_token_id": 10**6}, "`unknown_token_id` is 1000000"),
    ],
)
def test_damaged_gguf_vocabularies(
    small: SentencePieceTokenizer, change: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        from_gguf({**spm_metadata(small.model), **change}, where="x")


def test_an_unknown_split_rule_is_no_silent_default(llama3: TiktokenTokenizer) -> None:
    metadata = bpe_metadata(llama3, "something-new")
    with pytest.raises(UnsupportedError, match="'something-new', whose splitting rule is not"):
        from_gguf(metadata, where="x")
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(UnsupportedError, match="missing, so the splitting rule"):
        from_gguf(metadata, where="x")


def test_a_gguf_decides_about_bos(small: SentencePieceTokenizer) -> None:
    metadata = spm_metadata(small.model)
    assert from_gguf(metadata, where="x").add_bos
    assert not from_gguf({**metadata, "tokenizer.ggml.add_bos_token": False}, where="x").add_bos
    assert from_gguf({**metadata, "tokenizer.ggml.eos_token_id": 5}, where="x").eos_ids == (5,)
