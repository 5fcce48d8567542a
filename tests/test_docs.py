"""README.md and docs/: every console block is run, every link leads somewhere."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import commandtree  # noqa: E402
import docblocks  # noqa: E402

PAGES = docblocks.pages()
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(params=PAGES, ids=IDS)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.mark.slow
def test_console_blocks(page: Path, tmp_path: Path) -> None:
    environment = docblocks.make_folder(tmp_path)
    wrong = []
    for block in docblocks.blocks(page.read_text(encoding="utf-8")):
        if block.language != "console" or block.not_run or block.missing:
            continue
        printed = docblocks.run(block, tmp_path, environment)
        for (command, expected), text in zip(block.steps, printed, strict=True):
            if not docblocks.matches(text, expected):
                wrong.append(
                    f"{page.name}:{block.line}: $ {command}\n"
                    f"--- the page says\n{expected}--- it prints\n{text}"
                )
    assert not wrong, "\n".join([*wrong, "`make docs` rewrites what the blocks print"])


def test_a_wrong_output_is_noticed(tmp_path: Path) -> None:
    """The checker itself: outputs, left-out lines, shared shell, hidden set-up, skipped blocks."""
    text = """
<!-- needs: no_such_package -->
```console
$ false
```
<!-- setup: echo hidden > made.txt -->
```console
$ cat made.txt; (exit 3)
hidden
$ echo $?
3
$ seq 9
1
...
9
$ cd base && \\
    ls
config.json
$ llamatool --version
llamatool 9.9
```
"""
    skipped, block = docblocks.blocks(text)
    assert skipped.missing == "no_such_package"
    assert block.line == 8
    printed = docblocks.run(block, tmp_path, docblocks.make_folder(tmp_path))
    right = [
        docblocks.matches(found, expected)
        for found, (_, expected) in zip(printed, block.steps, strict=True)
    ]
    assert right == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "a\n", False),
        ("a\n", "a\nb\n", False),
        ("a.c\n", "abc\n", False),
        ("a\nb\nc\n", "a\n...\nc\n", True),
        ("a\nc\n", "a\n...\nc\n", True),
        ("a\nb\nd\n", "a\n...\nc\n", False),
        ("a ...\n", "a b\n", False),
    ],
)
def test_matching(printed: str, expected: str, same: bool) -> None:
    assert docblocks.matches(printed, expected) is same


def test_blocks_are_console_or_json(page: Path) -> None:
    for block in docblocks.blocks(page.read_text(encoding="utf-8")):
        assert block.language in ("console", "json"), f"{page.name}:{block.line}"
        if block.language == "json":
            json.loads(block.body)
        else:
            assert block.steps
            assert block.not_run is None or len(block.not_run) > 5, "say why it is not run"


def test_fences_are_closed(page: Path) -> None:
    """A block that the pattern does not find would never be run."""
    text = page.read_text(encoding="utf-8")
    found = len(docblocks.blocks(text))
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * found


def anchor(heading: str) -> str:
    """The anchor that Markdown viewers give a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return kept.strip().replace(" ", "-")


def test_links(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(text):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        if fragment:
            anchors = {anchor(found) for found in HEADING.findall(target.read_text("utf-8"))}
            assert fragment in anchors, f"{page.name}: {link}"


def test_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = {link for link in LINK.findall(index) if "/" not in link}
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    for page in PAGES:
        for block in docblocks.blocks(page.read_text(encoding="utf-8")):
            steps = block.steps if block.language == "console" else ()
            for command, _ in steps:
                if command.startswith("make "):
                    assert set(command.split()[1:]) <= targets, f"{page.name}: {command}"


def simple_commands(line: str) -> list[list[str]]:
    """The words of each command in a line of shell, split at pipes and redirections."""
    lexer = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("();<>|&"):
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


def test_commands_of_the_docs_parse() -> None:
    """Commands that are only shown have no option that does not exist."""
    _, commands = commandtree.program()
    options = {
        command.name: {name for option in command.options for name in option.names}
        for command in commands
    }
    for page in PAGES:
        for block in docblocks.blocks(page.read_text(encoding="utf-8")):
            steps = block.steps if block.language == "console" else ()
            for line, _ in steps:
                for words in simple_commands(line):
                    if words[:1] != ["llamatool"] or len(words) < 2 or words[1].startswith("-"):
                        continue
                    used = {word.split("=")[0] for word in words[2:] if word.startswith("--")}
                    assert words[1] in options, f"{page.name}: {line}"
                    assert used <= options[words[1]], f"{page.name}: {line}"


def test_reference_is_up_to_date(tmp_path: Path) -> None:
    made = tmp_path / "cli.md"
    subprocess.run([sys.executable, ROOT / "tools" / "make_docs.py", made], check=True)
    assert made.read_text() == (ROOT / "docs" / "cli.md").read_text(), "run `make docs`"


def key_paths(value: object, prefix: str = "") -> set[str]:
    """`parameters.total` and so on; the items of a list share one path with `[]`."""
    if isinstance(value, dict):
        paths = set()
        for key, item in value.items():
            path = f"{prefix}.{key}" if prefix else key
            paths |= {path} | key_paths(item, path)
        return paths
    if isinstance(value, list):
        return set().union(*(key_paths(item, f"{prefix}[]") for item in value))
    return set()


# Objects whose keys are data, described as one.
MAPPINGS = ("config_origins", "weights_bytes", "parameters.by_group", "config")


def described(text: str, command: str) -> set[str]:
    """The keys that a section of docs/json.md lists at the start of its table's rows."""
    section = text.split(f"\n## {command}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        (
            "inspect",
            [
                ("inspect", "llama-3.1-8b", "--json"),
                ("inspect", "llama-4-scout-instruct", "--tokens", "64k", "--json"),
                ("inspect", "FOLDER", "--json"),
                ("inspect", "-", "--json"),
            ],
        ),
        ("models", [("models", "--json")]),
        (
            "kv-budget",
            [
                ("kv-budget", "llama-3.1-8b", "--json"),
                ("kv-budget", str(ROOT / "tests/data/configs/mistral-7b-v0.1.json"), "--json"),
                ("kv-budget", "llama-4-scout", "llama-3.1-8b", "--curve", "--json"),
                (
                    *("kv-budget", "llama-3.2-11b-vision", "--images", "1", "--as", "mqa"),
                    *("--document", str(ROOT / "LICENSE"), "--gpu", "smallest", "--json"),
                ),
            ],
        ),
    ],
)
def test_json_page_names_every_key(command: str, runs: list, run, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    configs = ROOT / "tests" / "data" / "configs"
    (tmp_path / "config.json").write_bytes((configs / "llama-3.2-1b.json").read_bytes())
    save_file({"model.norm.weight": torch.zeros(2048)}, tmp_path / "model.safetensors")
    values = json.loads((configs / "codellama-34b.json").read_bytes())
    del values["rope_theta"]  # gives a warning
    odd = json.dumps(values).encode()
    text = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    found = set()
    for args in runs:
        words = (str(tmp_path) if arg == "FOLDER" else arg for arg in args)
        finished = run(*words, stdin=odd)
        assert finished.exit_code == 0, finished.stderr
        found |= key_paths(json.loads(finished.stdout))
    found = {path for path in found if not path.startswith(tuple(f"{m}." for m in MAPPINGS))}
    assert found == described(text, command)
