"""Layers over devices: published models by hand, and every rule against a search of all ways."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamatool.config.catalog import find
from llamatool.config.huggingface import parse_huggingface
from llamatool.config.layers import plan_layers
from llamatool.config.model import ModelConfig
from llamatool.errors import ResourceError, UsageError
from llamatool.sizing.fit import Load, activation_bytes
from llamatool.sizing.kv_cache import kv_bytes
from llamatool.sizing.parameters import count_parameters
from llamatool.sizing.placement import Device, Placement, place_layers
from tests.config.helpers import llama, llama4

GIB = 2**30


def published(name: str) -> ModelConfig:
    entry = find(name)
    assert entry is not None
    return entry.config


def gpus(*free_bytes: int, cpu: int | None = None) -> list[Device]:
    devices = [Device(f"cuda:{number}", size) for number, size in enumerate(free_bytes)]
    return devices if cpu is None else [*devices, Device("cpu", cpu)]


def runs(placement: Placement) -> list[tuple[str, int | None, int | None]]:
    return [
        (share.device.name, *((share.layers[0], share.layers[-1]) if share.layers else (None,) * 2))
        for share in placement.shares
    ]


def test_70b_on_two_gpus_of_80_gib():
    config = published("llama-3.1-70b-instruct")
    made = place_layers(config, gpus(80 * GIB, 80 * GIB, cpu=500 * GIB), Load(8192))
    assert runs(made) == [("cuda:0", 0, 41), ("cuda:1", 42, 79)]
    first, second = made.shares
    layer, table = 2 * 855_654_400, 2 * 128_256 * 8192
    assert first.weight_bytes == 42 * layer + table
    assert second.weight_bytes == 38 * layer + table + 2 * 8192
    assert first.weight_bytes + second.weight_bytes == 141_107_412_992
    assert (first.kv_bytes, second.kv_bytes) == (42 * 8192 * 4096, 38 * 8192 * 4096)
    assert first.activation_bytes == 2 * 2048 * (2 * 8192 + 3 * 28672)
    # Six bytes a logit: as they come out, and in fp32.
    assert second.activation_bytes == first.activation_bytes + 6 * 128_256
    assert made.cpu_cost is None
    assert not made.copies_table
    assert (made.embedding_device, made.head_device) == ("cuda:0", "cuda:1")


def test_a_gpu_is_filled_to_nine_tenths_less_512_mib():
    assert Device("cuda:0", 80 * GIB).usable_bytes == 76_772_540_416
    assert Device("cuda:0", 2**28).usable_bytes == 0
    assert Device("cpu", 80 * GIB).usable_bytes == 80 * GIB
    assert Device("mps", None).usable_bytes is None


def test_70b_on_one_gpu_leaves_layers_on_the_cpu_and_says_what_they_cost():
    config = published("llama-3.1-70b-instruct")
    made = place_layers(config, gpus(80 * GIB, cpu=200 * GIB), Load(8192))
    assert runs(made) == [("cuda:0", 0, 40), ("cpu", 41, 79)]
    gpu, cpu = made.shares
    assert gpu.has_embedding  # both tables are where the GPU is
    assert gpu.has_head
    assert not cpu.has_head
    assert cpu.read_bytes == cpu.weight_bytes == 39 * 2 * 855_654_400
    assert made.cpu_cost == (
        "the CPU computes 39 of 80 layers where their weights stay:"
        " every token reads 62.16 GiB of weights there"
    )


def test_the_output_table_stays_on_the_last_gpu_beside_layers_on_the_cpu():
    config = published("llama-3.1-70b-instruct")
    made = place_layers(config, gpus(40 * GIB, 40 * GIB, cpu=200 * GIB), Load(8192))
    assert [share.has_embedding for share in made.shares] == [True, False, False]
    assert [share.has_head for share in made.shares] == [False, True, False]
    assert runs(made)[-1] == ("cpu", 40, 79)


def test_what_fits_nowhere_is_refused_with_the_numbers():
    config = published("llama-3.1-70b-instruct")
    with pytest.raises(ResourceError) as caught:
        place_layers(config, gpus(80 * GIB, cpu=20 * GIB), Load(8192))
    assert caught.value.what == (
        "weights in bfloat16 take 131.42 GiB, the KV cache of 8,192 tokens 2.50 GiB and"
        " activations 400.73 MiB on each device; usable are 71.50 GiB of cuda:0, 20.00 GiB of cpu,"
        " in which whole layers must fit"
    )
    assert caught.value.hint is not None
    with pytest.raises(UsageError, match="no element type of weights"):
        place_layers(config, gpus(80 * GIB), Load(8192), dtype="bool")


def test_one_device_that_has_room_takes_everything():
    config = published("llama-3.1-8b-instruct")
    for devices in (gpus(80 * GIB, 80 * GIB, cpu=GIB), [Device("mps", None)], gpus(cpu=30 * GIB)):
        made = place_layers(config, devices, Load(8192))
        (share,) = made.shares
        assert share.device == devices[0]
        assert share.layers == tuple(range(32))
        assert share.weight_bytes == 16_060_522_496
        assert share.kv_bytes == 2**30
        assert not made.is_spread
        assert made.cpu_cost is None


def test_a_tied_table_lies_on_each_device_that_needs_it():
    config = published("llama-3.2-1b")
    total, table = 2 * 1_235_814_400, 2 * 128_256 * 2048
    whole = place_layers(config, gpus(8 * GIB, cpu=GIB), Load(4096))
    assert [share.weight_bytes for share in whole.shares] == [total]
    assert not whole.copies_table
    spread = place_layers(config, gpus(3 * GIB, 3 * GIB), Load(4096))
    assert len(spread.shares) == 2
    assert spread.copies_table
    assert sum(share.weight_bytes for share in spread.shares) == total + table
    # With layers on the CPU both ends are on the one GPU, which has the table once.
    offloaded = place_layers(config, gpus(3 * GIB, cpu=8 * GIB), Load(4096))
    assert [share.has_head for share in offloaded.shares] == [True, False]
    assert not offloaded.copies_table
    assert sum(share.weight_bytes for share in offloaded.shares) == total


def test_maverick_counts_each_layer_as_it_is():
    """Layers with experts take 33 GB, those without 378 MB; a token reads one expert of 128."""
    config = published("llama-4-maverick-17b-128e")
    made = place_layers(config, gpus(*[140 * GIB] * 5, cpu=400 * GIB), Load(100_000))
    attention = 5120 * 128 * (2 * 40 + 2 * 8) + 2 * 5120
    dense = 2 * (attention + 3 * 5120 * 16384)
    one = 3 * 5120 * 8192
    sparse = 2 * (attention + 128 * 5120 + 129 * one)
    sizes = {0: dense, 1: sparse}
    for share in made.shares:
        weights = sum(sizes[index % 2] for index in share.layers)
        tables = 2 * 202_048 * 5120 * (share.has_embedding + share.has_head)
        norm = 2 * 5120 * share.has_head
        assert share.weight_bytes == weights + tables + norm
        # Every fourth layer keeps all tokens, the others a chunk of 8192.
        held = [100_000 if index % 4 == 3 else 8192 for index in share.layers]
        assert share.kv_bytes == 4096 * sum(held)
    assert made.shares[-1].device.name == "cpu"
    cpu = made.shares[-1]
    idle = 2 * 127 * one
    assert cpu.read_bytes == cpu.weight_bytes - idle * sum(index % 2 for index in cpu.layers)
    assert sum(len(share.layers) for share in made.shares) == 48


def test_scout_on_two_gpus():
    config = published("llama-4-scout-17b-16e")
    made = place_layers(config, gpus(141 * GIB, 141 * GIB), Load(2**20))
    assert sum(share.kv_bytes for share in made.shares) == 52_747_567_104
    assert sum(share.weight_bytes for share in made.shares) == 2 * (count_parameters(config).text)


def test_images_bring_the_tower_and_the_cross_layers():
    config = published("llama-3.2-11b-vision-instruct")
    devices = gpus(48 * GIB)
    (blind,) = place_layers(config, devices, Load(4096)).shares
    (seeing,) = place_layers(config, devices, Load(4096, 1, 2)).shares
    assert len(blind.layers) == 32
    assert len(seeing.layers) == 40
    assert seeing.weight_bytes == 2 * count_parameters(config).total
    assert seeing.kv_bytes - blind.kv_bytes == 2 * 8 * 6404 * 4096
    # 4 x 1608 positions of 28160 elements, and the features of two images.
    assert seeing.activation_bytes >= 2 * 6432 * (28_160 + 2 * 4096)


def test_dtypes_rows_and_pieces_count():
    config = published("llama-3.1-8b-instruct")
    devices = gpus(200 * GIB)
    (half,) = place_layers(config, devices, Load(8192)).shares
    (full,) = place_layers(config, devices, Load(8192), dtype="float32").shares
    (packed,) = place_layers(config, devices, Load(8192), kv_dtype="fp8").shares
    (rows,) = place_layers(config, devices, Load(8192, 3)).shares
    (large,) = place_layers(config, devices, Load(8192), piece_tokens=8192).shares
    assert (full.weight_bytes, full.kv_bytes) == (2 * half.weight_bytes, 2 * half.kv_bytes)
    assert 2 * packed.kv_bytes == half.kv_bytes
    assert rows.kv_bytes == 3 * half.kv_bytes
    assert rows.activation_bytes == 3 * half.activation_bytes
    # kv-budget's figure, but that logits come in the model's dtype first.
    assert large.activation_bytes == 2 * 128_256 + activation_bytes(
        config, plan_layers(config), 8192
    )


# --- every rule, on small models and devices of any size ------------------------------------

SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "intermediate_size": 128, "num_hidden_layers": 5, "head_dim": 16,
}  # fmt: skip


@cache
def small(kind: str) -> ModelConfig:
    if kind == "experts":
        values = llama4(**SMALL, intermediate_size_mlp=96, attention_chunk_size=16)
        return parse_huggingface(values, where="a test")
    values = llama(**SMALL, max_position_embeddings=8192, tie_word_embeddings=kind == "tied")
    return parse_huggingface(values, where="a test")


kinds = st.sampled_from(["dense", "tied", "experts"])
loads = st.builds(Load, st.integers(1, 5000), st.integers(1, 3))


@st.composite
def problems(draw: st.DrawFn) -> tuple[ModelConfig, list[Device], Load]:
    """A model, a load, and devices that have room for some shares of it."""
    config, load = small(draw(kinds)), draw(loads)
    whole = Costs(config, load)
    needed = whole.needed(0, whole.num_layers, embedding=True, head=True)
    shares = draw(st.lists(st.floats(0.02, 1.2), min_size=1, max_size=4))
    # Free bytes of which these are left to use.
    sizes = [int((needed * share + 2**29) / 0.9) + 2 for share in shares]
    cpu = draw(st.none() | st.floats(0.0, 1.5).map(lambda share: int(needed * share)))
    return config, gpus(*sizes, cpu=cpu), load


class Costs:
    """Bytes of any part of a model, counted without the code under test."""

    def __init__(self, config: ModelConfig, load: Load) -> None:
        self.config, self.load = config, load
        self.plan = plan_layers(config)
        self.num_layers = len(self.plan)

    def weights(self, first: int, stop: int, *, embedding: bool, head: bool) -> int:
        config = self.config
        table = config.vocab_size * config.hidden_size
        total = sum(map(self._layer, range(first, stop)))
        if head:
            total += config.hidden_size
        if config.tie_word_embeddings:
            return 2 * (total + (table if embedding or head else 0))
        return 2 * (total + table * (embedding + head))

    def needed(self, first: int, stop: int, *, embedding: bool, head: bool) -> int:
        load, config = self.load, self.config
        if first == stop and not embedding and not head:
            return 0
        step = min(load.num_tokens, 2048) * load.batch_size
        peaks = [
            activation_bytes(config, (s,), step, num_sequences=0) for s in self.cut(first, stop)
        ]
        logits = 6 * load.batch_size * config.vocab_size if head else 0
        kv = kv_bytes(self.cut(first, stop), load.num_tokens, batch_size=load.batch_size)
        weights = self.weights(first, stop, embedding=embedding, head=head)
        return weights + kv + max(peaks, default=2 * 2 * step * config.hidden_size) + logits

    def cut(self, first: int, stop: int):
        return self.plan[first:stop]

    def _layer(self, index: int) -> int:
        """A whole model's parameters less those without this layer: by counting, not by parts."""
        config, count = self.config, self.num_layers
        if config.moe is None:
            fewer = replace(config, num_hidden_layers=count - 1)
            return count_parameters(config).total - count_parameters(fewer).total

        # Layers before this one stay what they are.
        def up_to(number: int) -> int:
            layers = tuple(i for i in config.moe.moe_layers if i < number)
            moe = replace(config.moe, moe_layers=layers)
            return count_parameters(replace(config, num_hidden_layers=number, moe=moe)).text

        return up_to(index + 1) - up_to(index)


