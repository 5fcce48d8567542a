"""`generate` from the shell: text on standard output, talk on standard error, exit codes."""

# ruff: noqa: F811  # a fixture is an argument of the name that it is imported by

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.cli.runner import ROOT
from tests.generate.conftest import tiny_base, tiny_chat  # noqa: F401
from tests.tokenizers.conftest import small_bpe, small_json  # noqa: F401

GREEDY = ("-t", "0", "-n", "8")
KEYS = [
    "schema", "model", "layout", "device", "num_ranks", "dtype", "mode", "prompt_ids", "output_ids",
    "text", "stop_reason", "stop_ids", "stats",
]  # fmt: skip
STATS = [
    "load_seconds", "time_to_first_token_seconds", "prefill_tokens_per_second",
    "decode_tokens_per_second", "bandwidth_limit_share", "kv_bytes", "peak_memory_bytes",
]  # fmt: skip


def test_text_goes_to_standard_output_and_talk_to_standard_error(run, tiny_chat: Path) -> None:
    done = run("generate", str(tiny_chat), "one two", *GREEDY, "--stats", "--ids")
    assert done.exit_code == 0
    assert done.stdout.endswith("\n")
    lines = done.stderr.splitlines()
    assert lines[0] == "mode: chat (template of tokenizer_config.json)"
    assert any(line.startswith("prompt ids: 1000 ") for line in lines)
    for name in ("load", "time to first token", "prefill", "decode", "KV cache", "peak memory"):
        assert any(line.strip().startswith(name) for line in lines)
    (stops,) = (line for line in lines if line.strip().startswith("stop ids"))
    assert "1001 1002 (generation_config.json: 1001 1002; config.json: 1001;" in stops
    answer = json.loads(run("generate", str(tiny_chat), "one two", *GREEDY, "--json").stdout)
    assert done.stdout == answer["text"] + ("" if answer["text"].endswith("\n") else "\n")


def test_json(run, tiny_chat: Path) -> None:
    done = run("generate", str(tiny_chat), "hi", *GREEDY, "--json")
    found = json.loads(done.stdout)
    assert list(found) == KEYS
    assert list(found["stats"]) == STATS
    assert found["stats"]["bandwidth_limit_share"] is None
    assert (found["schema"], found["layout"], found["mode"]) == (1, "huggingface", "chat")
    assert (found["device"], found["dtype"]) == ("cpu", "float32")
    assert found["stop_ids"] == [1001, 1002]
    assert found["prompt_ids"][0] == 1000
    assert found["stop_reason"] in ("stop_token", "length")
    assert found["stats"]["kv_bytes"] == 2 * 2 * 2 * 8 * 4 * (len(found["prompt_ids"]) + 8)


@pytest.mark.parametrize("way", ["argument", "pipe", "dash", "file"])
def test_the_ways_to_give_a_prompt(way: str, run, tiny_base: Path, tmp_path: Path) -> None:
    text = "one two\u4e2d"
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    args, stdin = {
        "argument": ([text], b""),
        "pipe": ([], text.encode()),
        "dash": (["-"], text.encode()),
        "file": (["--prompt-file", str(file)], b""),
    }[way]
    done = run("generate", str(tiny_base), *args, *GREEDY, "--json", stdin=stdin)
    assert done.exit_code == 0
    expected = json.loads(run("generate", str(tiny_base), text, *GREEDY, "--json").stdout)
    assert json.loads(done.stdout)["output_ids"] == expected["output_ids"]
    assert done.stderr == "mode: raw (no chat template, and nothing says that it is a chat model)\n"


def test_one_seed_one_text(run, tiny_chat: Path) -> None:
    def text(*args: str) -> str:
        return run("generate", str(tiny_chat), "hi", "-n", "12", *args).stdout

    assert text("--seed", "1") == text("--seed", "1") != text("--seed", "2")


def test_quantized_and_stopped(run, tiny_chat: Path) -> None:
    plain = run("generate", str(tiny_chat), "hi", *GREEDY).stdout
    done = run("generate", str(tiny_chat), "hi", *GREEDY, "--stop", plain[2:4])
    assert plain.startswith(done.stdout.rstrip("\n"))
    assert len(done.stdout) < len(plain)
    packed = json.loads(
        run("generate", str(tiny_chat), "hi", *GREEDY, "--quantize", "int8", "--json").stdout
    )
    assert packed["dtype"] == "float32, int8 weights"


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--raw", "--template", "llama-3"], 2, "--raw gives no chat format"),
        (["--prompt-file", "x"], 2, "PROMPT and --prompt-file all say what to answer"),
        (["--prompts", "x"], 2, "all say what to answer"),
        (["--out", "x"], 2, "--prompts FILE and --out FILE go together"),
        (["--top-p", "7"], 2, "--top-p is 7.0"),
        (["--max-new-tokens", "0"], 2, "--max-new-tokens is 0"),
        (["-n", "300"], 3, "300 new tokens exceed the model's context of 256 tokens"),
        (["--template", "llama-3"], 3, "no control token `<|start_header_id|>`"),
        (["--template", "nowhere.jinja"], 3, "no file with a template"),
        (["--suffix", "x"], 3, "no control token"),
        (["--quantize", "int4"], 2, "only int8 is known"),
        (["--device", "tpu"], 2, "`tpu` is no device"),
        (["--tokenizer", "nowhere"], 3, "cannot read"),
    ],
)
def test_errors(args: list[str], code: int, says: str, run, tiny_chat: Path) -> None:
    done = run("generate", str(tiny_chat), "hi", *args)
    assert done.exit_code == code
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_models_that_cannot_run(run, tmp_path: Path) -> None:
    done = run("generate", "llama-3.1-8b", "hi")
    assert done.exit_code == 3
    assert "a configuration without weights" in done.stderr
    done = run("generate", str(tmp_path), "hi")
    assert done.exit_code == 3
    done = run("generate", "nobody/nothing", "hi")  # the tests are offline
    assert done.exit_code == 5


