"""How ranks meet, agree and part, where something is wrong with one of them."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from llamatool.cli.ranks import _launch
from llamatool.errors import InputError, LostRankError, ResourceError, UsageError
from llamatool.model import launch
from llamatool.model.launch import Crew, Launch
from llamatool.model.ranks import Ranks
from tests.parallel.conftest import ROOT, Group, free_port
from tests.parallel.test_commands import ENDLESS, messages, wait_for_text

Make = Callable[..., Group]
HELLO = ("generate", "pocket", "Hi", "-n", "4")


def patched(*lines: str) -> tuple[str, str]:
    """The program with other constants, or with a mishap, in llamatool/model/launch.py."""
    program = ("import os, sys", "import llamatool.model.launch as launch", *lines,
               "from llamatool.__main__ import main", "main()")  # fmt: skip
    return "-c", "\n".join(program)


IMPATIENT = ("launch.SILENT_SECONDS, launch.PATIENCE_SECONDS, launch.BEAT_SECONDS = 2.0, 1.0, 0.4",)


# --- before there is a group ---


def test_a_port_that_never_answers(ranks: Make) -> None:
    """Something listens there, and is no store."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = str(silent.getsockname()[1])
        variables = {"MASTER_PORT": port, "LLAMATOOL_JOIN_SECONDS": "1"}
        group = ranks(2, *patched(*IMPATIENT), *HELLO, **variables).start(1)
        codes, said = messages(group)
    assert codes == [4]
    assert said.startswith("error: rank 1 of 2 found no rank 0 within 1 s\n")


def test_a_rank_that_is_lost_while_the_group_is_made(ranks: Make) -> None:
    """The others wait for its connection, long."""
    group = ranks(2, *patched(*IMPATIENT), *HELLO).start(0)
    broken = ("def broken(*args, **options):", "    os.kill(os.getpid(), 9)")
    group.arguments = (*patched(*broken, "launch.dist.init_process_group = broken"), *HELLO)
    codes, said = messages(group.start(1))
    assert codes == [4, -9]
    assert said.startswith("error: rank 1 of this run ended without a word")


def test_ranks_that_cannot_be_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no such interface\nframe #0")

    monkeypatch.setattr("torch.distributed.init_process_group", broken)
    for rank, error in enumerate(together(lambda crew: crew.form("cpu", ["generate"]))):
        assert isinstance(error, ResourceError)
        assert error.what == f"rank {rank} cannot be connected to the others: no such interface"


def test_rank_0_says_that_it_waits(ranks: Make) -> None:
    variables = {"LLAMATOOL_JOIN_SECONDS": "1"}
    group = ranks(3, *patched("launch.NOTE_SECONDS = 0.3"), *HELLO, **variables).start(0)
    codes, said = messages(group)
    assert codes == [4]
    waiting, error, _ = said.splitlines()
    assert waiting.startswith("waiting for ranks 1, 2 of 3, 1 s at most (WORLD_SIZE")
    assert error == "error: ranks 1, 2 of 3 did not come within 1 s"


def test_ranks_with_other_arguments(ranks: Make) -> None:
    """On two machines the command is typed twice. With other options ranks wait for ever."""
    group = ranks(2, "-m", "llamatool", *HELLO).start(0)
    group.arguments = (*group.arguments[:-1], "5")
    codes, said = messages(group.start(1))
    assert codes == [2, 2]
    assert said == (
        "error: the arguments of rank 1 differ from those of rank 0\n"
        "hint: start every rank with the same command\n"
    )


