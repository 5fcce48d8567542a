"""Texts and corpora measured; the corpus; estimates; differences and their causes; finding."""

import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest

from llamatool.errors import InputError
from llamatool.tokenizers import estimate as estimates
from llamatool.tokenizers.base import Tokenizer
from llamatool.tokenizers.compare import (
    Model,
    TextReport,
    bootstrap_ratio,
    context_use,
    control_note,
    estimated_column,
    exact_column,
    measure,
    measure_corpus,
    model_notes,
    nfc_note,
)
from llamatool.tokenizers.corpus import LANGUAGES, SAMPLES, builtin, from_folder, html_text
from llamatool.tokenizers.estimate import Estimator, estimate
from llamatool.tokenizers.find import Places, candidates, find
from llamatool.tokenizers.huggingface import HuggingFaceTokenizer
from llamatool.tokenizers.load import from_bytes
from llamatool.tokenizers.sentencepiece import SentencePieceTokenizer
from llamatool.tokenizers.texts import TextFacts, pieces
from llamatool.tokenizers.tiktoken import LLAMA4_PATTERN, TiktokenTokenizer
from llamatool.tokenizers.verify import compare_ids
from tests.tokenizers.conftest import golden, load_fetched, meta_file


def _measured(text: str, *tokenizers: Tokenizer, **options) -> TextReport:
    facts = TextFacts()
    parts = [text[i : i + 100] for i in range(0, len(text), 100)]
    return measure("t", pieces(parts, facts), tokenizers, facts, **options)


def test_a_report(llama3: TiktokenTokenizer, small: SentencePieceTokenizer) -> None:
    text = "The river wakes \u4e2d before <|eot_id|> the \U0001f999.\n" * 200
    report = _measured(text, llama3, small)
    first, second = report.results
    assert (report.num_characters, report.num_bytes) == (len(text), len(text.encode()))
    assert first.num_tokens == len(llama3.encode(text))
    assert second.num_tokens == len(small.encode(text))
    assert first.num_fragments == sum(i in llama3.fragment_ids for i in llama3.encode(text))
    assert report.characters_per_token(first) == len(text) / first.num_tokens
    assert report.bytes_per_token(first) == len(text.encode()) / first.num_tokens
    assert report.ratio_to_first(first) == 1
    assert report.ratio_to_first(second) == second.num_tokens / first.num_tokens
    assert report.tokens_per_word(first) == first.num_tokens / len(text.split())
    assert (first.num_control_strings, first.control_strings) == (200, ("<|eot_id|>",))
    assert second.num_control_strings == 0
    note = control_note(report)
    assert note is not None
    assert note.message.startswith("the text holds 200 strings that a chat server")


def test_special_tokens_and_bos_are_counted_on_request(llama3: TiktokenTokenizer) -> None:
    assert _measured("hi <|eot_id|>", llama3).results[0].num_tokens == 7
    assert _measured("hi <|eot_id|>", llama3, specials="all").results[0].num_tokens == 3
    assert _measured("hi <|eot_id|>", llama3, with_bos=True).results[0].num_tokens == 8


def test_byte_fragments_of_the_reference_texts(llama3: TiktokenTokenizer) -> None:
    shares = {}
    for language in ("en", "zh-Hans", "my", "ka"):
        text = golden(f"udhr/{language}.txt").read_text(encoding="utf-8")
        shares[language] = _measured(text, llama3).results[0].fragment_share
    rounded = {name: round(100 * (share or 0)) for name, share in shares.items()}
    assert rounded == {"en": 0, "zh-Hans": 6, "my": 96, "ka": 93}


def test_decomposed_vietnamese(llama3: TiktokenTokenizer) -> None:
    text = golden("udhr/vi.txt").read_bytes().decode()
    report = _measured(text, llama3)
    assert not report.nfc
    assert (report.results[0].num_tokens, report.results[0].num_nfc_tokens) == (6620, 2863)
    note = nfc_note(report)
    assert note is not None
    assert "is 2,863 tokens instead of 6,620 with Meta Llama 3" in note.message
    assert nfc_note(_measured(unicodedata.normalize("NFC", text), llama3)) is None
    hindi = golden("udhr/hi.txt").read_bytes().decode()  # not composed, but that costs nothing
    assert nfc_note(_measured(hindi, llama3)) is None


def test_the_built_in_corpus() -> None:
    texts = builtin()
    assert [text.code for text in texts] == [*LANGUAGES, *SAMPLES]
    for text in texts:
        assert unicodedata.is_normalized("NFC", text.text)
        assert not text.text.endswith("\n")
        assert "".join(text.lines) == text.text
        if text.aligned:
            assert len(text.lines) == 16
            assert all(line.strip() for line in text.lines)
    english = texts[0]
    assert (english.code, len(english.text)) == ("en", 1367)
    # A translation of a language that is written with the same letters must be another text.
    assert len({text.text for text in texts}) == len(texts)


