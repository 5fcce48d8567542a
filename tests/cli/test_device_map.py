"""--device-map: what is said before loading, and what it contradicts."""

import importlib.util

import pytest

from tests.cli.runner import run

CONTRADICTIONS = {
    "another map": (
        ["--device-map", "balanced"], {},
        "error: --device-map is `balanced`: only auto is known\n",
    ),
    "a device": (
        ["--device-map", "auto", "--device", "cpu"], {},
        "error: --device-map chooses devices, and --device cpu has chosen already\n"
        "hint: give one of the two\n",
    ),
    "torchrun": (
        ["--device-map", "auto"],
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        "error: --device-map spreads a model in one process, and here several ranks share it\n"
        "hint: leave --device-map out under torchrun, or run one process\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", [["generate", "pocket", "hello"], ["needle", "pocket"]])
@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_contradicts_is_said_at_once(command: list[str], case: str) -> None:
    options, env, expected = CONTRADICTIONS[case]
    done = run(*command, *options, env=env)
    assert (done.code, done.out, done.err) == (2, "", expected)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_a_line_for_each_device_comes_before_the_answer() -> None:
    # Without a GPU there is one device, and the answer is the one without the option.
    options = ["generate", "pocket", "The old baker", "-n", "5", "--temperature", "0"]
    env = {"CUDA_VISIBLE_DEVICES": ""}
    plain, mapped = run(*options, env=env), run(*options, "--device-map", "auto", env=env)
    assert mapped.code == plain.code == 0
    assert mapped.out == plain.out
    lines = mapped.err.splitlines()
    told = [number for number, line in enumerate(lines) if line.startswith("cpu: ")]
    assert told == [2]
    assert lines[2].startswith("cpu: embedding, layers 0 to 3 and output table; 1.99 MiB of")
    assert [line for line in lines if not line.startswith("cpu: ")] == plain.err.splitlines()
