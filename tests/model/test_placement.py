"""A model on several devices gives what it gives on one: bit for bit, and everything in its place.

The GPUs are pretended (devices.py): values are real, and an operator that met two devices raises.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from llamatool.errors import UnsupportedError, UsageError
from llamatool.generate.engine import Plan, Run
from llamatool.generate.sampling import Sampling
from llamatool.model import load
from llamatool.model.decoder import Decoder
from llamatool.model.fast import DecodeStep, FusedAttention, PackedLinear, can_pack, speed_up
from llamatool.model.load import load_model
from llamatool.model.quantize import Int8Linear, quantize_int8
from llamatool.model.static import StaticStep
from llamatool.model.weights import Weights
from llamatool.sizing.placement import Placement
from tests.model.devices import MixedDevicesError, pretended_gpus, shared_out, values
from tests.model.layouts import save_huggingface
from tests.model.tiny_models import BY_NAME
from tests.model.vision_models import (
    LLAMA4_VISION,
    MLLAMA_IMAGE,
    PATCH,
    SIDE,
    build_llama4,
    build_mllama,
    random_tiles,
)

KINDS = ("gqa", "tied", "qwen3", "rope-dynamic", "mistral-sliding", "scout", "maverick")
GPU0, GPU1, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")
# Which device has how many of the parts: embedding, layers, head.
SPREADS = {"two-gpus": (GPU0, GPU1), "gpu-and-cpu": (GPU0, CPU), "all": (GPU0, GPU1, CPU)}
FEW = ("gqa", "tied", "scout")  # kinds that are tried over every set of devices
CASES = [(name, over) for over in SPREADS for name in (KINDS if over == "all" else FEW)]


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with pretended_gpus():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every kind of model as files."""
    found = {}
    for name in KINDS:
        theirs, _ = BY_NAME[name].build()
        found[name] = save_huggingface(theirs, tmp_path_factory.mktemp(name))
    for name, build in (("mllama", build_mllama), ("llama4", build_llama4)):
        found[name] = save_huggingface(build()[0], tmp_path_factory.mktemp(name))
    return found


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> Any:
    """Loads a model over some devices, all of which it needs."""

    def loaded(
        name: str, devices: Sequence[torch.device], **options: Any
    ) -> tuple[Decoder, Placement]:
        monkeypatch.setattr(load, "place_layers", partial(shared_out, list(map(str, devices))))
        told: list[Placement] = []
        model = load_model(folders[name], device_map="auto", announce=told.append, **options)
        assert len(told) == 1
        assert [share.device.name for share in told[0].shares] == [str(d) for d in devices]
        assert all(share.layers for share in told[0].shares)
        return aligned(model), told[0]

    return loaded


def aligned(model: Decoder) -> Decoder:
    """`model` with weights of its own: where in a file one begins can decide its last bit."""
    for parameter in model.parameters():
        if parameter.device == CPU:
            parameter.data = parameter.data.clone()
    return model


@pytest.mark.parametrize(("name", "over"), CASES)
def test_logits_are_those_of_one_device(
    name: str, over: str, folders: dict[str, Path], spread: Any
) -> None:
    """Whole, in pieces that cross chunks and windows, and token by token."""
    plain = aligned(load_model(folders[name], device="cpu"))
    model, placement = spread(name, SPREADS[over])
    check_places(model, placement)
    ids = BY_NAME[name].ids()[:, :40]
    length = ids.shape[1]
    expected = plain(ids, logits_to_keep=None)
    found = model(ids, logits_to_keep=None)
    assert found.device == model.logits_device
    assert torch.equal(values(found), expected)
    for keep in (0, 3):
        assert torch.equal(values(model(ids, logits_to_keep=keep)), plain(ids, logits_to_keep=keep))
    theirs, ours = (m.new_cache(length, batch_size=2) for m in (plain, model))
    check_cache(model, ours)
    assert ours.num_bytes == theirs.num_bytes
    expected = plain.prefill(ids[:, :29], theirs, piece=7)
    assert torch.equal(values(model.prefill(ids[:, :29], ours, piece=7)), expected)
    for position in range(29, length):
        token = ids[:, position : position + 1]
        assert torch.equal(values(model(token, cache=ours)), plain(token, cache=theirs))


