import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.convert.models import rewrite, save_llama, tensors

from .runner import ROOT, run


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("source") / "hf"
    save_llama(folder)
    return folder


def test_there_and_back(tmp_path: Path, source: Path) -> None:
    result = run("convert", source, tmp_path / "meta", "--mp", 2, "--no-tokenizer")
    assert result.code == 0, result.err
    assert result.out.splitlines()[0] == f"written to  {tmp_path / 'meta'}"
    assert "every piece of the source found again in the output" in result.out
    assert "converting: 100 % of" in result.err
    assert "\x1b" not in result.out + result.err
    back = run("convert", tmp_path / "meta", tmp_path / "hf", "--no-tokenizer", "-q")
    assert (back.code, back.err) == (0, "")
    expected, found = tensors(source), tensors(tmp_path / "hf")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert run("verify", source, tmp_path / "meta").code == 0


def test_dry_run_writes_nothing(tmp_path: Path, source: Path) -> None:
    result = run("convert", source, tmp_path / "out", "--no-tokenizer", "--dry-run", "--mp", 4)
    assert result.code == 0
    assert not (tmp_path / "out").exists()
    lines = result.out.splitlines()
    assert "to           Meta layout, 4 files" in lines
    row = next(line for line in lines if "layers.1.attention.wk.weight" in line)
    assert "model.layers.1.self_attn.k_proj.weight" in row
    assert "shared out to 4 files, rows of each head reordered, halves to pairs" in row


def test_json(tmp_path: Path, source: Path) -> None:
    plan = run("convert", source, tmp_path / "o", "--no-tokenizer", "--dry-run", "--json")
    content = json.loads(plan.out)
    assert list(content) == [
        *("schema", "source", "from", "to", "model", "variant", "dtype", "dry_run", "bytes"),
        *("files", "small_files", "tensors", "lost", "dropped", "notes"),
    ]
    assert (content["from"], content["to"]) == ("huggingface", "meta")
    done = run("convert", source, tmp_path / "o", "--no-tokenizer", "--json", "-q")
    content = json.loads(done.out)
    assert list(content) == [
        *("schema", "source", "from", "to", "model", "variant", "dtype", "destination", "files"),
        *("verify", "bytes_read", "bytes_written", "cast", "seconds", "lost", "dropped", "notes"),
    ]
    assert content["verify"] == {"mode": "hash", "ok": True, "problem": None}
    stored = sum(t.numel() * t.element_size() for t in tensors(source).values())
    assert content["bytes_written"] == content["bytes_read"] == stored


def key_paths(value: object, prefix: str = "") -> set[str]:
    if isinstance(value, dict):
        inner = [(f"{prefix}.{key}" if prefix else key, item) for key, item in value.items()]
        return {path for path, _ in inner}.union(*(key_paths(item, path) for path, item in inner))
    if isinstance(value, list):
        return set().union(*(key_paths(item, f"{prefix}[]") for item in value))
    return set()


def test_json_page_names_every_key(tmp_path: Path, source: Path) -> None:
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    described = {
        command: set(
            re.findall(
                r"^\| `([^`]+)` \|",
                page.split(f"\n## {command}\n")[1].split("\n## ")[0],
                re.MULTILINE,
            )
        )
        for command in ("convert", "verify")
    }
    content = tensors(source)
    content["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    rewrite(tmp_path / "odd", content, beside=source)
    runs = [
        ("convert", tmp_path / "odd", tmp_path / "out", "--to", "hf", "--dry-run"),
        ("convert", tmp_path / "odd", tmp_path / "out", "--to", "hf", "--dtype", "fp16"),
        ("convert", source, tmp_path / "meta", "--base", "-q"),
        ("convert", tmp_path / "meta", tmp_path / "back", "-q"),
    ]
    found = set()
    for arguments in runs:
        result = run(*arguments, "--no-tokenizer", "--json")
        assert result.code == 0, result.err
        found |= key_paths(json.loads(result.out))
    assert found == described["convert"]
    result = run("verify", source, tmp_path / "out", "--json")
    assert key_paths(json.loads(result.out)) == described["verify"]


ERRORS = {
    "inside the source": (["{source}", "{source}/x"], 2, "the output would lie inside the source"),
    "no weights": (["llama-3.1-8b", "x"], 2, "has no weights here to convert"),
    "--mp for safetensors": (["{source}", "x", "--to", "hf", "--mp", "2"], 2, "--mp is for Meta"),
    "a number that does not fit": (["{source}", "x", "--mp", "3"], 3, "cannot be shared by 3"),
    "wrong model": (["{source}", "x", "--model", "llama-3-8b"], 2, "this is not Llama 3 8B"),
    "unknown model": (["{source}", "x", "--model", "nobody"], 2, "no model is called `nobody`"),
    "no such layout": (["{source}", "x", "--to", "gguf"], 2, "gguf"),
    "no tokenizer": (["{source}", "x"], 3, "there is no tokenizer with the weights"),
    "no such source": (["./absent", "x"], 3, "no such file or folder"),
    "no room to write": (["{source}", "/proc/x"], 4, "/proc/x"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(tmp_path: Path, source: Path, case: str) -> None:
    arguments, code, expected = ERRORS[case]
    given = [argument.format(source=source) for argument in arguments]
    if "tokenizer" not in case:
        given.append("--no-tokenizer")
    result = run("convert", *given, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert result.code == code, result.err
    assert expected in result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    assert not (tmp_path / "x").exists()


def test_a_failed_verification_ends_with_1(tmp_path: Path, source: Path) -> None:
    program = (
        "import sys; from llamatool.checkpoint import convert as engine;"
        "engine.reordered = lambda values, *_: values;"
        "from llamatool.cli.app import main; main()"
    )
    command = [sys.executable, "-c", program, "convert", str(source), str(tmp_path / "out")]
    result = subprocess.run(
        [*command, "--no-tokenizer", "-q"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "verified    FAILED" in result.stdout
    assert not (tmp_path / "out" / "params.json").exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_interruption_says_how_to_go_on(tmp_path: Path, source: Path, name: str) -> None:
    program = (
        "import time; from llamatool.checkpoint import rawio;"
        "into = rawio.Sources.into;"
        "rawio.Sources.into = lambda *a: (time.sleep(0.2), into(*a));"
        "from llamatool.cli.app import main; main()"
    )
    command = [sys.executable, "-c", program, "convert", str(source), str(tmp_path / "out")]
    process = subprocess.Popen([*command, "--no-tokenizer"], cwd=ROOT, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.readline().startswith(b"needs ")
    time.sleep(0.5)
    process.send_signal(getattr(signal, name))
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() == 130
    assert "run the same command with --resume" in said
    assert "Traceback" not in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".llamatool-partial"]
    result = run("convert", source, tmp_path / "out", "--no-tokenizer", "--resume", "-q")
    assert result.code == 0, result.err
    assert run("verify", source, tmp_path / "out").code == 0


def test_torch_is_not_on_the_path(tmp_path: Path, source: Path) -> None:
    program = (
        "import sys; from llamatool.cli.app import app;"
        "app(sys.argv[1:], standalone_mode=False);"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", program, "convert", str(source), str(tmp_path / "out")]
    subprocess.run([*command, "--no-tokenizer", "-q"], cwd=ROOT, capture_output=True, check=True)
