"""The lines that say which device holds what."""

from llamatool.config.catalog import find
from llamatool.render.placement import placement_lines
from llamatool.sizing.fit import Load
from llamatool.sizing.placement import Device, place_layers

GIB = 2**30


def lines(name: str, *free: int | None, cpu: int | None = None, tokens: int = 8192) -> list[str]:
    entry = find(name)
    assert entry is not None
    devices = [Device(f"cuda:{number}", size) for number, size in enumerate(free)]
    return placement_lines(place_layers(entry.config, [*devices, Device("cpu", cpu)], Load(tokens)))


def test_two_gpus() -> None:
    assert lines("llama-3.1-70b", 80 * GIB, 80 * GIB) == [
        "cuda:0: embedding and layers 0 to 41; 68.90 GiB of weights and 1.31 GiB of KV cache"
        " for 8,192 tokens, of 71.50 GiB",
        "cuda:1: layers 42 to 79 and output table; 62.52 GiB of weights and 1.19 GiB of KV cache"
        " for 8,192 tokens, of 71.50 GiB",
    ]


def test_what_the_cpu_costs_stands_on_its_line() -> None:
    _, cpu = lines("llama-3.1-70b", 80 * GIB, cpu=200 * GIB)
    assert cpu.endswith(
        "of 200.00 GiB; the CPU computes 39 of 80 layers where their weights stay: every token"
        " reads 62.16 GiB of weights there"
    )


def test_one_layer_a_table_alone_and_memory_unknown() -> None:
    first, second = lines("llama-3.1-8b", 19_000_000_000, 3 * GIB)
    assert first.startswith("cuda:0: embedding and layers 0 to 31; ")
    assert second == "cuda:1: output table; 1002.01 MiB of weights, of 2.20 GiB"
    alone, _ = lines("llama-4-maverick-17b-128e", 7 * GIB)
    assert alone.startswith("cuda:0: embedding, layer 0 and output table; ")
    (only,) = lines("llama-3.2-1b")
    assert only == (
        "cpu: embedding, layers 0 to 15 and output table; 2.30 GiB of weights"
        " and 256.00 MiB of KV cache for 8,192 tokens"
    )
