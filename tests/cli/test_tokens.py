"""The tokens command: its whole output, its keys, its exit codes and its errors."""

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llamatool.cli import tokens as command
from llamatool.tokenizers import find
from llamatool.tokenizers import load as loading
from llamatool.tokenizers.modelproto import SentencePieceModel, build_model
from tests.conftest import Finished
from tests.test_docs import described, key_paths
from tests.tokenizers.conftest import ROOT, fetched, meta_file

Run = Callable[..., Finished]


# Every run of the command loads its tokenizers anew; here the same files are loaded once.
_loaded_once = cache(loading.load)


@pytest.fixture(autouse=True)
def llama3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Llama 3 and 4 of the package are found; nothing else is."""
    monkeypatch.setenv("LLAMATOOL_TOKENIZERS", "")
    monkeypatch.setattr(loading, "load", _loaded_once)
    monkeypatch.setattr(command, "_pocket_folder", lambda: tmp_path / "pocket")
    monkeypatch.chdir(tmp_path)
    return meta_file("llama3")


@pytest.fixture
def small_json_file(tmp_path: Path, tiny: Path) -> Path:
    """The tiny model as a tokenizer.json."""
    from llamatool.tokenizers.export import export

    path = tmp_path / "tiny.json"
    path.write_bytes(export(loading.load(tiny), "json").files["tokenizer.json"])
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A SentencePiece model whose tokens one can count by hand."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words = ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"]
    model = SentencePieceModel(
        pieces=[*pieces, *words],
        scores=[0.0] * 259 + [-6.0, -7.0, -8.0, -1.0, -2.0, -3.0],
        types=[2, 3, 3, *[6] * 256, *[1] * 6],
    )
    path = tmp_path / "tiny.model"
    path.write_bytes(build_model(model))
    return path


def test_the_answer_comes_first(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("The river wakes before the town does.")
    done = run("tokens", "t.txt", "-t", "llama3", "-t", "llama4")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "t.txt: 8 tokens with Meta Llama 4 (+0 % vs Meta Llama 3)"
    assert lines[2].split() == [
        *("tokenizer", "tokens", "chars/token", "bytes/token", "vs", "first", "fragments"),
        "tokens/word",
    ]
    assert lines[3].split() == ["Meta", "Llama", "3", "8", "4.62", "4.62", "first", "0.0", "%",
                                "1.14"]  # fmt: skip
    assert "82e9d319" in done.stdout
    assert done.stderr == ""


def test_a_text_of_words_and_of_a_pipe(run: Run) -> None:
    assert run("tokens", "two words", "-t", "llama3").stdout.startswith('"two words": 2 tokens')
    piped = run("tokens", "-", "-t", "llama3", stdin=b"two words")
    assert piped.stdout.startswith("standard input: 2 tokens with Meta Llama 3")


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (("--count", "hi <|eot_id|>"), "7"),
        (("--count", "hi <|eot_id|>", "--special", "all"), "3"),
        (("--count", "hi <|eot_id|>", "--special", "<|eot_id|>"), "3"),
        (("--count", "hi <|eot_id|>", "--bos"), "8"),
        (("--count", "one", "two words"), "3"),
        (("--count", "e\u0301"), "2"),
        (("--count", "e\u0301", "--nfc"), "1"),
        (("--count", "This is a test sentence.", "-t", "llama4"), "6"),
    ],
)
def test_one_number(run: Run, arguments: tuple[str, ...], number: str) -> None:
    done = run("tokens", *arguments)
    assert (done.exit_code, done.stdout) == (0, number + "\n")


def test_count_reads_a_pipe(run: Run) -> None:
    assert run("tokens", "--count", stdin=b"two words").stdout == "2\n"


def test_ids_and_borders(run: Run) -> None:
    assert run("tokens", "--ids", "hi <|eot_id|>").stdout == "6151 83739 68 354 851 91 29\n"
    shown = run("tokens", "--show", "a \U0001f999\nb", "-t", "llama3").stdout
    assert shown == "a\u2502<20 F0 9F>\u2502<A6>\u2502<99>\u2502\u21b5\u2502\nb\u2502\n"
    special = run("tokens", "--show", "x<|eot_id|>", "--special", "all").stdout
    assert special == "x\u2502<|eot_id|>\u2502\n"


def test_borders_are_coloured_on_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[30;48;5;153mtwo\x1b[0m" in run("tokens", "--show", "two words").stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run("tokens", "--show", "two words").stdout


def test_figures_of_a_tokenizer_by_hand(run: Run, tiny: Path) -> None:
    done = run("tokens", "ab ab\u00e9", "-t", str(tiny), "--json")
    (text,) = json.loads(done.stdout)["texts"]
    assert (text["characters"], text["bytes"], text["words"], text["nfc"]) == (6, 7, 2, True)
    (result,) = text["results"]
    # _ab, _ab, and two bytes of the accented letter
    assert result["tokens"] == 4
    assert result["byte_fragment_share"] == 0.5
    assert result["characters_per_token"] == 1.5
    assert result["bytes_per_token"] == 1.75
    assert result["tokens_per_word"] == 2
    assert (result["recognised"], result["engine"]) == (None, "sentencepiece")


def test_json_keys(run: Run) -> None:
    found = json.loads(
        run("tokens", "a", "-t", "llama3", "--config", "llama-3.1-8b", "--json").stdout
    )
    assert list(found) == ["schema", "texts", "warnings"]
    (text,) = found["texts"]
    assert list(text) == [
        *("name", "characters", "bytes", "words", "nfc", "results", "warnings"),
    ]
    (result,) = text["results"]
    assert list(result) == [
        *("tokenizer", "recognised", "kind", "engine", "sha256", "exact", "tokens"),
        *("characters_per_token", "bytes_per_token", "tokens_per_word", "ratio_to_first"),
        *("byte_fragment_share", "nfc_tokens", "control_strings", "error", "models"),
    ]
    assert (result["recognised"], result["exact"], result["tokens"]) == ("llama-3", True, 1)
    assert result["models"] == [
        {
            "model": "llama-3.1-8b",
            "context": 131072,
            "context_share": 2 / 131072,
            "characters_that_fit": 131071,
            "kv_bytes": 2 * 131072,
        }
    ]


def test_what_a_model_says(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("The river wakes before the town does. " * 20_000)
    done = run("tokens", "t.txt", "-t", "llama3", "--config", "llama-3.1-8b")
    assert "llama-3.1-8b: 122 % of 131,072, does not fit," in done.stdout.splitlines()[0]
    assert "KV cache 19.53 GiB" in done.stdout


def test_models_go_with_the_tokenizer_of_their_vocabulary(run: Run) -> None:
    done = run(
        "tokens", "a b", "-t", "llama3", "-t", "llama4", "--json",
        "--config", "llama-3.1-8b", "--config", "llama-4-scout-17b-16e",
    )  # fmt: skip
    results = json.loads(done.stdout)["texts"][0]["results"]
    assert [[m["model"] for m in r["models"]] for r in results] == [
        ["llama-3.1-8b"],
        ["llama-4-scout-17b-16e"],
    ]
    assert done.stderr == ""


def test_a_tokenizer_that_is_not_the_models_own(run: Run) -> None:
    done = run("tokens", "a", "-t", "llama3", "--config", "llama-2-7b")
    assert "llama-2-7b has 32,000 rows: not its tokenizer" in done.stderr
    assert "BOS is 128000 in the tokenizer and 1 in llama-2-7b" in done.stderr


def test_warnings(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("hi <|eot_id|> <|begin_of_text|>")
    done = run("tokens", "t.txt", "-t", "llama3")
    assert done.stderr == (
        "warning: t.txt: the text holds 2 strings that a chat server would read as control tokens "
        "(<|eot_id|>, <|begin_of_text|>); here they are counted as plain text\n"
    )
    (tmp_path / "v.txt").write_text("Vie\u0323\u0302t Nam " * 9)
    assert "decomposed characters: composed (NFC) the text is" in run("tokens", "v.txt").stderr


def test_csv(run: Run) -> None:
    done = run("tokens", "one two", "x", "-t", "llama3", "--csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [(row["text"], row["tokens"]) for row in rows] == [('"one two"', "2"), ('"x"', "1")]
    assert rows[0]["characters_per_token"] == "3.5"


def test_lines(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"one two\r\n\nthree")
    done = run("tokens", "t.txt", "--per-line", "-t", "llama3", "--csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [(row["text"], row["tokens"]) for row in rows] == [
        ("t.txt:1", "2"),
        ("t.txt:2", "0"),
        ("t.txt:3", "1"),
    ]


def test_the_corpus(run: Run) -> None:
    done = run("tokens", "-t", "llama3", "-t", "llama4")
    assert done.exit_code == 0
    assert done.stdout.startswith("With Meta Llama 4, Hindi needs 1.6 times the tokens of English")
    assert (
        "Premium: tokens of the same content / tokens of `en`, with 95 % intervals" in done.stdout
    )
    english = next(x for x in done.stdout.splitlines() if x.strip().startswith("English"))
    assert "296\u2191" in english  # one token more than Llama 3


def test_the_corpus_as_json(run: Run) -> None:
    found = json.loads(run("tokens", "-t", "llama3", "--lang", "hi,zh-Hans", "--json").stdout)
    assert list(found) == ["schema", "corpus", "reference", "texts"]
    assert [text["name"] for text in found["texts"]] == ["en", "hi", "zh-Hans"]
    hindi = found["texts"][1]["results"][0]
    assert list(hindi) == [
        *("tokenizer", "recognised", "kind", "engine", "sha256", "exact", "tokens"),
        *("characters_per_token", "tokens_per_word", "premium", "premium_interval"),
        "worse_than_previous",
    ]
    assert hindi["premium"] == pytest.approx(660 / 295)
    low, high = hindi["premium_interval"]
    assert low < hindi["premium"] < high


def test_the_corpus_as_csv(run: Run) -> None:
    rows = list(csv.DictReader(io.StringIO(run("tokens", "-t", "llama3", "--csv").stdout)))
    assert len(rows) == 19
    assert rows[0]["premium"] == "1"
    assert rows[-1]["premium"] == ""


def test_a_corpus_of_ones_own(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "en.txt").write_text("one two")
    (folder / "de.txt").write_text("eins zwei drei")
    done = run("tokens", "--corpus", "texts", "-t", "llama3", "--json")
    found = json.loads(done.stdout)
    assert [text["name"] for text in found["texts"]] == ["de", "en"]


def test_a_generation_that_is_not_here_is_estimated_apart(run: Run) -> None:
    done = run("tokens", "The river wakes.")
    assert "Estimates, since no tokenizer file was found" in done.stdout
    assert "Meta Llama 2  \u2248 4  within 11 % on most texts" in done.stdout
    results = json.loads(run("tokens", "The river wakes.", "--json").stdout)["texts"][0]["results"]
    assert [(r["exact"], r["ratio_to_first"]) for r in results] == [
        (True, 1.0),
        (True, 1.0),
        (False, None),
    ]
    assert results[2]["error"] == 0.11
    assert "\u2248 Estimates" in run("tokens").stdout


def test_without_any_tokenizer(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_in_packages", lambda: iter(()))
    done = run("tokens", "The river wakes.", "--plot", "t.svg")
    assert done.exit_code == 0
    assert done.stdout.startswith(
        '"The river wakes.": \u2248 4 with Meta Llama 2, \u2248 4 with Meta Llama 3, '
        "\u2248 4 with Meta Llama 4 tokens (estimates, no tokenizer file found)"
    )
    results = json.loads(run("tokens", "The river wakes.", "--json").stdout)["texts"][0]["results"]
    assert [r["exact"] for r in results] == [False] * 3
    assert run("tokens", "--csv").stdout.count("false") == 57
    assert "(estimates)" in _plotted(run, tmp_path)
    failed = run("tokens", "--count", "x")
    assert failed.exit_code == 4
    assert "hint: pip install --no-deps llama-models" in failed.stderr


def _plotted(run: Run, tmp_path: Path) -> str:
    assert run("tokens", "--plot", "corpus.svg").exit_code == 0
    return (tmp_path / "corpus.svg").read_text()


def test_the_pocket_model_is_counted_too(run: Run, tmp_path: Path, small_json_file: Path) -> None:
    (tmp_path / "pocket").mkdir()
    (tmp_path / "pocket" / "tokenizer.json").write_bytes(small_json_file.read_bytes())
    done = run("tokens", "The river wakes.")
    # Named, last, and not the one that the answer speaks of.
    assert done.stdout.startswith('"The river wakes.": 4 tokens with Meta Llama 4')
    assert "\npocket " in done.stdout
    assert run("tokens", "a", "-t", "pocket", "--count").stdout == "1\n"
    corpus = json.loads(run("tokens", "--json").stdout)["texts"][0]["results"]
    assert [r["exact"] for r in corpus] == [True, True, True, False]
    assert not corpus[2]["worse_than_previous"]  # a smaller vocabulary


def test_a_folder_of_tokenizers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMATOOL_TOKENIZERS", "nowhere")
    missing = run("tokens", "a", "-t", "llama3", "--count")
    assert (missing.exit_code, missing.stdout) == (0, "1\n")
    assert missing.stderr == ("warning: LLAMATOOL_TOKENIZERS names `nowhere`, which is not there\n")
    monkeypatch.setenv("LLAMATOOL_TOKENIZERS", str(fetched("llama2/tokenizer.model").parent))
    assert run("tokens", "--count", "-t", "llama2", "<s>Hello").stdout == "4\n"
    results = json.loads(run("tokens", "a", "--json").stdout)["texts"][0]["results"]
    assert [r["recognised"] for r in results] == ["llama-2", "llama-3", "llama-4"]


def test_plots(run: Run, tmp_path: Path) -> None:
    assert run("tokens", "-t", "llama3", "--plot", "a.svg").exit_code == 0
    assert run("tokens", "one", "two three", "-t", "llama3", "--plot", "b.svg").exit_code == 0
    for name, bars in (("a.svg", 14), ("b.svg", 2)):
        root = ElementTree.fromstring((tmp_path / name).read_text())
        # one background, one in the legend, and the bars
        assert len(root.findall("{http://www.w3.org/2000/svg}rect")) == bars + 2
    assert not list(tmp_path.glob("*.part"))


def test_verify(run: Run, tmp_path: Path, tiny: Path, llama3: Path) -> None:
    same = run("tokens", "verify", "llama3", str(llama3))
    assert same.exit_code == 0
    assert same.stdout.startswith("the same ids: 56 texts")
    (tmp_path / "t.txt").write_text("ab")
    differ = run("tokens", "verify", "llama3", str(tiny), "--text", "t.txt", "--json")
    assert differ.exit_code == 1
    found = json.loads(differ.stdout)
    assert list(found) == [
        *("schema", "same", "left", "right", "texts", "characters", "tokens"),
        *("different_texts", "first_difference", "remarks"),
    ]
    assert found["same"] is False
    assert found["first_difference"]["cause"].startswith("different vocabularies")
    shown = run("tokens", "verify", "llama3", str(tiny))
    assert "First difference" in shown.stdout


def test_convert(run: Run, tmp_path: Path, tiny: Path) -> None:
    done = run("tokens", "convert", str(tiny), "out", "--to", "json")
    assert done.exit_code == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert run("tokens", "verify", str(tiny), "out").exit_code == 0
    again = run("tokens", "convert", str(tiny), "out", "--to", "json")
    assert (again.exit_code, again.stderr.splitlines()[0]) == (
        2,
        "error: `tokenizer.json` exists already",
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("x", "-t", "nothing"), 2, "`nothing` is no tokenizer"),
        (("x", "-t", "llama2"), 4, "no tokenizer of llama2 on this machine"),
        (("missing.txt",), 3, "no such file"),
        (("some/where",), 3, "no such file"),
        ((".",), 3, "this is a folder, not a text"),
        (("--count", "x", "-t", "llama3", "-t", "llama4"), 2, "--count prints one number"),
        (("x", "--json", "--csv"), 2, "exclude each other"),
        (("x", "--to", "json"), 2, "--to is for `tokens convert`"),
        (("--lang", "xx"), 2, "the built-in corpus has no `xx`"),
        (("--corpus", "nowhere"), 3, "the folder holds no texts"),
        (("verify", "llama3", "llama4", "llama3"), 2, "compares two tokenizers"),
        (("verify", "llama3", "llama4", "--text", "no.txt"), 3, "cannot read the text"),
        (("convert", "llama3", "out"), 2, "needs a tokenizer, a folder and a form"),
        (("convert", "llama3", "out", "--to", "spm"), 3, "cannot be written in that form"),
        (("x", "--special", "<|nothing|>", "-t", "llama3"), 2, "is no special token"),
        (("x", "-t", "llama3", "--plot", "no/where.svg"), 4, "cannot write the file"),
    ],
)
def test_errors(run: Run, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = run("tokens", *arguments)
    assert done.exit_code == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbfx", "byte order mark"),
        (b"x\r\ny", "CR LF"),
        (b"x\0y", "NUL character"),
        (b"x\xff", "no UTF-8 in 1 place"),
    ],
)
def test_odd_files_get_one_line(run: Run, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "odd.txt").write_bytes(content)
    for arguments in (("--count",), ("-t", "llama3")):
        done = run("tokens", "odd.txt", *arguments)
        assert done.exit_code == 0
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("warning: odd.txt: ")
        assert message in done.stderr


def test_an_argument_that_is_no_text(run: Run) -> None:
    # What a shell passes for bytes that are no UTF-8.
    done = run("tokens", "a\udcffb", "--count")
    assert (done.exit_code, done.stdout) == (0, "3\n")
    assert "1 lone surrogate" in done.stderr


def test_the_json_page_names_every_key(run: Run, tmp_path: Path, tiny: Path) -> None:
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    (tmp_path / "v.txt").write_text("Vie\u0323\u0302t " * 9)
    model = ("--config", "llama-2-7b")
    runs = {
        "tokens": ("v.txt", "-t", "llama3", *model),
        "tokens, without texts": ("--lang", "de"),
        "tokens verify": ("verify", "llama3", str(tiny)),
        "tokens convert": ("convert", str(tiny), "out", "--to", "json"),
    }
    for section, words in runs.items():
        found = key_paths(json.loads(run("tokens", *words, "--json").stdout))
        found = {path for path in found if not path.startswith("files.")}
        assert found == described(page, section), section


def test_nothing_heavy_is_loaded_to_count(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("The river wakes.")
    code = (
        "import sys\n"
        "sys.argv = ['llamatool', 'tokens', '--count', 't.txt']\n"
        "from llamatool.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'rich', 'huggingface_hub', 'numpy', 'transformers', 'tokenizers',\n"
        "         'sentencepiece', 'llama_models', 'gguf'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
        env=dict(os.environ), check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["4", "[]"]
