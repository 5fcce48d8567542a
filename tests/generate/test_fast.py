"""The rearranged decoder gives what the plain one gives, kind by kind, and so does its step."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from llamatool.errors import UnsupportedError  # noqa: E402
from llamatool.model.decoder import Decoder  # noqa: E402
from llamatool.model.fast import (  # noqa: E402
    DecodeStep,
    FusedAttention,
    PackedLinear,
    can_pack,
    speed_up,
)
from llamatool.model.quantize import Int8Linear, pack_int8, quantize_int8  # noqa: E402
from llamatool.model.static import StaticStep, _slots  # noqa: E402
from tests.model.tiny_models import BY_NAME, KINDS  # noqa: E402

TOLERANCE = 1e-5
STEPS = 29  # tokens read one by one, behind the prompt
SIZE = 512


def both(name: str, dtype=torch.float32, *, pack: bool = True) -> tuple[Decoder, Decoder]:
    _, plain = BY_NAME[name].build(dtype=dtype)
    fast = copy.deepcopy(plain)
    speed_up(fast, pack=pack)
    return plain, fast


def follow(model: Decoder, step, cache, ids) -> torch.Tensor:
    """Logits of a prefill and of each of the ids behind it, [B, steps, V]."""
    first = ids.shape[1] - STEPS
    logits = [model.prefill(ids[:, :first], cache)[:, -1]]
    logits += [step(ids[:, i], cache) for i in range(first, ids.shape[1])]
    return torch.stack(logits, dim=1)


def plain_step(model: Decoder):
    return lambda token, cache: model(token[:, None], cache=cache)[:, -1]


@pytest.mark.parametrize("name", [kind.name for kind in KINDS])
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
def test_logits_and_steps(name: str, pack: bool) -> None:
    """Over chunk and window borders, two rows at once."""
    plain, fast = both(name, pack=pack)
    ids = BY_NAME[name].ids()
    expected = follow(plain, plain_step(plain), plain.new_cache(SIZE, batch_size=2), ids)
    logits = follow(fast, DecodeStep(fast), fast.new_cache(SIZE, batch_size=2), ids)
    assert expected.abs().max() > 0.5
    assert (logits - expected).abs().max() <= TOLERANCE
    whole = fast(ids, logits_to_keep=7)
    assert (whole - plain(ids, logits_to_keep=7)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", [kind.name for kind in KINDS])
def test_static_steps(name: str) -> None:
    """Masks instead of slices, and experts gathered instead of asked for."""
    plain, fast = both(name, pack=False)
    ids = BY_NAME[name].ids()
    theirs, cache = plain.new_cache(SIZE, batch_size=2), fast.new_cache(SIZE, batch_size=2)
    expected = follow(plain, plain_step(plain), theirs, ids)
    logits = follow(fast, StaticStep(fast, cache), cache, ids)
    assert (logits - expected).abs().max() <= TOLERANCE
    assert cache.length == ids.shape[1]
    # What the plain decoder reads next is right, too: the rings know where they are.
    after = torch.tensor([[3, 5], [4, 6]])
    assert (fast(after, cache=cache) - plain(after, cache=theirs)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["gqa", "scout"])
def test_a_static_step_is_one_graph_for_all_positions(name: str, monkeypatch) -> None:
    """No break, nothing that the host must know, and one compilation for each number of slots."""
    from llamatool.model import static

    monkeypatch.setattr(static, "LEAST_SLOTS", 16)
    torch._dynamo.reset()
    _, fast = both(name, pack=False)
    ids = BY_NAME[name].ids()
    cache = fast.new_cache(SIZE, batch_size=2)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    step = StaticStep(fast, cache, backend=backend)
    eager_cache = fast.new_cache(SIZE, batch_size=2)
    expected = follow(fast, StaticStep(fast, eager_cache), eager_cache, ids)
    logits = follow(fast, step, cache, ids)
    assert (logits - expected).abs().max() <= TOLERANCE
    assert len(graphs) == 3  # 16, 32 and 64 slots


def test_slots() -> None:
    assert _slots(300, 4096) == 512
    assert [_slots(n, 1000) for n in (0, 255, 256, 511, 512)] == [256, 256, 512, 512, 1000]


def test_bfloat16_rounds_as_the_plain_decoder() -> None:
    plain, fast = both("gqa", torch.bfloat16)
    ids = BY_NAME["gqa"].ids()
    expected = follow(plain, plain_step(plain), plain.new_cache(SIZE, batch_size=2), ids)
    logits = follow(fast, DecodeStep(fast), fast.new_cache(SIZE, batch_size=2), ids)
    assert (logits - expected).abs().max() <= 2 * 2**-8 * expected.abs().max()


def test_weights_are_held_once() -> None:
    _, fast = both("gqa")
    if not can_pack(fast.embed_tokens.weight):
        pytest.skip("this torch has no packed layout")
    left = {name.rsplit(".", 2)[-2] for name, _ in fast.named_parameters()}
    assert left == {"embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"}
    assert sum(isinstance(m, PackedLinear) for m in fast.modules()) == 4 * 3 + 1
    speed_up(fast)  # again: nothing to do
    assert sum(isinstance(m, PackedLinear) for m in fast.modules()) == 4 * 3 + 1


def test_layers_with_hooks_are_left_alone() -> None:
    """Tensor parallelism hangs on hooks; fusing would drop them."""
    _, model = BY_NAME["gqa"].build()
    model.layers["1"].self_attn.q_proj.register_forward_hook(lambda *_: None)
    speed_up(model)
    kinds = [isinstance(block.self_attn, FusedAttention) for block in model.layers.values()]
    assert kinds == [True, False, True]
    ids = BY_NAME["gqa"].ids()
    cache = model.new_cache(SIZE, batch_size=2)
    assert follow(model, DecodeStep(model), cache, ids).isfinite().all()
    with pytest.raises(UnsupportedError, match="hooks on its layers"):
        StaticStep(model, cache)


# --- int8 ---


def test_packing_is_to_the_nearest() -> None:
    weight = torch.randn(64, 300)
    weight[7] = 0.0
    packed, scale = pack_int8(weight)
    assert packed.dtype == torch.int8
    assert packed.abs().max() == 127
    error = (packed * scale[:, None] - weight).abs()
    assert (error <= scale[:, None] / 2 * 1.0001).all()
    assert packed[7].eq(0).all()
    assert scale[7] == 1
    example, step = pack_int8(torch.tensor([[0.5, -1.27]]))
    assert example.tolist() == [[50, -127]]
    assert step.tolist() == pytest.approx([0.01])


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_int8_layer(rows: int, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 64, dtype=dtype)
    shift = torch.randn(96, dtype=dtype) if bias else None
    layer = Int8Linear(weight, shift)
    x = torch.randn(2, rows, 64, dtype=dtype)
    exact = layer.weight.double() * layer.scale.double()[:, None]
    expected = x.double() @ exact.T + (0 if shift is None else shift.double())
    out = layer(x)
    assert out.dtype == dtype
    assert out.shape == (2, rows, 96)
    # Inputs and outputs of the kernel have eight bits of mantissa.
    assert (out.double() - expected).abs().max() <= 2**-6 * expected.abs().max()


@pytest.mark.parametrize("width", [8, 24, 40, 48, 64, 72])
@pytest.mark.parametrize("rows", [1, 9])
def test_int8_layer_of_any_width(width: int, rows: int) -> None:
    """Torch's kernel reads 16 or 32 inputs at a time, and garbage behind the end of a row."""
    torch.manual_seed(0)
    layer = Int8Linear(torch.randn(50, width))
    x = torch.randn(rows, width)
    expected = x.double() @ (layer.weight.double() * layer.scale.double()[:, None]).T
    assert (layer(x).double() - expected).abs().max() <= 2**-6 * expected.abs().max()


def test_int8_prompt_in_pieces() -> None:
    """All pieces of a prompt but the last ask for no logits."""
    _, model = BY_NAME["gqa"].build()
    quantize_int8(model)
    ids = BY_NAME["gqa"].ids()
    whole = model(ids)
    pieces = model.prefill(ids, model.new_cache(ids.shape[1], batch_size=2), piece=7)
    torch.testing.assert_close(pieces, whole, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ["gqa", "mha", "qwen2", "tied"])
def test_int8_model_stays_close(name: str) -> None:
    _, plain = BY_NAME[name].build()
    packed = copy.deepcopy(plain)
    quantize_int8(packed)
    ids = BY_NAME[name].ids()
    expected, logits = plain(ids, logits_to_keep=None), packed(ids, logits_to_keep=None)
    distance = (logits - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert 0 < distance < 0.05
    speed_up(packed)
    cache = packed.new_cache(SIZE, batch_size=2)
    steps = follow(packed, DecodeStep(packed), cache, ids)
    last = (steps - logits[:, -STEPS - 1 :]).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert last < 0.05


def test_int8_experts_are_refused() -> None:
    _, model = BY_NAME["scout"].build()
    with pytest.raises(UnsupportedError, match="mixture of experts"):
        quantize_int8(model)
