"""What a plain command may load: nothing heavy. The times themselves are in benchmarks/."""

import json
import os
import subprocess
import sys

import pytest

from tests.cli.runner import DATA, ROOT, config

HEAVY = {
    "torch", "rich", "huggingface_hub", "pydantic", "transformers", "tiktoken", "sentencepiece",
    "tokenizers", "numpy", "yaml", "gguf", "safetensors", "jinja2", "logging.config", "asyncio",
    "ssl", "http.client",
}  # fmt: skip

PROGRAM = """
import sys
sys.argv = ["llamatool", *{arguments!r}]
from llamatool.cli.app import main
try:
    main()
except SystemExit as stop:
    code = stop.code
sys.stderr.write("LOADED " + " ".join(sorted(sys.modules)) + "\\n")
sys.exit(code)
"""


def loaded(*arguments: object) -> set[str]:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(arguments=[str(a) for a in arguments])],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=os.environ,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return set(found.stderr.rpartition("LOADED ")[2].split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", config("llama-3.1-8b"), "--json"),
        ("inspect", config("llama-4-scout-17b-16e"), "--json"),
        ("inspect", DATA / "params" / "llama-3.2-1b.json", "--json"),
        ("inspect", "llama-3.2-11b-vision", "--json"),
        ("inspect", config("llama-3.1-8b")),
        ("models", "--json"),
        ("models",),
        ("kv-budget", config("llama-3.1-8b"), "--tokens", "100000", "--json"),
        ("kv-budget", "--tokens", "100000"),
        ("--version",),
    ],
    ids=lambda arguments: " ".join(str(a).rpartition("/")[2] for a in arguments),
)
def test_nothing_heavy_is_loaded(arguments):
    assert loaded(*arguments) & HEAVY == set()


def test_no_pydantic_at_all():
    # The reason of the upper bound on typer: 0.29 imports pydantic on every run.
    names = loaded("inspect", config("llama-3.1-8b"), "--json")
    assert not any(name.startswith("pydantic") for name in names)


def test_json_is_one_object():
    found = subprocess.run(
        [sys.executable, "-m", "llamatool", "inspect", str(config("llama-3.1-8b")), "--json"],
        capture_output=True,
        cwd=ROOT,
        check=True,
    )
    assert json.loads(found.stdout)["schema"] == 1