def fits(
    devices: Sequence[Device], costs: Costs, *, at_end: bool = True, out_of_order: bool = True
) -> bool:
    """Whether any division fits: all ways to cut the row, and the head on any GPU or at the end."""
    num_parts = costs.num_layers + 2
    gpus = [number for number, device in enumerate(devices) if device.name != "cpu"]
    for keeper in [None] * at_end + gpus * out_of_order:
        end = num_parts if keeper is None else num_parts - 1
        for borders in combinations_with_replacement(range(end + 1), len(devices) - 1):
            stretches = pairwise([0, *borders, end])
            if all(
                _holds(device, first, stop, costs, head=number == keeper)
                for number, (device, (first, stop)) in enumerate(
                    zip(devices, stretches, strict=True)
                )
            ):
                return True
    return False


def _holds(device: Device, first: int, stop: int, costs: Costs, *, head: bool = False) -> bool:
    n = costs.num_layers
    needed = costs.needed(
        min(max(first - 1, 0), n),
        min(max(stop - 1, 0), n),
        embedding=first == 0 < stop,
        head=head or first <= n + 1 < stop,
    )
    assert device.usable_bytes is not None
    return needed <= device.usable_bytes


@given(problems())
def test_every_rule(problem: tuple[ModelConfig, list[Device], Load]) -> None:
    config, devices, load = problem
    costs = Costs(config, load)
    try:
        made = place_layers(config, devices, load)
    except ResourceError:
        assert not fits(devices, costs)
        return
    shares = made.shares
    # Every part once, in order, and on devices in their order.
    assert [i for share in shares for i in share.layers] == list(range(costs.num_layers))
    assert [share.has_embedding for share in shares].count(True) == 1
    assert [share.has_head for share in shares].count(True) == 1
    assert shares[0].has_embedding or shares[0].has_head
    order = [devices.index(share.device) for share in shares]
    assert order == sorted(set(order))
    # What each is said to take is right, and no more than it has.
    for share in shares:
        first, stop = (share.layers[0], share.layers[-1] + 1) if share.layers else (0, 0)
        parts = {"embedding": share.has_embedding, "head": share.has_head}
        assert share.weight_bytes == costs.weights(first, stop, **parts)
        assert share.needed_bytes == costs.needed(first, stop, **parts)
        assert share.device.usable_bytes is not None
        assert share.needed_bytes <= share.device.usable_bytes
    table = 2 * config.vocab_size * config.hidden_size
    total = sum(share.weight_bytes for share in shares)
    assert total == 2 * count_parameters(config).text + table * made.copies_table
    _check_full(made, devices, costs)
    _check_the_head(made, devices, costs)


