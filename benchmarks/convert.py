"""How fast and how large `llamatool convert` is, against copying the same bytes.

    python benchmarks/convert.py [--folder DIR] [--rounds 3] [--resharding]

Makes a checkpoint of 2 GB in Meta's layout (two shards), then copies and converts it in turn and
prints the medians as ratios. `cp` is `cp -r` and `sync`; the conversion ends with its own fsync.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BASELINE = "import typer, llamatool.cli.app, numpy"


def main() -> None:
    options = _options()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "meta"
    if not source.exists():
        _python(ROOT / "tools" / "fake_checkpoint.py", source)
    size = sum(path.stat().st_size for path in source.glob("*.pth"))
    print(f"model: {size / 1e9:.2f} GB in {folder}")
    runs: dict[str, list[Run]] = {}
    for _ in range(options.rounds):
        runs.setdefault("cp && sync", []).append(_copy(source, folder / "copy"))
        for mode in ("none", "hash", "full"):
            found = _convert(source, folder / "hf", "--verify", mode)
            runs.setdefault(f"convert --verify {mode}", []).append(found)
    copies = runs["cp && sync"]
    copy = statistics.median(run.seconds for run in copies)
    print(f"{'':24} {'wall':>8} {'CPU':>8}   wall x cp (of each round)")
    for name, found in runs.items():
        wall = statistics.median(run.seconds for run in found)
        cpu = statistics.median(run.cpu_seconds for run in found)
        ratios = [run.seconds / one.seconds for run, one in zip(found, copies, strict=True)]
        each = " ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
        print(f"{name:24} {wall:6.2f} s {cpu:6.2f} s   {wall / copy:5.2f}   ({each})")
    baseline = _peak_of(BASELINE)
    for mode in ("none", "hash", "full"):
        peak = max(run.peak_bytes for run in runs[f"convert --verify {mode}"])
        print(
            f"peak memory, {mode:10} {peak / 2**20:6.0f} MiB, "
            f"{(peak - baseline) / 2**20:.0f} above an idle llamatool with numpy"
        )
    plain = runs["convert --verify none"]
    written = max(run.written_bytes for run in plain)
    first = statistics.median(run.first_byte_seconds for run in plain)
    print(f"bytes written            {written / size:.4f} x the model")
    print(f"first byte of tensors    {first:.2f} s after the start")
    digests = set()
    for threads in (1, 2, 4):
        _convert(source, folder / "hf", "--verify", "none", "--threads", str(threads))
        digests.add(_digest(folder / "hf" / "model.safetensors"))
    print(f"output for 1, 2, 4 threads: {'the same' if len(digests) == 1 else 'DIFFERENT'}")
    if options.resharding:
        _convert(source, folder / "hf", "--verify", "none")
        back = _convert(folder / "hf", folder / "back", "--mp", "8", "--verify", "none")
        seconds = back.seconds
        print(f"Hugging Face to 8 shards {seconds:6.2f} s   {seconds / copy:5.2f} x cp")
    for name in ("copy", "hf", "back"):
        shutil.rmtree(folder / name, ignore_errors=True)


class Run(NamedTuple):
    """One copy or conversion."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int = 0
    written_bytes: int = 0
    first_byte_seconds: float = 0.0


def _copy(source: Path, target: Path) -> Run:
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(["cp", "-r", source, target])
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    os.sync()
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return Run(seconds, usage.ru_utime + usage.ru_stime)


def _convert(source: Path, target: Path, *arguments: str) -> Run:
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    command = [sys.executable, "-m", "llamatool", "convert", source, target, "-q", "--no-tokenizer"]
    started = time.perf_counter()
    process = subprocess.Popen(
        [*map(str, command), *arguments], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    first, written = 0.0, 0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        counters = _io(process.pid)
        written = max(written, counters.get("wchar", 0))
        if not first and counters.get("wchar", 0) > 1 << 20:
            first = time.perf_counter() - started
        time.sleep(0.005)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"convert ended with {process.returncode}")
    cpu = usage.ru_utime + usage.ru_stime
    return Run(seconds, cpu, usage.ru_maxrss * 1024, written, first)


def _io(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return {}
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


def _peak_of(code: str) -> int:
    program = f"import resource; {code}; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(result.stdout) * 1024


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _python(script: Path, *arguments: object) -> None:
    subprocess.run([sys.executable, script, *map(str, arguments)], check=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/llamatool-benchmark"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--resharding", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
