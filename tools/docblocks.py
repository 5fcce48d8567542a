"""The console blocks of README.md and docs/: found, run, and refreshed.

A block is a fence marked `console`. A line that begins with `$ ` is a command (a line that ends
with a backslash goes on in the next one); the lines under it are what it prints, errors included.
A line `...` stands for any number of lines left out. The blocks of a page run in order in one
temporary folder, which holds copies of a few configurations. Comments on the line before a block:

    <!-- not run: REASON -->     the block is shown, not run
    <!-- needs: PACKAGE -->      run only where the Python package is installed
    <!-- setup: COMMAND -->      a shell command before the block, with $ROOT for the repository

    python tools/docblocks.py    rewrites what the blocks print, where it has no `...`
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What every page's folder holds.
SAMPLES = {
    "config.json": "configs/llama-3.1-8b.json",
    "params.json": "params/llama-3.1-8b.json",
    "base/config.json": "configs/llama-3.1-8b.json",
    "instruct/config.json": "configs/llama-3.1-8b-instruct.json",
    "scout/config.json": "configs/llama-4-scout-17b-16e-instruct.json",
}
_MARK = "\036"
_TIMEOUT_SECONDS = 300
_FENCE = re.compile(
    r"(?P<comments>(?:^<!--[^\n]*-->\n)*)^```(?P<language>\S*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_COMMENT = re.compile(r"<!-- (not run|needs|setup): (.*?) -->")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    line: int  # of its first line of content
    start: int  # offset of its content in the page
    language: str
    body: str
    comments: tuple[tuple[str, str], ...]

    @property
    def not_run(self) -> str | None:
        """Why the block is only shown."""
        return next((text for key, text in self.comments if key == "not run"), None)

    @property
    def missing(self) -> str | None:
        """A package that the block needs and that is not installed here."""
        needed = [text for key, text in self.comments if key == "needs"]
        return next((name for name in needed if importlib.util.find_spec(name) is None), None)

    @property
    def setup(self) -> tuple[str, ...]:
        """Commands that are run before and not shown."""
        return tuple(text for key, text in self.comments if key == "setup")

    @property
    def steps(self) -> tuple[tuple[str, str], ...]:
        """Commands, and what stands under each.

        Raises: ValueError if the block does not begin with a command.
        """
        steps: list[tuple[str, str]] = []
        unfinished = False
        for line in self.body.splitlines(keepends=True):
            if line.startswith("$ "):
                steps.append((line[2:].rstrip("\n"), ""))
            elif not steps:
                raise ValueError(f"line {self.line}: a console block begins with `$ `")
            elif unfinished:
                steps[-1] = (f"{steps[-1][0]}\n{line.rstrip(chr(10))}", "")
            else:
                steps[-1] = (steps[-1][0], steps[-1][1] + line)
            unfinished = steps[-1][0].endswith("\\") and not steps[-1][1]
        return tuple(steps)


def pages() -> list[Path]:
    """README.md and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    return [
        Block(
            line=text.count("\n", 0, match.start("body")) + 1,
            start=match.start("body"),
            language=match["language"],
            body=match["body"],
            comments=tuple(_COMMENT.findall(match["comments"])),
        )
        for match in _FENCE.finditer(text)
    ]


def make_folder(folder: Path) -> dict[str, str]:
    """Puts the samples into `folder`; the environment for commands in it."""
    work, programs = folder / "work", folder / "bin"
    for name, data in SAMPLES.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "tests" / "data" / data, work / name)
    programs.mkdir()
    for name, command in (("llamatool", "-m llamatool"), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        program.chmod(0o755)
    kept = {key: os.environ[key] for key in ("LANG", "LC_ALL", "TMPDIR") if key in os.environ}
    return {
        **kept,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUTF8": "1",
        "PYTHONWARNINGS": "ignore",
        "COLUMNS": "80",
        "ROOT": str(ROOT),
    }


def run(block: Block, folder: Path, environment: dict[str, str]) -> list[str]:
    """What each command of `block` prints, run in one shell in `folder`."""
    script = [f"{{ {command}\n}} >/dev/null 2>&1 || exit 99" for command in block.setup]
    for command, _ in block.steps:
        # The commands of a block share a shell, so that `cd` and `echo $?` mean what they say.
        script.append(f"{{ {command}\n}} 2>&1\n_code=$?; printf '{_MARK}'; (exit $_code)")
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-c", "\n".join(script)],
        cwd=folder / "work",
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    printed = done.stdout.decode("utf-8", "backslashreplace").split(_MARK)[:-1]
    if len(printed) != len(block.steps):
        raise ValueError(f"line {block.line}: the block's setup failed or its shell ended early")
    return printed


def matches(printed: str, expected: str) -> bool:
    """Whether `printed` is `expected`, in which a line `...` stands for any lines."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "...\n" else re.escape(line)
        for line in expected.splitlines(keepends=True)
    )
    return re.fullmatch(pattern, printed) is not None


def refreshed(text: str) -> str:
    """The page with what its commands print now; outputs with a `...` stay as they are."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = make_folder(folder)
        changes = []
        for block in blocks(text):
            if block.language != "console" or block.not_run or block.missing:
                continue
            printed = run(block, folder, environment)
            body = "".join(
                f"$ {command}\n{old if '...' in old.splitlines() else new}"
                for (command, old), new in zip(block.steps, printed, strict=True)
            )
            changes.append((block, body))
    for block, body in reversed(changes):
        text = text[: block.start] + body + text[block.start + len(block.body) :]
    return text


def main() -> None:
    """Rewrites the pages in place."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = refreshed(text)
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(f"refreshed {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
