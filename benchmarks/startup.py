"""CPU time of a few commands, as a ratio to `python -c "import typer"` in the same run.

    python benchmarks/startup.py [ROUNDS]

Each command is a fresh process; the commands take turns, so that a busy machine slows all alike.
CPU time is user and system time of the process, which other programs hardly change.
"""

import os
import pty
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

CONFIG = Path(__file__).resolve().parent.parent / "tests" / "data" / "configs" / "llama-3.1-8b.json"
_SCRIPT = Path(sys.executable).with_name("llamatool")
TOOL = [str(_SCRIPT)] if _SCRIPT.exists() else [sys.executable, "-m", "llamatool"]
BASE = 'python -c "import typer"'
GOAL = 1.5  # of inspect --json
COMMANDS: dict[str, tuple[list[str], bool]] = {  # name: (command, on a terminal)
    "python -c pass": ([sys.executable, "-c", "pass"], False),
    BASE: ([sys.executable, "-c", "import typer"], False),
    "llamatool --version": ([*TOOL, "--version"], False),
    "llamatool --help": ([*TOOL, "--help"], False),
    "inspect config.json --json": ([*TOOL, "inspect", str(CONFIG), "--json"], False),
    "inspect config.json": ([*TOOL, "inspect", str(CONFIG)], False),
    "inspect config.json, on a terminal": ([*TOOL, "inspect", str(CONFIG)], True),
    "kv-budget config.json --json": ([*TOOL, "kv-budget", str(CONFIG), "--json"], False),
    "kv-budget --json, all models": ([*TOOL, "kv-budget", "--json"], False),
    "models --json": ([*TOOL, "models", "--json"], False),
}


def main(rounds: int = 15) -> None:
    for command, on_terminal in COMMANDS.values():  # writes bytecode, fills the disk cache
        cpu_seconds(command, on_terminal=on_terminal)
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, (command, on_terminal) in COMMANDS.items():
            times[name].append(cpu_seconds(command, on_terminal=on_terminal))
    base = statistics.median(times[BASE])
    print(f"{'CPU time, median of ' + str(rounds):40} {'ms':>7} {'lowest':>7} {'ratio':>6}")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:40} {1000 * median:7.1f} {1000 * min(seconds):7.1f} {median / base:6.2f}")
    ratio = statistics.median(times["inspect config.json --json"]) / base
    print(f"\ngoal: inspect --json at most {GOAL} times {BASE}; it is {ratio:.2f}")


def cpu_seconds(command: Sequence[str], *, on_terminal: bool) -> float:
    """User and system seconds of one run of `command`.

    Raises: SystemExit if the command fails, because its time would then mean nothing.
    """
    environment = {**os.environ, "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        environment.pop(name, None)
    if on_terminal:
        master, output = pty.openpty()
        reader = threading.Thread(target=drain, args=(master,))
        reader.start()
    else:
        output = os.open(os.devnull, os.O_WRONLY)
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, env=environment)
    os.close(output)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if on_terminal:
        reader.join()
        os.close(master)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {errors.decode()}")
    return usage.ru_utime + usage.ru_stime


def drain(master: int) -> None:
    """Reads a terminal until its last writer is gone."""
    while True:
        try:
            if not os.read(master, 65536):
                return
        except OSError:  # Linux says so with an error
            return


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
