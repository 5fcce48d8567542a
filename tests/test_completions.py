"""The completion files: up to date, valid for their shell, and offering the right words."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llamatool.cli.app import COMMANDS
from llamatool.config.catalog import entries
from llamatool.dtypes import by_name

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "completions"
SHELLS = {"bash": "llamatool.bash", "zsh": "_llamatool", "fish": "llamatool.fish"}
MODELS = [entry.id for entry in entries()]


def shell(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed here")
    return path


def test_regenerating_changes_nothing(tmp_path: Path) -> None:
    tool = ROOT / "tools" / "make_completions.py"
    subprocess.run([sys.executable, tool, tmp_path], check=True)
    for name in SHELLS.values():
        assert (tmp_path / name).read_text() == (FILES / name).read_text(), (
            f"completions/{name} is not up to date: run `make completions`"
        )


@pytest.mark.parametrize("name", SHELLS)
def test_syntax(name: str) -> None:
    path = FILES / SHELLS[name]
    checked = subprocess.run([shell(name), "-n", path], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("name", SHELLS)
def test_every_command_is_there_and_no_python(name: str) -> None:
    text = (FILES / SHELLS[name]).read_text()
    for command, _ in COMMANDS:
        assert re.search(rf"(?<![\w-]){command}(?![\w-])", text), command
    assert "python" not in text.lower().replace("make_completions.py", "").replace("-python", "")


def bash_replies(*words: str, folder: Path) -> list[str]:
    """What bash would offer for the last of `words`."""
    quoted = " ".join(f"'{word}'" for word in words)
    script = f"""
        source '{FILES / "llamatool.bash"}' || exit 1
        COMP_WORDS=({quoted})
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        set -u
        _llamatool
        if ((${{#COMPREPLY[@]}})); then printf '%s\\n' "${{COMPREPLY[@]}}"; fi
    """
    done = subprocess.run(
        [shell("bash"), "--norc", "--noprofile", "-c", script],
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "llama-3.1-8b folder").mkdir()
    return tmp_path


COMMAND_NAMES = [name for name, _ in COMMANDS]
CASES = [
    ("llamatool ", [*COMMAND_NAMES, "--version", "-h", "--help"]),
    ("llamatool ins", ["inspect"]),
    ("llamatool --v", ["--version"]),
    ("llamatool inspect llama-3.1-8", ["llama-3.1-8b", "llama-3.1-8b-instruct"]),
    ("llamatool inspect llama-3.1-8b llama-3.3", ["llama-3.3-70b-instruct"]),
    ("llamatool inspect --json llama-3.3", ["llama-3.3-70b-instruct"]),
    ("llamatool inspect --tokens 64k llama-3.3", ["llama-3.3-70b-instruct"]),
    ("llamatool inspect --tokens = 64k llama-3.3", ["llama-3.3-70b-instruct"]),
    ("llamatool inspect --tokens ", []),
    ("llamatool inspect --tokens =", []),
    ("llamatool inspect --", ["--tokens", "--json", "--help"]),
    ("llamatool inspect -", ["--tokens", "--json", "-h", "--help"]),
    ("llamatool inspect -- -", []),
    ("llamatool completion ", ["bash", "zsh", "fish"]),
    ("llamatool completion f", ["fish"]),
    ("llamatool completion fish ", ["-h", "--help"]),
    ("llamatool models --j", ["--json"]),
    ("llamatool nonsense ", [*COMMAND_NAMES, "--version", "-h", "--help"]),
    ("llamatool kv-budget --policy ", ["capped", "live_chunk_only", "no_eviction", "vllm_hybrid"]),
    ("llamatool kv-budget --gpu = h200", ["h200"]),
    ("llamatool kv-budget --gpu h200 --kv-dtype q8", ["q8_0"]),
    ("llamatool tokens -t llama", ["llama2", "llama3", "llama4", "llama-3.1-8b folder"]),
    ("llamatool tokens --to ", ["json", "tiktoken", "spm"]),
    ("llamatool tokens --corpus b", ["builtin"]),
    ("llamatool tokens --lang v", ["vi"]),
    ("llamatool convert --to ", ["hf", "meta"]),
    ("llamatool convert --model llama-guard-4", ["llama-guard-4-12b"]),
    ("llamatool convert conf", []),
    ("llamatool convert a b ", None),
    ("llamatool needle --depth-scale ", ["linear", "sigmoid"]),
    ("llamatool generate --device c", ["cpu", "cuda"]),
    ("llamatool kv-budget --as m", ["mha", "mqa"]),
    ("llamatool kv-budget -n 5 --json llama-guard-4", ["llama-guard-4-12b"]),
]


@pytest.mark.parametrize(("line", "expected"), CASES, ids=[line for line, _ in CASES])
def test_bash_offers(line: str, expected: list[str] | None, folder: Path) -> None:
    offered = bash_replies(*line.split(" "), folder=folder)
    if expected is None:  # no argument is left: options
        assert offered
        assert all(word.startswith("-") for word in offered)
        return
    if "llama-3.1-8b folder" not in expected:  # it begins as many models do
        offered = [word for word in offered if word != "llama-3.1-8b folder"]
    assert offered == expected


def test_bash_offers_models_and_files(folder: Path) -> None:
    """A file name with a space stays one word."""
    offered = bash_replies("llamatool", "inspect", "", folder=folder)
    assert offered[: len(MODELS)] == MODELS
    assert sorted(offered[len(MODELS) :]) == ["config.json", "llama-3.1-8b folder"]


def test_bash_leaves_plain_files_to_the_shell(folder: Path) -> None:
    """Readline completes them itself, with the quoting that a list of words would lose."""
    assert bash_replies("llamatool", "inspect", "conf", folder=folder) == []
    interactive = f"""
        source '{FILES / "llamatool.bash"}'
        bind 'set bell-style none' 2>/dev/null
        complete -p llamatool
    """
    done = subprocess.run(
        [shell("bash"), "--norc", "-c", interactive], capture_output=True, text=True, check=True
    )
    assert done.stdout == "complete -F _llamatool llamatool\n"


FISH_CASES = [
    ("llamatool comp", ["completion"]),
    ("llamatool inspect llama-3.1-8", ["llama-3.1-8b", "llama-3.1-8b-instruct"]),
    ("llamatool inspect conf", ["config.json"]),
    ("llamatool inspect --to", ["--tokens"]),
    ("llamatool completion ", ["bash", "fish", "zsh"]),
    ("llamatool kv-budget --gpu h2", ["h200"]),
    ("llamatool tokens -t llama", ["llama2", "llama3", "llama4"]),
    ("llamatool tokens --to ", ["json", "spm", "tiktoken"]),
    ("llamatool models conf", []),
]


@pytest.mark.parametrize(("line", "expected"), FISH_CASES, ids=[line for line, _ in FISH_CASES])
def test_fish_offers(line: str, expected: list[str], folder: Path) -> None:
    script = f"source '{FILES / 'llamatool.fish'}'; complete -C '{line}'"
    done = subprocess.run(
        [shell("fish"), "--no-config", "-c", script],
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
    )
    offered = [row.split("\t")[0] for row in done.stdout.splitlines()]
    assert [word for word in offered if word != "llama-3.1-8b folder/"] == expected


@pytest.mark.parametrize("option", ["--weights", "--kv-dtype"])
def test_offered_element_types_exist(option: str) -> None:
    text = (FILES / "llamatool.bash").read_text()
    found = re.search(rf'kv-budget:{option}\)\n *_llamatool_offer "\$cur" "([^"]*)"', text)
    assert found is not None
    for word in found[1].split():
        assert by_name(word) is not None, word


@pytest.mark.parametrize("name", SHELLS)
def test_command_prints_the_file(name: str, run) -> None:
    finished = run("completion", name)
    assert (finished.exit_code, finished.stderr) == (0, "")
    assert finished.stdout == (FILES / SHELLS[name]).read_text()
