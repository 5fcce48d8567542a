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
    runs: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    for _ in range(options.rounds):
        runs.setdefault("cp && sync", []).append(_copy(source, folder / "copy"))
        for mode in ("none", "hash", "full"):
            seconds, peak, _, _ = _convert(source, folder / "hf", "--verify", mode)
            runs.setdefault(f"convert --verify {mode}", []).append(seconds)
            peaks[mode] = max(peak, peaks.get(mode, 0))
    copy = statistics.median(runs["cp && sync"])
    for name, seconds in runs.items():
        median = statistics.median(seconds)
        print(f"{name:24} {median:6.2f} s   {median / copy:5.2f} x cp")
    baseline = _peak_of(BASELINE)
    for mode, peak in peaks.items():
        print(
            f"peak memory, {mode:10} {peak / 2**20:6.0f} MiB, "
            f"{(peak - baseline) / 2**20:.0f} above an idle llamatool with numpy"
        )
    _, _, written, first = _convert(source, folder / "hf", "--verify", "none")
    print(f"bytes written            {written / size:.4f} x the model")
    print(f"first byte of tensors    {first:.2f} s after the start")
    digests = set()
    for threads in (1, 2, 4):
        _convert(source, folder / "hf", "--verify", "none", "--threads", str(threads))
        digests.add(_digest(folder / "hf" / "model.safetensors"))
    print(f"output for 1, 2, 4 threads: {'the same' if len(digests) == 1 else 'DIFFERENT'}")
    if options.resharding:
        _convert(source, folder / "hf", "--verify", "none")
        seconds, *_ = _convert(folder / "hf", folder / "back", "--mp", "8", "--verify", "none")
        print(f"Hugging Face to 8 shards {seconds:6.2f} s   {seconds / copy:5.2f} x cp")
    for name in ("copy", "hf", "back"):
        shutil.rmtree(folder / name, ignore_errors=True)


def _copy(source: Path, target: Path) -> float:
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    started = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    os.sync()
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def _convert(source: Path, target: Path, *arguments: str) -> tuple[float, int, int, float]:
    """Seconds, peak memory in bytes, bytes written, seconds until the first tensor byte."""
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
    return seconds, usage.ru_maxrss * 1024, written, first


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