@pytest.mark.parametrize("name", KINDS)
def test_the_quick_step(name: str, folders: dict[str, Path], spread: Any) -> None:
    plain = aligned(load_model(folders[name], device="cpu"))
    model, placement = spread(name, SPREADS["all"])
    speed_up(plain, pack=False)
    speed_up(model, pack=False)
    check_places(model, placement)
    step, their_step = DecodeStep(model), DecodeStep(plain)
    ids = BY_NAME[name].ids()[:, :40]
    theirs, ours = (m.new_cache(40, batch_size=2) for m in (plain, model))
    logits, expected = model.prefill(ids[:, :20], ours), plain.prefill(ids[:, :20], theirs)
    assert torch.equal(values(logits), expected)
    for position in range(20, 40):
        # The engine gives a token where it chose it, beside the logits.
        token = ids[:, position]
        found = step(token.to(model.logits_device), ours)
        assert found.device == model.logits_device
        assert torch.equal(values(found), their_step(token, theirs))


@pytest.mark.parametrize("name", ["gqa", "tied", "scout", "mistral-sliding"])
def test_the_cache_goes_back_forks_and_forgets(
    name: str, folders: dict[str, Path], spread: Any
) -> None:
    plain = aligned(load_model(folders[name], device="cpu"))
    model, _ = spread(name, SPREADS["all"])
    ids = BY_NAME[name].ids(batch_size=1)
    rows = []
    for side in (plain, model):
        cache = side.new_cache(40)
        side.prefill(ids[:, :11], cache)
        mark = cache.mark()
        ahead = side(ids[:, 11:25], cache=cache)
        cache.rewind(mark)
        other = side(ids[:, 25:33], cache=cache)
        fork = cache.fork(60)
        check_cache(side, fork)
        forked = side(ids[:, 33:40], cache=fork)
        again = side(ids[:, 33:40], cache=cache)
        cache.truncate(0)
        fresh = side(ids[:, :5], cache=cache)
        rows.append([values(x) for x in (ahead, other, forked, again, fresh)])
    for expected, found in zip(*rows, strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(rows[1][2], rows[1][3])


@pytest.mark.parametrize("name", ["mllama", "llama4"])
@pytest.mark.parametrize("devices", SPREADS.values(), ids=SPREADS)
def test_images(
    name: str, devices: Sequence[torch.device], folders: dict[str, Path], spread: Any
) -> None:
    """The tower is beside the embedding; cross-attention layers keep images where they are."""
    plain = aligned(load_model(folders[name], device="cpu", max_images=2))
    model, placement = spread(name, devices, max_images=2)
    check_places(model, placement)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 80, (1, 40), generator=generator)
    if name == "mllama":
        images = [random_tiles((1, 2), SIDE), random_tiles((2, 1), SIDE)]
        ids[0, 4] = ids[0, 20] = MLLAMA_IMAGE
    else:
        images = [random_tiles((1, 2), LLAMA4_VISION["image_size"], extra=1)]
        count = plain.vision_model.num_tokens(images[0])
        ids[0, 5 : 5 + count] = PATCH
    theirs, ours = plain.new_cache(44, images=images), model.new_cache(44, images=images)
    check_cache(model, ours)
    assert ours.num_bytes == theirs.num_bytes
    found = model.prefill(ids, ours, piece=7, images=images, logits_to_keep=2)
    expected = plain.prefill(ids, theirs, piece=7, images=images, logits_to_keep=2)
    assert torch.equal(values(found), expected)
    theirs, ours = theirs.fork(), ours.fork()
    check_cache(model, ours)
    for token in ([[5]], [[6]]):
        next_ids = torch.tensor(token)
        assert torch.equal(values(model(next_ids, cache=ours)), plain(next_ids, cache=theirs))


