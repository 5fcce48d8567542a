import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def run(*args: object, stdin: bytes | None = None, env: dict | None = None, cwd=None) -> Result:
    """The program in a process of its own, standard output and error into pipes."""
    found = subprocess.run(
        [sys.executable, "-m", "llamatool", *map(str, args)],
        input=stdin,
        stdin=None if stdin is not None else subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        cwd=cwd or ROOT,
        env={**os.environ, **(env or {})},
        check=False,
    )
    return Result(found.returncode, found.stdout.decode(), found.stderr.decode())


def config(name: str) -> Path:
    return DATA / "configs" / f"{name}.json"
