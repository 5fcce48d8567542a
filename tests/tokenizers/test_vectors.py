"""Ids against llama.cpp's vectors, Meta's own test, and the reference libraries."""

import json
from collections.abc import Callable
from functools import cache, partial

import pytest
from tokenizers import Tokenizer as Engine

from llamatool.tokenizers.base import Tokenizer
from llamatool.tokenizers.convert import json_bytes, sentencepiece_to_json
from llamatool.tokenizers.corpus import builtin
from llamatool.tokenizers.export import export
from llamatool.tokenizers.load import from_bytes, from_gguf
from llamatool.tokenizers.sentencepiece import SentencePieceTokenizer
from llamatool.tokenizers.tiktoken import TiktokenTokenizer
from tests.tokenizers.builders import bpe_metadata, spm_metadata
from tests.tokenizers.conftest import fetched, golden, load_fetched, smollm_file, vectors

# Counts of the reference table (README of the texts): Llama 2, Llama 3, Llama 4.
UDHR = {
    "en": (2375, 2016, 2022),
    "zh-Hans": (3971, 2314, 1873),
    "zh-Hant": (4378, 2331, 1959),
    "ja": (5334, 3021, 2475),
    "ko": (6884, 2785, 2377),
    "de": (3282, 3278, 2463),
    "fr": (3355, 3122, 2638),
    "vi": (8983, 6620, 5422),
    "hi": (11717, 5623, 3364),
    "ta": (15106, 18293, 8712),
    "my": (24474, 29320, 8307),
    "ka": (12233, 21533, 4439),
}


def _udhr(language: str) -> str:
    return golden(f"udhr/{language}.txt").read_bytes().decode()


def _passed(tokenizer: Tokenizer, name: str) -> int:
    found = vectors(name)
    for text, ids in found:
        assert tokenizer.encode(text) == ids
        streamed = tokenizer.encode_stream(text)  # a string is a stream of characters
        assert [i for part in streamed for i in part] == ids
        assert tokenizer.decode(ids) == text
    return len(found)


@pytest.mark.parametrize("form", ["model", "json", "gguf"])
def test_llama2_vectors(llama2: SentencePieceTokenizer, form: str) -> None:
    if form == "json":
        content = json_bytes(sentencepiece_to_json(llama2.model, where="llama2"))
        assert _passed(from_bytes(content, where="tokenizer.json"), "llama-spm") == 46
    elif form == "gguf":
        tokenizer = from_gguf(spm_metadata(llama2.model), where="llama2.gguf")
        assert _passed(tokenizer, "llama-spm") == 46
    else:
        assert _passed(llama2, "llama-spm") == 46


@pytest.mark.parametrize("form", ["model", "converted", "gguf"])
def test_llama3_vectors(llama3: TiktokenTokenizer, llama3_json: bytes, form: str) -> None:
    if form == "converted":
        assert _passed(from_bytes(llama3_json, where="tokenizer.json"), "llama-bpe") == 46
    elif form == "gguf":
        tokenizer = from_gguf(bpe_metadata(llama3, "llama-bpe"), where="llama3.gguf")
        assert _passed(tokenizer, "llama-bpe") == 46
    else:
        assert _passed(llama3, "llama-bpe") == 46


@pytest.mark.parametrize("name", ["llama3-json", "llama31-json"])
def test_published_llama3_json_vectors(name: str) -> None:
    tokenizer = load_fetched(f"{name}/tokenizer.json")
    assert tokenizer.identity.engine == "tiktoken"
    assert _passed(tokenizer, "llama-bpe") == 46


@pytest.mark.parametrize("language", UDHR)
@pytest.mark.parametrize("generation", ["llama2", "llama3", "llama4"])
def test_counts_of_the_reference_table(
    generation: str, language: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(generation)
    expected = UDHR[language][("llama2", "llama3", "llama4").index(generation)]
    text = _udhr(language)
    assert tokenizer.count(text) == expected
    assert tokenizer.count(text[i : i + 1000] for i in range(0, len(text), 1000)) == expected


def test_ids_of_meta(llama3: TiktokenTokenizer, llama4: TiktokenTokenizer) -> None:
    # llama-models 0.3.0, llama3/tests/api/test_tokenizer.py, BOS and EOS left out
    text = "This is a test sentence."
    assert llama3.encode(text) == [2028, 374, 264, 1296, 11914, 13]
    assert llama4.encode(text) == [3231, 373, 262, 1600, 17705, 26]


def test_ids_of_meta_llama2(llama2: SentencePieceTokenizer) -> None:
    assert llama2.encode("This is a test sentence.") == [910, 338, 263, 1243, 10541, 29889]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("This is \U0001f999.cpp", [2028, 374, 11410, 99, 247, 13, 11055]),  # llama.cpp#167
        ("3333+777", [8765, 18, 10, 15831]),  # llama.cpp#6914
        ("7777+3333", [15831, 22, 10, 8765, 18]),  # ollama#4082
        (" Vi\u1ec7t", [101798]),  # llama.cpp#7193: wrong without ignore_merges
        ("for 'manual'", [2000, 364, 20310, 6]),  # transformers#35938
        (" ...", [2564]),  # transformers#36622
        ("hello !", [15339, 758]),  # tokenizers#1543
        (".:.:", [100421]),  # tiktoken#60: one split of a token is not enough
        ("\u8bf7\u4f60\u57fa\u4e8e\u4ee5\u4e0b\u300c\u8bc4\u4f30\u6807\u51c6\u300d",
         [15225, 57668, 125510, 88852, 13177, 64479, 112494, 110778, 10646]),  # transformers#34403
    ],
)  # fmt: skip
def test_llama3_cases_from_public_reports(
    llama3: TiktokenTokenizer, text: str, ids: list[int]
) -> None:
    assert llama3.encode(text) == ids
    assert llama3.decode(ids) == text


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("This is \U0001f999.cpp", [910, 338, 29871, 243, 162, 169, 156, 29889, 8223]),
        ("<s>Hello", [529, 29879, 29958, 10994]),
        ("</s> x", [1533, 29879, 29958, 921]),  # llama.cpp#23840
        ("<s>[INST]", [529, 29879, 24566, 25580, 29962]),  # transformers#26455
        ("abs</s>USER", [6425, 829, 29879, 29958, 11889]),  # transformers#27230
        ("overheard", [975, 354, 538]),  # transformers#29625
        (" Hello", [29871, 15043]),  # lost by Metaspace(prepend_scheme="first")
        ("", []),
    ],
)
def test_llama2_cases_from_public_reports(
    llama2: SentencePieceTokenizer, text: str, ids: list[int]
) -> None:
    assert llama2.encode(text) == ids


