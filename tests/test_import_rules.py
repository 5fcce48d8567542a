"""`import llamatool` is cheap, and its public names are listed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import llamatool

# More than a few small modules of the standard library would be felt in every script.
HEAVY = {
    *("typer", "rich", "torch", "numpy", "safetensors", "huggingface_hub", "tiktoken"),
    *("sentencepiece", "tokenizers", "gguf", "jinja2", "pydantic", "transformers", "yaml"),
    *("logging", "asyncio", "importlib.metadata", "inspect", "typing", "unittest"),
}


def loaded_by(statement: str) -> set[str]:
    """Modules that a statement loads in a fresh interpreter."""
    code = (
        "import sys, json; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path = {sys.path!r}\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout))


def test_import_is_cheap() -> None:
    assert loaded_by("import llamatool") & HEAVY == set()


def test_public_names_are_listed_and_sorted() -> None:
    names = llamatool.__all__
    assert list(names) == sorted(names)
    for name in names:
        if name == "load_model" and importlib.util.find_spec("torch") is None:
            continue
        assert getattr(llamatool, name) is not None
    assert set(names) <= set(dir(llamatool))


def test_version_is_a_literal() -> None:
    """Reading it costs no look into installed metadata, and the build finds it in the text."""
    text = Path(llamatool.__file__).read_text(encoding="utf-8")
    assert f'\n__version__ = "{llamatool.__version__}"\n' in text


def test_example_of_the_docstring() -> None:
    loaded = llamatool.load_source("llama-3.1-8b")
    found = llamatool.inspect_source(loaded)
    assert found.parameters is not None
    assert found.parameters.total == 8_030_261_248
