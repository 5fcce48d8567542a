"""Ranks as processes of this machine that talk over gloo on the loopback."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
TIMEOUT = 240  # seconds that any of these runs may take before it counts as hanging


@dataclass
class Ended:
    """How one process ended."""

    code: int
    out: str
    err: str


class Group:
    """Processes started as `torchrun` starts them, but without its supervision."""

    def __init__(self, size: int, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        self.size = size
        self.arguments = arguments
        self.folder = ROOT
        self.stdin = subprocess.DEVNULL
        self.variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(size),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, *ranks: int) -> "Group":
        """Starts these ranks, or all of them."""
        for rank in ranks or range(self.size):
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", *self.arguments],
                cwd=self.folder,
                env={**os.environ, **self.variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=self.stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        return self

    def wait(self) -> dict[int, Ended]:
        """How every rank ended; a rank that does not end fails the test."""
        ended = {}
        for rank, process in self.processes.items():
            out, err = process.communicate(timeout=TIMEOUT)
            ended[rank] = Ended(process.returncode, out, err)
        return ended

    def kill(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def ranks() -> Iterator[Callable[..., Group]]:
    """Makes groups, and leaves no process behind."""
    groups: list[Group] = []

    def make(size: int, *arguments: str, **variables: str) -> Group:
        groups.append(Group(size, arguments, variables))
        return groups[-1]

    yield make
    for group in groups:
        group.kill()


def run_jobs(size: int, jobs: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What each rank computed (tests/parallel/worker.py), by the names of the jobs."""
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs), encoding="utf-8")
    group = Group(size, ["-m", "tests.parallel.worker", str(file), str(folder / "out")], {})
    try:
        for rank, ended in group.start().wait().items():
            assert ended.code == 0, f"rank {rank} ended with {ended.code}: {ended.err}"
    finally:
        group.kill()
    return [torch.load(folder / f"out.{rank}") for rank in range(size)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
