"""`generate` and `needle` under torchrun: the same text, one voice, one error, no hanging."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llamatool.units import format_bytes
from tests.parallel.conftest import ROOT, TIMEOUT, Group, free_port
from tests.tokenizers.conftest import smollm_file

Make = Callable[..., Group]
PROMPT = (
    "The magic number for silver falcon is 482913. The old baker counted the boats near the mill. "
    "Question: What is the magic number for silver falcon?\nAnswer:"
)


def torchrun(size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command as users start it."""
    launcher = ("torch.distributed.run", "--nproc-per-node", str(size))
    return python(*launcher, "--master-port", str(free_port()), "-m", "llamatool", *arguments)


def alone(*arguments: str) -> str:
    """What one process writes."""
    done = python("llamatool", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(*module: str) -> subprocess.CompletedProcess[str]:
    """A module with its arguments, and the prompt in a pipe."""
    return subprocess.run(
        [sys.executable, "-m", *module],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        input=PROMPT,
    )


@pytest.mark.parametrize("size", [2, 4])
def test_greedy_text_is_that_of_one_process(size: int) -> None:
    """The prompt comes from a pipe, which one rank reads for all."""
    arguments = ("generate", "pocket", "--temperature", "0", "-n", "60", "--dtype", "float32")
    done = torchrun(size, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone(*arguments)
    assert "482913" in done.stdout
    assert done.stderr.count(f"{size} ranks: each holds") == 1
    assert done.stderr.count("mode: raw") == 1


def test_two_machines_with_a_launcher_each() -> None:
    """Both on the loopback; the second writes nothing."""
    arguments = ("generate", "pocket", "The magic number", "-t", "0", "-n", "12")
    port = str(free_port())
    machines = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--node-rank", str(number), "--nproc-per-node", "1"),
                *("--master-addr", "127.0.0.1", "--master-port", port),
                *("-m", "llamatool", *arguments),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        said = [machine.communicate(timeout=TIMEOUT) for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert said[0][0] == alone(*arguments)
    assert said[1] == ("", "")


def test_sampled_text_is_one_text(ranks: Make) -> None:
    """Without a seed every rank would choose for itself."""
    arguments = (
        "-m",
        "llamatool",
        "generate",
        "pocket",
        "The old",
        "-t",
        "1",
        "-n",
        "40",
        "--json",
    )
    ended = ranks(2, *arguments).start().wait()
    assert ended[0].code == ended[1].code == 0
    assert ended[1].out == ended[1].err == ""
    answer = json.loads(ended[0].out)
    assert len(answer["output_ids"]) == 40
    assert answer["num_ranks"] == 2
    # What was announced before loading is what the cache took.
    tokens = len(answer["prompt_ids"]) + 40
    cache = f"{format_bytes(answer['stats']['kv_bytes'])} of KV cache for {tokens} tokens"
    assert cache in ended[0].err


def test_needle_summary_is_that_of_one_process(tmp_path: Path) -> None:
    arguments = ("needle", "pocket", "--length", "256,700", "--depths", "3", "--trials", "2")
    done = torchrun(2, *arguments, "--out", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    alone(*arguments, "--out", str(tmp_path / "one"))
    two, one = (
        json.loads((tmp_path / name / "summary.json").read_text(encoding="utf-8"))
        for name in ("two", "one")
    )
    for summary in (two, one):
        del summary["compute"]["seconds"]
    assert two == one
    rows = (tmp_path / "two" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(rows) == len({json.loads(row)["key"] for row in rows})
    # What is done is skipped by all ranks alike.
    again = torchrun(2, *arguments, "--out", str(tmp_path / "two"))
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "two" / "results.jsonl").read_text(encoding="utf-8").splitlines() == rows


def test_a_file_of_prompts_is_answered_once(ranks: Make, tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": i, "prompt": f"The magic number for a{i} is {300 + i}."} for i in range(3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    arguments = ("generate", "pocket", "--prompts", str(prompts), "-t", "0", "-n", "8")
    ended = ranks(2, "-m", "llamatool", *arguments, "--out", str(out)).start().wait()
    assert [e.code for e in ended.values()] == [0, 0], ended[0].err
    alone(*arguments, "--out", str(tmp_path / "one.jsonl"))
    assert out.read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_a_conversation_is_read_by_one_rank(ranks: Make) -> None:
    """With nothing on standard input it ends at once, on all ranks."""
    arguments = ("-m", "llamatool", "generate", "pocket", "--chat", "--template", "llama-2")
    ended = ranks(2, *arguments).start().wait()
    assert ended[0].code == ended[1].code


# --- SmolLM2: 9 heads, 3 key/value heads ---


def test_smollm2_runs_on_three_ranks() -> None:
    arguments = ("generate", str(smollm_file()), "-t", "0", "-n", "8", "--dtype", "float32")
    done = torchrun(3, *arguments, "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone(*arguments, "What is the capital of France?")
    assert "Paris" in done.stdout


def test_smollm2_does_not_run_on_two_ranks(ranks: Make) -> None:
    group = ranks(2, "-m", "llamatool", "generate", str(smollm_file()), "Hello").start()
    codes, said = messages(group)
    assert codes == [2, 2]
    assert said == (
        "error: 2 ranks cannot share this model: 9 attention heads are not divisible by 2\n"
        "hint: it can be shared by 1 or 3 ranks\n"
    )


# --- what goes wrong ---

ENDLESS = ("-m", "llamatool", "generate", "pocket", "The", "-n", "200000", "--beyond-context",
           "-t", "1", "--dtype", "float32")  # fmt: skip


def wait_for_text(group: Group) -> None:
    """Until rank 0 has begun to write."""
    stream = group.processes[0].stdout
    assert stream is not None
    assert stream.read(1), [rank.err for rank in group.wait().values()]


def messages(group: Group) -> tuple[list[int], str]:
    """Exit codes of all ranks, and all that they said after the usual lines."""
    ended = group.wait()
    lines = "".join(rank.err for rank in ended.values()).splitlines(keepends=True)
    usual = ("pocket: ", "mode: ", "2 ranks: ", "4 ranks: ")
    said = "".join(line for line in lines if not line.startswith(usual))
    return [rank.code for rank in ended.values()], said


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (4, 2)])
def test_a_killed_rank_ends_the_others(ranks: Make, size: int, victim: int) -> None:
    group = ranks(size, *ENDLESS).start()
    wait_for_text(group)
    group.processes[victim].kill()
    codes, said = messages(group)
    assert codes == [-signal.SIGKILL if rank == victim else 4 for rank in range(size)]
    assert said.count("error:") == 1
    assert f"error: rank {victim} of this run ended without a word" in said


def test_killed_rank_0_ends_the_others(ranks: Make) -> None:
    """It kept the store, too: nobody can be asked any more."""
    group = ranks(4, *ENDLESS).start()
    wait_for_text(group)
    group.processes[0].kill()
    codes, said = messages(group)
    assert codes == [-signal.SIGKILL, 4, 4, 4]
    assert said.count("error:") == 1
    assert "rank 0 of this run ended without a word" in said


def test_a_rank_killed_under_torchrun() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--master-port", str(free_port()), *ENDLESS],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert launcher.stdout is not None
        launcher.stdout.read(1)
        os.kill(_child(launcher.pid, rank=1), signal.SIGKILL)
        _, said = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 1
    assert said.count("error: ") == 1
    assert "error: rank 1 of this run ended without a word" in said


def _child(parent: int, *, rank: int) -> int:
    """The process that torchrun started as this rank."""
    for line in Path("/proc").iterdir():
        if not line.name.isdigit():
            continue
        try:
            status = (line / "stat").read_text(encoding="utf-8")
            environment = (line / "environ").read_bytes()
        except OSError:
            continue
        is_child = int(status.rpartition(")")[2].split()[1]) == parent
        if is_child and b"RANK=%d" % rank in environment.split(b"\0"):
            return int(line.name)
    raise AssertionError("torchrun has no such child")


def test_a_taken_port_is_named(ranks: Make, taken_port: int) -> None:
    group = ranks(
        2, "-m", "llamatool", "generate", "pocket", "Hi", MASTER_PORT=str(taken_port)
    ).start(0)
    ended = group.wait()[0]
    assert ended.code == 4
    assert ended.err == (
        f"error: port {taken_port} is taken by another program\n"
        f"  at 127.0.0.1:{taken_port}\n"
        "hint: choose another one: torchrun --master-port, or MASTER_PORT\n"
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize("present", [(0, 2), (0,), (1,)])
def test_a_missing_rank_is_named(ranks: Make, present: tuple[int, ...]) -> None:
    size = 3 if 2 in present else 2
    arguments = ("-m", "llamatool", "generate", "pocket", "Hi")
    started = time.monotonic()
    seconds = "12" if len(present) > 1 else "4"  # those that come may start far apart
    group = ranks(size, *arguments, LLAMATOOL_JOIN_SECONDS=seconds).start(*present)
    codes, said = messages(group)
    assert time.monotonic() - started < 60
    assert codes == [4] * len(present)
    assert said.count("error:") == 1
    if 0 in present:
        assert f"error: rank 1 of {size} did not come within {seconds} s" in said
    else:
        assert "rank 1 of 2 found no rank 0 within 4 s" in said


def test_an_error_of_one_rank_ends_all(ranks: Make, tmp_path: Path) -> None:
    """A file that only one machine lacks."""
    (tmp_path / "model").symlink_to(ROOT / "llamatool" / "pocket" / "pocket")
    group = ranks(2, "-m", "llamatool", "generate", "./model", "Hi", PYTHONPATH=str(ROOT))
    group.folder = tmp_path
    group.start(0)
    group.folder = ROOT
    codes, said = messages(group.start(1))
    assert codes == [3, 3]
    assert said.count("error:") == 1
    assert said.startswith("error: rank 1: no such file or folder\n")


def test_an_interruption_ends_all(ranks: Make) -> None:
    group = ranks(2, *ENDLESS).start()
    wait_for_text(group)
    group.processes[0].send_signal(signal.SIGINT)
    codes, said = messages(group)
    assert codes == [130, 130]
    assert "error" not in said


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2 contradict each other"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is `two`: no number"),
    ],
)
def test_a_confused_launcher(variables: dict[str, str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llamatool", "generate", "pocket", "Hi"],
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **variables},
        capture_output=True, text=True, check=False, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr


def test_options_that_ranks_do_not_have(ranks: Make) -> None:
    arguments = ("-m", "llamatool", "generate", "pocket", "Hi", "--compile")
    codes, said = messages(ranks(2, *arguments).start())
    assert codes == [2, 2]
    assert said == "error: --compile is for one process, not for several ranks\n"