def check_places(model: Decoder, placement: Placement) -> None:
    """Every weight is where the placement says, and as many bytes as it says."""
    held: dict[str, int] = {}
    for name, tensor in model.named_parameters():
        held[str(tensor.device)] = held.get(str(tensor.device), 0) + tensor.nbytes
        if name.startswith("layers."):
            where = placement.layer_devices[int(name.split(".")[1])]
        elif name.startswith(("norm.", "lm_head.")):
            where = placement.head_device
        else:
            where = placement.embedding_device
        assert str(tensor.device) == where, name
    assert held == {share.device.name: share.weight_bytes for share in placement.shares}
    assert set(map(str, model.devices)) == set(held)
    assert str(model.device) == placement.embedding_device
    assert str(model.logits_device) == placement.head_device


def check_cache(model: Decoder, cache: Any) -> None:
    """Every layer's keys and values are beside its weights."""
    for index, layer in cache.layers.items():
        where = model.layers[str(index)].input_layernorm.weight.device
        assert layer.k_BKSE.device == layer.v_BKSE.device == where


def test_the_cache_has_the_bytes_that_were_promised(spread: Any) -> None:
    model, placement = spread("scout", SPREADS["all"], max_tokens=100, batch_size=2)
    cache = model.new_cache(100, batch_size=2)
    held: dict[str, int] = {}
    for layer in cache.layers.values():
        device = str(layer.k_BKSE.device)
        held[device] = held.get(device, 0) + layer.k_BKSE.nbytes + layer.v_BKSE.nbytes
    assert held == {s.device.name: s.kv_bytes for s in placement.shares if s.layers}


def test_a_tied_table_lies_on_both_ends(spread: Any) -> None:
    model, placement = spread("tied", SPREADS["two-gpus"])
    assert placement.copies_table
    assert model.lm_head is not None
    assert model.lm_head.weight.device == GPU1
    assert torch.equal(values(model.lm_head.weight), values(model.embed_tokens.weight))
    # With layers on the CPU, both ends are on the GPU, and there is one table.
    model, placement = spread("tied", SPREADS["gpu-and-cpu"])
    assert not placement.copies_table
    assert model.lm_head is None
    assert model.device == model.logits_device == GPU0


def test_tensors_are_read_straight_to_their_devices(
    spread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, str]] = []
    plain = Weights.read

    def noted(self: Any, name: str, dtype: Any, device: Any = "cpu", **options: Any) -> Any:
        read.append((name, str(device)))
        return plain(self, name, dtype, device, **options)

    monkeypatch.setattr(Weights, "read", noted)
    model, _ = spread("maverick", SPREADS["all"])
    assert sorted(read) == sorted((n, str(p.device)) for n, p in model.named_parameters())


@pytest.mark.parametrize("name", ["gqa", "tied"])
def test_packed_layers_on_the_cpu_and_plain_ones_beside(name: str, spread: Any) -> None:
    model, _ = spread(name, SPREADS["all"])
    reference, _ = spread(name, SPREADS["all"])
    if not can_pack(torch.zeros(1)):
        pytest.skip("this build of torch packs no weights")
    speed_up(model)
    for block in model.layers.values():
        attention = block.self_attn
        assert isinstance(attention, FusedAttention)
        is_packed = isinstance(attention.qkv_proj, PackedLinear)
        assert is_packed == (block.input_layernorm.weight.device == CPU)
    assert not isinstance(model.lm_head, PackedLinear)
    ids = BY_NAME[name].ids()
    cache = model.new_cache(ids.shape[1], batch_size=2)
    model.prefill(ids[:, :-1], cache)
    found = values(DecodeStep(model)(ids[:, -1].to(model.logits_device), cache))
    assert (found - values(reference(ids))[:, -1]).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["gqa", "tied"])
def test_int8(name: str, folders: dict[str, Path], spread: Any) -> None:
    plain = aligned(load_model(folders[name], device="cpu"))
    model, _ = spread(name, SPREADS["two-gpus"])
    quantize_int8(plain)
    quantize_int8(model)
    assert isinstance(model.lm_head, Int8Linear)
    assert model.lm_head.weight.device == GPU1
    ids = BY_NAME[name].ids()  # more rows than the CPU's own kernel takes
    found, expected = model(ids, logits_to_keep=None), plain(ids, logits_to_keep=None)
    assert torch.equal(values(found), expected)