def _check_full(made: Placement, devices: Sequence[Device], costs: Costs) -> None:
    """No device has room for what the next one begins with; so the CPU has only what is left."""
    where = made.layer_devices
    positions = {device.name: number for number, device in enumerate(devices)}
    used = max(positions[share.device.name] for share in made.shares)
    by_name = {share.device.name: share for share in made.shares}
    first = 0
    embedded = False
    for device in devices[:used]:
        share = by_name.get(device.name)
        stop = first + (len(share.layers) if share else 0)
        embedding = bool(share and share.has_embedding)
        head = bool(share and share.has_head)
        embedded = embedded or embedding
        if not embedded:
            more = costs.needed(first, stop, embedding=True, head=head)
        elif stop < costs.num_layers:
            assert positions[where[stop]] > positions[device.name]
            more = costs.needed(first, stop + 1, embedding=embedding, head=head)
        else:
            break  # only the head is left
        assert device.usable_bytes is not None
        assert more > device.usable_bytes
        first = stop


def _check_the_head(made: Placement, devices: Sequence[Device], costs: Costs) -> None:
    """On the last device; out of its order only where that is better than the CPU."""
    names = [share.device.name for share in made.shares]
    gpus = [device for device in devices if device.name != "cpu"]
    if gpus and names[-1] == "cpu":
        assert not fits(gpus, costs)
        assert made.head_device != "cpu" or not fits(devices, costs, at_end=False)
    elif made.head_device != names[-1]:
        assert not fits(gpus, costs, out_of_order=False)