def test_decoding_keeps_a_space_before_a_quote(llama3: TiktokenTokenizer) -> None:
    assert llama3.decode([1232, 364, 1874]) == "': 'search"  # transformers#32575


def test_three_spaces_of_llama2_are_not_visible_blocks(llama2: SentencePieceTokenizer) -> None:
    assert llama2.model.pieces[1678] == "\u2581\u2581\u2581"  # llama.cpp#2743
    assert llama2.decode([1678]) == "  "
    assert llama2.decode([29871]) == ""


@cache
def _oracle(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """The reference library itself, called as its own documentation says."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.data)
        return processor.encode
    assert isinstance(tokenizer, TiktokenTokenizer)
    import tiktoken

    encoding = tiktoken.Encoding(
        "oracle",
        pat_str=tokenizer.pattern,
        mergeable_ranks=dict(tokenizer.ranks),
        special_tokens=dict(tokenizer.special_ids),
    )
    return partial(encoding.encode, disallowed_special=())


def test_ids_equal_the_reference_library(tokenizer: Tokenizer) -> None:
    text = "\n\n".join(item.text for item in builtin())
    assert tokenizer.encode(text) == _oracle(tokenizer)(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("language", UDHR)
def test_ids_equal_the_reference_library_on_long_texts(tokenizer: Tokenizer, language: str) -> None:
    text = _udhr(language)
    assert tokenizer.encode(text) == _oracle(tokenizer)(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_converted_llama3_equals_tokenizers_itself(
    llama3: TiktokenTokenizer, llama3_json: bytes
) -> None:
    engine = Engine.from_str(llama3_json.decode())
    engine.encode_special_tokens = True
    for item in builtin():
        assert engine.encode(item.text, add_special_tokens=False).ids == llama3.encode(item.text)
    assert engine.encode("hi").ids == [128000, 6151]  # the template adds BOS


def test_published_json_in_tokenizers_itself(llama3: TiktokenTokenizer) -> None:
    engine = Engine.from_file(str(fetched("llama31-json/tokenizer.json")))
    engine.encode_special_tokens = True
    for item in builtin():
        assert engine.encode(item.text, add_special_tokens=False).ids == llama3.encode(item.text)


def test_qwen_keeps_the_ids_of_tokenizers() -> None:
    ours = load_fetched("qwen3/tokenizer.json")
    engine = Engine.from_file(str(fetched("qwen3/tokenizer.json")))
    assert ours.identity.engine == "tokenizers"
    text = "\n".join(item.text for item in builtin()) * 2  # long enough to be cut
    assert ours.encode(text) == engine.encode(text, add_special_tokens=False).ids
    assert ours.encode("e\u0301") == ours.encode("\u00e9")  # its normaliser composes


def test_smollm_from_its_gguf() -> None:
    from llamatool.checkpoint.gguf import GgufArray, read_file

    path = smollm_file()
    metadata = {
        key: value.read() if isinstance(value, GgufArray) else value
        for key, value in read_file(path).metadata.items()
    }
    tokenizer = from_gguf(metadata, where=path.name)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.add_bos) == (49152, 1, False)
    assert tokenizer.identity.name == "smollm-2"
    assert tokenizer.special_ids["<|im_end|>"] == 2
    assert 2 in tokenizer.eos_ids
    (note,) = tokenizer.identity.notes
    assert note.message.startswith("8 bytes are no tokens (0x04, 0x06, 0x13,")
    assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab"
    # The model's own pre-tokenizer, spelt with the library's components instead of expressions.
    content = json.loads(export(tokenizer, "json").files["tokenizer.json"])
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": True},
        ],
    }  # fmt: skip
    engine = Engine.from_str(json.dumps(content))
    engine.encode_special_tokens = True
    for item in builtin():
        assert tokenizer.encode(item.text) == engine.encode(item.text).ids