def test_many_prompts(run, tiny_chat: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "a b c"}\n')
    args = ("generate", str(tiny_chat), "--prompts", str(prompts), "--out", str(out), *GREEDY)
    done = run(*args, "--batch-size", "2")
    assert done.exit_code == 0
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("3 of 3 prompts answered now: ")
    assert len(out.read_text().splitlines()) == 3
    again = json.loads(run(*args, "--json").stdout)
    assert again["answered_now"] == 0


def test_without_a_model(run) -> None:
    """The embedded model answers its own question; a build without it says what to name."""
    done = run("generate")
    if not (ROOT / "llamatool" / "pocket" / "pocket" / "config.json").is_file():
        assert done.exit_code == 2
        assert done.stderr.startswith("error: this build holds no pocket model\n")
        return
    assert done.exit_code == 0
    assert done.stdout.strip() == "482913"
    assert done.stderr.startswith("pocket: a tiny model of synthetic text")
    assert "no language model" in done.stderr.splitlines()[0]


def test_no_pytorch(tiny_chat: Path) -> None:
    """Exit code 4 and what to install, in two lines."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from llamatool.cli.app import main\n"
        f"sys.argv = ['llamatool', 'generate', {str(tiny_chat)!r}, 'hi']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, cwd=ROOT)
    assert done.returncode == 4
    assert (
        done.stderr.decode()
        == "error: generate needs PyTorch\nhint: pip install 'llamatool[torch]'\n"
    )


# Greedily, this model repeats itself and never stops.
ENDLESS = ("one", "-t", "0", "-n", "100000", "--beyond-context")


def test_an_interrupt_keeps_what_was_written(tiny_base: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "llamatool", "generate", str(tiny_base), *ENDLESS],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert running.stdout is not None
    first = running.stdout.read(20)
    running.send_signal(signal.SIGINT)
    rest, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert len(first) == 20
    assert rest.endswith(b"\n")
    assert errors.decode().startswith("mode: raw")
    assert "Traceback" not in errors.decode()


def test_an_interrupted_answer_in_json(tiny_base: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "llamatool", "generate", str(tiny_base), *ENDLESS, "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert running.stderr is not None
    assert running.stderr.readline().startswith(b"mode: raw")
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    found = json.loads(out)
    assert found["stop_reason"] == "interrupted"
    assert len(found["output_ids"]) > 0


def test_a_closed_pipe_ends_it(tiny_base: Path) -> None:
    command = [sys.executable, "-m", "llamatool", "generate", str(tiny_base), *ENDLESS]
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join(command)} | head -c 10"],
        capture_output=True, check=False, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert len(done.stdout) == 10
    assert "Traceback" not in done.stderr.decode()


def test_a_conversation_on_a_terminal(tiny_chat: Path) -> None:
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "llamatool", "generate", str(tiny_chat), "--chat", *GREEDY],
        stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "TERM": "dumb"},
    )  # fmt: skip
    os.close(theirs)
    for line in (b"one\n", b"two\n", b"\n"):
        time.sleep(0.2)
        os.write(ours, line)
    out, errors = running.communicate(timeout=60)
    os.close(ours)
    assert running.returncode == 0, errors.decode()
    assert out.count(b"\n") >= 2
    assert errors.decode().startswith("chat (template of tokenizer_config.json)")


def test_a_prompt_in_the_place_of_the_model(run) -> None:
    done = run("generate", "What's a llama?", stdin=b"")
    assert done.exit_code == 2
    assert done.stderr == (
        "error: the prompt on standard input is empty\n"
        'hint: give it after MODEL; or was it "What\'s a llama?"? llamatool generate pocket'
        " 'What'\"'\"'s a llama?'\n"
    )


def test_a_prompt_beyond_the_context_is_refused_before_weights_are_read(
    run, tiny_chat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llamatool.model.load as load

    monkeypatch.setattr(load, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    done = run("generate", str(tiny_chat), "one " * 9000, "-n", "8")
    assert done.exit_code == 3
    assert "exceed the model's context of" in done.stderr


def test_room_is_made_for_prompt_and_answer(
    run, tiny_chat: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import llamatool.model.load as load

    asked: list[int] = []
    load_model = load.load_model

    def watched(*args: Any, max_tokens: int, **kwargs: Any) -> Any:
        asked.append(max_tokens)
        return load_model(*args, max_tokens=max_tokens, **kwargs)

    monkeypatch.setattr(load, "load_model", watched)
    done = run("generate", str(tiny_chat), "one two three", "-n", "8", "--json")
    longest = len(json.loads(done.stdout)["prompt_ids"]) + 8
    assert asked == [longest]
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "one two three"}\n', encoding="utf-8")
    done = run("generate", str(tiny_chat), "--prompts", str(prompts), "--out", str(out), "-n", "8")
    assert done.exit_code == 0
    assert asked == [longest, longest]