@pytest.mark.parametrize("quick", [False, True], ids=["plain", "quick"])
def test_a_run_writes_the_same(quick: bool, folders: dict[str, Path], spread: Any) -> None:
    plain = aligned(load_model(folders["gqa"], device="cpu"))
    model, _ = spread("gqa", SPREADS["all"])
    prompt = BY_NAME["gqa"].ids(batch_size=1)[0, :20].tolist()
    plan = Plan(Sampling(0.0, repetition_penalty=1.3), 12, frozenset())
    if quick:
        speed_up(model, pack=False)
    step = DecodeStep(model) if quick else None
    assert list(Run(model, [prompt], plan, step=step)) == list(Run(plain, [prompt], plan))


def test_chance_is_drawn_beside_the_logits(
    folders: dict[str, Path], spread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = aligned(load_model(folders["gqa"], device="cpu"))
    model, _ = spread("gqa", SPREADS["two-gpus"])
    prompt = BY_NAME["gqa"].ids(batch_size=1)[0, :20].tolist()
    plan = Plan(Sampling(1.0), 12, frozenset())
    expected = list(Run(plain, [prompt], plan, seeds=[7]))
    asked = []
    real = torch.Generator

    def generator(device: Any = "cpu") -> torch.Generator:
        asked.append(str(device))
        return real()

    monkeypatch.setattr(torch, "Generator", generator)
    assert list(Run(model, [prompt], plan, seeds=[7])) == expected
    assert asked == ["cuda:1"]


def test_steps_ahead_are_for_gpus_alone(spread: Any) -> None:
    """A layer on the CPU would be computed once for nothing."""
    calls = []
    for devices in (SPREADS["two-gpus"], SPREADS["gpu-and-cpu"]):
        model, _ = spread("gqa", devices)
        count = [0]

        def step(token: Any, cache: Any, model: Any = model, count: Any = count) -> Any:
            count[0] += 1
            return model(token[:, None], cache=cache)[:, -1]

        # The first token of any answer is a stop token.
        plan = Plan(Sampling(0.0), 5, frozenset(range(97)))
        list(Run(model, [[1, 2, 3]], plan, step=step))
        calls.append(count[0])
    assert calls == [1, 0]


def test_a_spread_model_is_not_compiled(spread: Any) -> None:
    model, _ = spread("gqa", SPREADS["two-gpus"])
    speed_up(model, pack=False)
    with pytest.raises(UnsupportedError, match=r"several devices \(cuda:0, cuda:1\)"):
        StaticStep(model, model.new_cache(8))


def test_one_device_is_as_without_a_map(folders: dict[str, Path]) -> None:
    told: list[Placement] = []
    model = load_model(folders["scout"], device_map="auto", announce=told.append)
    plain = load_model(folders["scout"])
    assert [share.device.name for share in told[0].shares] == ["cpu"]
    assert model.devices == plain.devices == (CPU,)
    ids = BY_NAME["scout"].ids()
    assert torch.equal(model(ids), plain(ids))


def test_what_contradicts_is_refused(folders: dict[str, Path]) -> None:
    refused = partial(load_model, folders["gqa"])
    with pytest.raises(UsageError, match="only auto is known"):
        refused(device_map="balanced")
    with pytest.raises(UsageError, match="--device cpu has chosen already"):
        refused(device_map="auto", device="cpu")
    with pytest.raises(UsageError, match="several ranks share it"):
        refused(device_map="auto", mesh=object())  # type: ignore[arg-type]


def test_an_operator_on_two_devices_is_noticed(folders: dict[str, Path], spread: Any) -> None:
    """What the other tests rely on."""
    model, _ = spread("gqa", SPREADS["two-gpus"])
    block = model.layers["0"]
    weight = block.self_attn.o_proj.weight
    block.self_attn.o_proj.weight = torch.nn.Parameter(weight.to("cuda:1"), requires_grad=False)
    with pytest.raises(MixedDevicesError, match="cuda:0, cuda:1"):
        model(torch.tensor([[1, 2]]))
    cache = model.new_cache(4)
    cache.layers[1].k_BKSE = cache.layers[1].k_BKSE.to("cpu")
    block.self_attn.o_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(MixedDevicesError):
        model(torch.tensor([[1, 2]]), cache=cache)
