"""The table of accelerators, and `--gpu` read."""

import pytest

from llamatool.errors import UsageError
from llamatool.sizing.hardware import GPUS, KEYS, Machine, memory_only, parse_machine


def test_docstring_numbers() -> None:
    machine, counted = parse_machine("2x24GiB")
    assert (machine.count, machine.gpu.memory_bytes, counted) == (2, 25_769_803_776, True)
    machine, counted = parse_machine("h100")
    assert (machine.count, machine.gpu.memory_bytes, counted) == (1, 85_520_809_984, False)


def test_memory_units_are_read_literally() -> None:
    assert parse_machine("80GB")[0].gpu.memory_bytes == 80 * 10**9
    assert parse_machine("80GiB")[0].gpu.memory_bytes == 80 * 2**30
    assert parse_machine("8 x 141 GB")[0].memory_bytes == 8 * 141 * 10**9


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100", "H100 SXM"),
        ("h100-nvl", "H100 NVL"),
        ("H100 NVL", "H100 NVL"),
        ("4090", "RTX 4090"),
        ("rtx_4090", "RTX 4090"),
        ("a100", "A100 80GB SXM"),
        ("a100-40gb", "A100 40GB"),
        ("A100 40", "A100 40GB"),
        ("m4-max-128", "Apple M4 Max 128 GB"),
        ("mi300x", "MI300X"),
    ],
)
def test_names_in_several_spellings(text: str, name: str) -> None:
    assert parse_machine(text)[0].gpu.name == name
    assert parse_machine(f"2x{text}")[0] == Machine(parse_machine(text)[0].gpu, 2)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_names_its_row(key: str) -> None:
    assert parse_machine(key)[0].gpu.key == key


@pytest.mark.parametrize("gpu", GPUS, ids=KEYS)
def test_every_row_has_sources_and_sane_sizes(gpu) -> None:
    assert gpu.memory_source
    assert gpu.bandwidth_source
    assert 12 * 2**30 < gpu.memory_bytes <= 512 * 2**30
    assert gpu.bandwidth is not None
    assert 10**11 < gpu.bandwidth <= 8 * 10**12
    assert gpu.unified == ("Apple" in gpu.name)


def test_the_sizes_that_users_ask_about_are_there() -> None:
    nominal = {round(gpu.memory_bytes / 2**30) for gpu in GPUS}
    assert {16, 24, 32, 40, 45, 80, 94, 140, 179, 192} <= nominal
    assert len(set(KEYS)) == len(KEYS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "is no accelerator in the table"),
        ("0xh100", "the number of devices"),
        ("99999xh100", "the number of devices"),
        ("24", "is not an amount of memory"),
        ("24GX", "is not an amount of memory"),
        ("2x", "is no"),
        ("", "is no accelerator"),
        ("0GiB", "without memory"),
        ("h100\x1b[2J", "is no accelerator"),
    ],
)
def test_what_is_no_machine(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_machine(text)


def test_memory_only_has_no_bandwidth() -> None:
    assert memory_only(2**30).bandwidth is None
