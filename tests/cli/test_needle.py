"""`llamatool needle` as the shell sees it: output, exit codes, files, interruption."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.runner import ROOT, run

pytest.importorskip("torch")

QUICK = ("--length", "512", "--depths", "3", "--trials", "1", "--score", "forced")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def needle(*args: object):
    return run("needle", *args, env=ONE_THREAD)


def test_without_a_model_it_tests_the_pocket_model_and_says_so(tmp_path):
    found = needle(*QUICK, "--out", tmp_path)
    assert found.code == 0, found.err
    assert "pocket is the built-in model" in found.err
    assert "no language model" in found.err
    assert "llamatool needle FOLDER" in found.err
    assert "plan: single" in found.err
    assert "template: raw" in found.err
    assert "  512     3       3  100.0%  43.8% to 100.0%      1" in found.out
    assert "controls: without the needle 0/1, with another key 0/1" in found.out
    assert "effective length: 512 tokens" in found.out
    assert "\x1b" not in found.out
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"results.jsonl", "summary.json", "grid.csv", "grid.svg", "report.html"}


def test_json_is_the_summary_alone():
    found = needle("pocket", *QUICK, "--json")
    assert found.code == 0, found.err
    content = json.loads(found.out)
    assert content["schema"] == 1
    assert content["by_length"] == [
        {"length": 512, "trials": 3, "hits": 3, "interval": [0.4385, 1.0]}
    ]
    assert content["controls"]["no_needle"] == {"trials": 1, "hits": 0}


def test_plan_runs_nothing():
    found = needle("--length", "64k", "--plan")
    assert found.code == 0, found.err
    assert "440,178 tokens to read" in found.out
    assert "KV cache" in found.out
    found = needle("--length", "1k:64k:x2", "--mode", "sweep", "--plan", "--json")
    content = json.loads(found.out)
    assert content["naive_prefill_tokens"] > 20 * content["prefill_tokens"]


def test_exit_code_1_below_the_share_asked_for():
    assert needle(*QUICK, "--no-control", "--fail-under", "0.95").code == 0
    far = ("--length", "8k", "--mode", "packed", *QUICK[2:], "--trials", "3", "--no-control")
    found = needle("pocket-rope", *far, "--fail-under", "1")
    assert found.code == 1
    assert "8k is beyond the trained window of 4k tokens" in found.err
    assert "All depths together" in found.out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--length", "x"), 2, "is not a number of tokens"),
        (("--length", "64"), 2, "the smallest length that works is"),
        (("--depths", "0,200"), 2, "names no depths"),
        (("--budget", "10"), 2, "is no budget"),
        (("--straddle", "pocket-rope", "--length", "512"), 2, "chunked layers"),
        (("a", "b"), 2, "one MODEL at a time"),
        (("compare", "a"), 2, "takes two result folders"),
        (("compare", "no-such-a", "no-such-b"), 3, "no such folder of results"),
        (("--show", "1"), 2, "needs --out DIR"),
        (("no-such-folder",), 3, "is no file or folder"),
        (("llama-3.1-8b",), 3, "a configuration without weights"),
        (("--haystack", "no-such-file"), 3, "no such file or folder"),
        (("--device", "cuda:7", "--length", "512", "--trials", "1"), 4, "there is no"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_errors(args, code, message):
    found = needle(*args)
    assert found.code == code, found.err
    assert message in found.err
    assert "Traceback" not in found.err
    assert found.out == ""


def test_what_does_not_fit_is_refused_with_its_numbers():
    found = needle("--length", "4000000M", "--depths", "1", "--trials", "1", "--mode", "packed")
    assert found.code == 4, found.err
    assert "KV cache" in found.err
    assert "are free" in found.err


def test_without_torch_it_says_what_to_install(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "found = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'torch' else found(name, *more)\n",
        encoding="utf-8",
    )
    found = run("needle", *QUICK, env={**ONE_THREAD, "PYTHONPATH": str(tmp_path)})
    assert found.code == 4
    assert found.err.endswith("error: needle needs PyTorch\nhint: pip install 'llamatool[torch]'\n")
    found = run("needle", *QUICK, "--plan", env={**ONE_THREAD, "PYTHONPATH": str(tmp_path)})
    assert found.code == 0, found.err
    assert "tokens to read" in found.out
    assert "about" not in found.out.splitlines()[2]


def test_interruption_keeps_what_is_done(tmp_path):
    command = [sys.executable, "-m", "llamatool", "needle", "--length", "4k", "--trials", "50"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path), "--score", "forced"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ONE_THREAD},
    )
    results = tmp_path / "results.jsonl"
    for _ in range(1200):
        if results.exists() and results.read_bytes().count(b"\n") >= 2:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("interrupted: the same command goes on from here\n")
    assert "Traceback" not in err
    assert results.read_bytes().count(b"\n") >= 2
    assert results.read_bytes().endswith(b"\n")


def test_show_and_compare(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    assert needle(*QUICK, "--out", a).code == 0
    assert needle("pocket-rope", *QUICK, "--out", b).code == 0
    shown = needle("--out", a, "--show", "1")
    assert shown.code == 0, shown.err
    assert shown.out.startswith("<|begin_of_text|>")
    assert shown.out.rstrip().endswith("is")
    assert "tokens and 24 kept for the answer" in shown.err
    compared = needle("compare", a, b)
    assert compared.code == 0, compared.err
    assert "Hits on the same trials" in compared.out
    content = json.loads(needle("compare", a, b, "--json").out)
    assert list(content) == ["schema", "a", "b", "pooled", "by_length", "unpaired"]
    assert sum(content["pooled"][k] for k in ("both", "only_a", "only_b", "neither")) == 3


def test_plain_grid():
    found = needle(*QUICK, "--plain", "--no-control")
    assert found.code == 0, found.err
    assert "   0% .\n  50% .\n 100% .\n" in found.out


def test_own_documents(tmp_path):
    book = tmp_path / "handbook.md"
    book.write_text("".join(f"Rule {i}: keep door {i} shut.\n" for i in range(200)), "utf-8")
    found = needle(
        *("--haystack", book, "--length", "512", "--depths", "2", "--trials", "1"),
        *("--needle", "The office cat is called Miso.", "--answer", "Miso"),
        *("--question", "What is the office cat called?", "--score", "generate", "--json"),
    )
    assert found.code == 0, found.err
    assert json.loads(found.out)["by_length"][0]["trials"] == 2
    found = needle("--haystack", book, "--length", "64k")
    assert found.code == 3
    assert "tokens too short for 64k" in found.err