def test_a_corpus_table(llama3: TiktokenTokenizer, small: SentencePieceTokenizer) -> None:
    columns = [exact_column(small), exact_column(llama3)]
    report = measure_corpus("builtin", builtin(), columns, reference="en")
    rows = {row.code: row for row in report.rows}
    for text in builtin():
        for column, tokenizer in enumerate((small, llama3)):
            assert rows[text.code].cells[column].num_tokens == len(tokenizer.encode(text.text))
    english, hindi = rows["en"].cells[1], rows["hi"].cells[1]
    assert english.premium is not None
    assert english.premium.value == 1
    assert hindi.premium is not None
    assert hindi.premium.value == hindi.num_tokens / english.num_tokens
    assert hindi.premium.low is not None
    assert hindi.premium.high is not None
    assert hindi.premium.low < hindi.premium.value < hindi.premium.high
    assert rows["python"].cells[1].premium is None
    assert rows["zh-Hans"].cells[1].tokens_per_word is None
    assert rows["ko"].cells[1].tokens_per_word is not None
    for row in report.rows:
        assert row.worse == (False, row.cells[1].num_tokens > row.cells[0].num_tokens)


def test_premiums_of_the_reference_texts(llama3: TiktokenTokenizer) -> None:
    corpus = from_folder(golden("udhr"), ["en", "my"])
    report = measure_corpus("udhr", corpus, [exact_column(llama3)], reference="en")
    premium = report.rows[1].cells[0].premium
    assert premium is not None
    assert round(premium.value, 2) == 14.54


def test_the_bootstrap() -> None:
    assert bootstrap_ratio([3, 4, 5], [3, 4, 5]) == (1.0, 1.0)
    low, high = bootstrap_ratio([10, 30, 20, 5] * 10, [10, 10, 10, 10] * 10)
    assert 1.2 < low < 65 / 40 < high < 2.1
    assert bootstrap_ratio([10, 30], [10, 10]) == bootstrap_ratio([10, 30], [10, 10])


def test_a_corpus_of_html() -> None:
    source = (
        "<html><body class=x><script>no</script><h1>Title &amp; more</h1><p>One\n <b>two</b></p>"
        "<ul><li> three </li></ul></body></html>"
    )
    assert html_text(source) == "Title & more\nOne two\nthree"


def test_a_corpus_folder(tmp_path: Path) -> None:
    (tmp_path / "en.txt").write_text("one\ntwo\nthree")
    (tmp_path / "xx.html").write_text("<body><p>un</p><p>deux</p></body>")
    texts = from_folder(tmp_path)
    assert [(t.code, t.name, t.text) for t in texts] == [
        ("en", "English", "one\ntwo\nthree"),
        ("xx", "xx", "un\ndeux"),
    ]
    with pytest.raises(InputError, match="no text `de`"):
        from_folder(tmp_path, ["de"])
    with pytest.raises(InputError, match="holds no texts"):
        from_folder(tmp_path / "none")


@pytest.mark.parametrize("name", ["llama-2", "llama-3", "llama-4"])
def test_estimates_are_as_good_as_they_say(name: str, request: pytest.FixtureRequest) -> None:
    """On the fourteen languages of the corpus, which the rates were not fitted to."""
    tokenizer: Tokenizer = request.getfixturevalue(name.replace("-", ""))
    errors = [
        abs(estimate(name, text.text) / tokenizer.count(text.text) - 1)
        for text in builtin()
        if text.aligned
    ]
    assert max(errors) < estimates.LARGEST_ERROR[name] + 0.005
    assert sorted(errors)[7] < 0.105  # the median


def test_estimates_add_up() -> None:
    estimator = Estimator("llama-3")
    for part in ("a" * 600, "b" * 400):
        estimator.add(part)
    assert estimator.num_tokens == 241
    assert estimate("llama-3", "\ufffe" * 10) == 25  # of no class
    assert estimated_column("llama-3").exact is False


def test_what_a_text_takes_of_a_model() -> None:
    model = Model("Llama 3 8B", 8192, 128256, 128000, (128001,), lambda n: 131072 * n)
    use = context_use(model, 6678, 10000, add_bos=False)
    assert use.kv_bytes == 875_298_816
    assert use.share == 6678 / 8192
    assert use.characters_that_fit == 10000 * 8192 // 6678
    assert context_use(model, 6678, 10000, add_bos=True).kv_bytes == 875_298_816 + 131072
    assert context_use(replace(model, context=None), 5, 5, add_bos=False).share is None