def rank_of_pod(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command where a cluster's variables are set: rank 1 of 2."""
    cluster = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return subprocess.run(
        [sys.executable, "-m", "llamatool", *arguments],
        cwd=ROOT, env={**os.environ, **cluster, **variables},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_other_commands_are_not_silent() -> None:
    done = rank_of_pod("models")
    assert done.returncode == 0
    assert "llama-3.1-8b" in done.stdout


@pytest.mark.parametrize(("local_rank", "lines"), [("0", 1), ("1", 0)])
def test_wrong_arguments_are_said_once_on_each_machine(local_rank: str, lines: int) -> None:
    done = rank_of_pod("generate", "pocket", "Hi", "--chat", LOCAL_RANK=local_rank)
    assert done.returncode == 2
    assert done.stderr.count("error: PROMPT and --chat") == lines


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("LLAMATOOL_JOIN_SECONDS", "0", "LLAMATOOL_JOIN_SECONDS is 0: at least 1"),
        ("MASTER_PORT", "65536", "MASTER_PORT is 65536: a port is from 1 to 65535"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK is `-1`: no number"),
    ],
)
def test_an_environment_that_makes_no_sense(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    cluster = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for variable, text in {**cluster, name: value}.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(UsageError, match=message):
        _launch()


# --- in the middle ---


def test_a_store_that_answers_no_more(ranks: Make) -> None:
    """Its machine stands still; no connection breaks."""
    group = ranks(2, *patched(*IMPATIENT), *ENDLESS[2:]).start()
    wait_for_text(group)
    stopped = group.processes.pop(0)
    stopped.send_signal(signal.SIGSTOP)
    try:
        codes, said = messages(group)
    finally:
        group.processes[0] = stopped
    assert codes == [4]
    assert said.startswith("error: rank 0 of this run ended without a word")


def test_an_interruption_while_another_rank_stands_still(ranks: Make) -> None:
    group = ranks(2, *patched("launch.PATIENCE_SECONDS = 1.0"), *ENDLESS[2:]).start()
    wait_for_text(group)
    stopped = group.processes.pop(1)
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(0.5)  # until rank 0 waits for it
    try:
        group.processes[0].send_signal(signal.SIGINT)
        codes, said = messages(group)
    finally:
        group.processes[1] = stopped
    assert codes == [130]
    assert said == "interrupted\n"


def test_rank_0_is_lost_while_the_others_wait_for_the_user(ranks: Make) -> None:
    group = ranks(2, "-m", "llamatool", "generate", "pocket", "--chat", "--template", "llama-2")
    group.stdin = subprocess.PIPE
    first = group.start().processes[0]
    assert first.stderr is not None
    while not first.stderr.readline().startswith("chat ("):
        assert first.poll() is None
    first.kill()
    codes, said = messages(group)
    assert codes == [-9, 4]
    assert said.startswith("error: rank 0 of this run ended without a word\n")


def test_a_rank_that_is_lost_while_ranks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")

    monkeypatch.setattr("torch.distributed.all_gather_object", broken)
    with pytest.raises(LostRankError):
        Ranks(0, 2, None).count_on_host()  # type: ignore[arg-type]


# --- two ranks as threads of this process: what they say to each other ---


def together(work: Callable[[Crew], Any], size: int = 2) -> list[Any]:
    """What `work` returned or raised, on each of `size` crews that share a store."""
    port = free_port()
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        wait = timedelta(seconds=20)
        store = TCPStore("127.0.0.1", port, None, rank == 0, wait, wait_for_workers=False)
        stores.append(store)
        about = Launch(rank, size, rank, "127.0.0.1", port, True, "test", join_seconds=20)
        try:
            results[rank] = work(Crew(about, store, None))  # type: ignore[arg-type]
        except Exception as error:  # the test asks which
            results[rank] = error

    stores: list[TCPStore] = []  # rank 0 keeps it until the others are done
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("text", ["", "a\n", "\N{LLAMA}" * 2**20 + "\udcff", "x" * (9 * 2**20)])
def test_texts_of_any_length_are_told(text: str) -> None:
    """The store takes 8 MiB at once."""
    told = together(lambda crew: [crew.tell(lambda: text), crew.tell(lambda: "next")])
    assert all(pair == [text, "next"] for pair in told)


def test_ranks_that_do_not_agree() -> None:
    first, second = together(lambda crew: crew.agree([crew.launch.rank], "the prompts"))
    assert first is None
    assert isinstance(second, InputError)
    assert "the prompts of this rank differ" in str(second)
    assert together(lambda crew: crew.agree(["same"], "the prompts")) == [None, None]


def test_ranks_on_devices_of_different_kinds() -> None:
    def work(crew: Crew) -> None:
        crew.device = torch.device("cuda" if crew.launch.rank == 0 else "cpu")
        launch._gather(crew, "same")

    for error in together(work, 3):
        assert isinstance(error, ResourceError)
        assert "ranks 1, 2 would compute on cpu, and rank 0 on cuda" in str(error)