def test_a_tokenizer_of_another_model(
    llama3: TiktokenTokenizer, small: SentencePieceTokenizer
) -> None:
    own = Model("own", 8192, 128256, 128000, (128001, 128009), lambda n: n)
    assert model_notes(llama3, own) == ()
    other = Model("other", 4096, 32000, 1, (2,), lambda n: n)
    assert [note.code for note in model_notes(llama3, other)] == ["vocab_size", "bos_id", "eos_id"]
    assert [note.code for note in model_notes(small, own)] == ["vocab_size", "bos_id", "eos_id"]


def test_the_same_tokenizer_in_two_forms(small_bpe: TiktokenTokenizer, small_json: bytes) -> None:
    texts = [(item.code, item.text) for item in builtin()]
    verdict = compare_ids(small_bpe, from_bytes(small_json, where="json"), texts)
    assert verdict.same
    assert verdict.num_texts == 19
    assert verdict.num_tokens[0] == verdict.num_tokens[1]


def test_cause_another_vocabulary() -> None:
    llama2 = load_fetched("llama2/tokenizer.model")
    verdict = compare_ids(llama2, load_fetched("mistral-as-llama2/tokenizer.json"), [("t", "0 a")])
    assert verdict.first is not None
    assert verdict.first.cause.startswith("different vocabularies: id ")


def test_cause_another_expression(llama3: TiktokenTokenizer) -> None:
    # What a conversion with the wrong expression does: Llama 4's splits words by their case.
    other = TiktokenTokenizer(
        llama3.ranks,
        pattern=LLAMA4_PATTERN,
        specials=llama3.special_ids,
        identity=llama3.identity,
    )
    verdict = compare_ids(llama3, other, [("same", "the river"), ("t", "a getElementById")])
    assert verdict.first is not None
    assert (verdict.num_different, verdict.first.text) == (1, "t")
    assert (verdict.first.index, verdict.first.character) == (1, 1)
    assert verdict.first.left_tokens[0] == b" getElement"
    assert verdict.first.cause == (
        "same vocabulary, but different expressions split the text first"
    )


def test_cause_the_dummy_prefix_and_metaspace(small: SentencePieceTokenizer) -> None:
    import json

    from llamatool.tokenizers.convert import sentencepiece_to_json

    content = sentencepiece_to_json(small.model, where="x")
    plain = {**content, "normalizer": {"type": "Replace", "pattern": {"String": " "},
                                       "content": "\u2581"}}  # fmt: skip
    verdict = compare_ids(small, _json(json.dumps(plain)), [("t", "the river")])
    assert verdict.first is not None
    assert "puts a space in front of a text (dummy prefix)" in verdict.first.cause
    metaspace = {
        **content,
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581",
                          "prepend_scheme": "first", "split": False},
    }  # fmt: skip
    verdict = compare_ids(small, _json(json.dumps(metaspace)), [("t", " the river")])
    assert verdict.first is not None
    assert "drops the first space of a text" in verdict.first.cause


def test_cause_composition(small_bpe: TiktokenTokenizer, small_json: bytes) -> None:
    import json

    content = {**json.loads(small_json), "normalizer": {"type": "NFC"}}
    verdict = compare_ids(small_bpe, _json(json.dumps(content)), [("t", "cafe\u0301")])
    assert verdict.first is not None
    assert verdict.first.cause.startswith("one of the two composes the text first (NFC)")


def test_cause_merges_that_are_not_ignored(llama3: TiktokenTokenizer) -> None:
    other = load_fetched("llama32-token-counter/tokenizer.json")
    verdict = compare_ids(llama3, other, [("t", " Vi\u1ec7t")])
    assert verdict.first is not None
    assert verdict.first.left == (101798,)
    assert verdict.first.cause.startswith("`ignore_merges` is false in ")
    assert any("vocabulary sizes" in remark for remark in verdict.remarks)


def _json(text: str) -> HuggingFaceTokenizer:
    tokenizer = from_bytes(text.encode(), where="changed")
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer


def test_finding_tokenizers(tmp_path: Path, small_file: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "tokenizer.model").write_bytes(small_file.read_bytes())
    (tmp_path / "tokenizer.json").write_text("damaged")
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.model").write_bytes(meta_file("llama3").read_bytes())
    places = Places((tmp_path / "a",), hub_cache=tmp_path / "hub")
    found = list(candidates(places))
    assert found[0] == deep / "tokenizer.model"
    assert snapshot / "tokenizer.model" in found
    assert find("llama-2", places) is None  # a SentencePiece model, but not Llama 2's
    llama3 = find("llama-3", places)
    assert llama3 is not None
    assert llama3.identity.name == "llama-3"
    assert find("llama-2", Places((tmp_path / "tokenizer.json",))) is None  # passed over
