"""Norms, rotations and logits where public implementations went wrong, each with its report.

The numbers in the names of reports are those of their own repositories.
"""

import copy
import json
import math
from pathlib import Path

import pytest
import torch

from llamatool.config.catalog import find
from llamatool.config.huggingface import parse_huggingface
from llamatool.config.model import RopeConfig, TemperatureConfig
from llamatool.config.rope import inverse_frequencies
from llamatool.errors import InputError, UnsupportedError
from llamatool.model.attention import _causal_mask, scale_by_position
from llamatool.model.decoder import Decoder, require_finite
from llamatool.model.norm import rms_norm
from llamatool.model.rope import RotaryEmbedding, Rotation, rotate
from tests.model.tiny_models import BY_NAME, DENSE, LLAMA3_ROPE, Tiny, rope

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "rope_golden.json").read_text())


# --- norm ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_rounds_like_the_references(dtype: torch.dtype) -> None:
    """Bit by bit: up to fp32, back to the dtype, then the weight."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    theirs = LlamaRMSNorm(256, eps=1e-5).to(dtype)
    theirs.weight.data.normal_(1.0, 0.3)
    x = torch.randn(50, 256, dtype=dtype)
    assert torch.equal(rms_norm(x, theirs.weight, 1e-5), theirs(x))


def test_norm_of_large_float16_values_does_not_overflow() -> None:
    """The square of 300 exceeds float16 (meta-llama/llama#1048)."""
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, None, 1e-5), torch.ones_like(x))


def test_norm_example() -> None:
    normed = rms_norm(torch.tensor([3.0, 4.0]), None, 0.0)
    assert normed.tolist() == pytest.approx([0.8485, 1.1314], abs=1e-4)


# --- rope ---


@pytest.mark.parametrize("name", GOLDEN["inverse_frequencies"])
def test_golden_frequencies_in_fp32(name: str) -> None:
    entry = GOLDEN["inverse_frequencies"][name]
    model = find(name)
    assert model is not None
    embedding = RotaryEmbedding(model.config)
    tensor = embedding._inverse_frequencies(8192, torch.device("cpu"))
    assert tensor.dtype == torch.float32
    assert bool(tensor.isfinite().all())
    for index, value in entry["inv_freq"].items():
        assert float(tensor[int(index)]) == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.3},
        {"rope_type": "dynamic", "factor": 3.3},
        {"rope_type": "yarn", "factor": 3.3, "original_max_position_embeddings": 4096},
        *(
            {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
            for factor in (8.0, 32.0)
        ),
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_frequencies_are_those_of_transformers_to_the_last_bit(
    theta: float, head_dim: int, scaling: dict
) -> None:
    """They are computed in single precision, operation by operation.

    An ulp of a frequency, at position 100,000, is an angle of 0.006 more.
    """
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=8 * head_dim,
        num_attention_heads=8,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    ours = RotaryEmbedding(parse_huggingface(config.to_dict(), where="a test"))
    expected = LlamaRotaryEmbedding(config).inv_freq
    assert torch.equal(ours._inverse_frequencies(1, torch.device("cpu")), expected)


def test_angles_stay_fp32_in_a_bf16_model() -> None:
    """A bfloat16 frequency is off by whole turns at 128k.

    huggingface/transformers#29285, vllm-project/vllm#863.
    """
    model = find("llama-3.1-8b")
    assert model is not None
    position = 131071
    table = RotaryEmbedding(model.config).rotation(
        position, 1, length=position + 1, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    exact = [math.cos(position * f) for f in inverse_frequencies(model.config.rope, 128)]
    # fp32 angles are off by up to 4e-3 there; rounding to bfloat16 adds 2e-3.
    assert table.cos_TP[0].tolist() == pytest.approx(exact, abs=1e-2)
    rounded = torch.tensor(inverse_frequencies(model.config.rope, 128)).bfloat16().float()
    assert (torch.cos(position * rounded) - torch.tensor(exact)).abs().max() > 1


def test_tables_are_made_for_the_positions_asked_for() -> None:
    """Scout's whole context would take 5.4 GB (vllm-project/vllm-ascend#693)."""
    model = find("llama-4-scout-17b-16e-instruct")
    assert model is not None
    assert model.config.max_position_embeddings == 10485760
    table = RotaryEmbedding(model.config).rotation(
        10_000_000, 3, length=10_000_003, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    assert table.cos_TP.shape == (3, 64)
    assert table.cos_TP.dtype == torch.float32  # the interleaved layout rotates in fp32
    assert bool(table.cos_TP.isfinite().all())


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_only(interleaved: bool) -> None:
    """The property RoPE is made for, with a head of 128 and the theta of Llama 3."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 128)
    frequencies = torch.tensor(inverse_frequencies(RopeConfig(5e5), 128))

    def score(query_position: int, key_position: int) -> float:
        turned = []
        for x, position in ((q, query_position), (k, key_position)):
            angles = torch.tensor([[float(position)]]) * frequencies
            turned.append(rotate(x, Rotation(angles.cos(), angles.sin(), interleaved)))
        return float((turned[0] * turned[1]).sum())

    near = score(17, 10)
    assert score(1007, 1000) == pytest.approx(near, abs=2e-3)
    assert score(100007, 100000) == pytest.approx(near, abs=2e-2)  # fp32 angles are coarser there
    assert abs(score(18, 10) - near) > 0.2  # another distance, another score
    assert score(100007, 100000) != near


def test_layouts_are_a_permutation_of_each_other() -> None:
    """Rows in pairs (2i, 2i+1) or (i, i + E/2): the same scores, bit by bit in fp32."""
    torch.manual_seed(0)
    x_pairs = torch.randn(1, 4, 9, 16)
    x_half = x_pairs.view(1, 4, 9, 8, 2).transpose(-1, -2).reshape(1, 4, 9, 16)
    angles = torch.arange(9.0)[:, None] * torch.tensor(inverse_frequencies(RopeConfig(1e4), 16))
    pairs = rotate(x_pairs, Rotation(angles.cos(), angles.sin(), True))
    half = rotate(x_half, Rotation(angles.cos(), angles.sin(), False))
    assert torch.equal(pairs.view(1, 4, 9, 8, 2).transpose(-1, -2).reshape(1, 4, 9, 16), half)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_spellings_of_the_scaling_reach_the_model(key: str) -> None:
    """meta-llama/llama3#299, foundation-model-stack/foundation-model-stack#384."""
    theirs, plain = Tiny("", "Llama", rope("llama3", 5e5, **LLAMA3_ROPE)).build()
    values = theirs.config.to_dict()
    values.pop("rope_parameters")
    values |= {"rope_theta": 5e5, "rope_scaling": {key: "llama3", **LLAMA3_ROPE}}
    with torch.device("meta"):
        ours = Decoder(parse_huggingface(values, where="a test"))
    ours.load_state_dict(plain.state_dict(), assign=True)
    ids = BY_NAME["rope-llama3"].ids()
    with torch.no_grad():
        expected = theirs(ids).logits
    assert (ours(ids, logits_to_keep=None) - expected).abs().max() <= 1e-5


def test_factor_of_3_2_is_32() -> None:
    """TransformerLensOrg/TransformerLens#910 had 8."""
    for name in ("llama-3.2-1b", "llama-3.2-3b"):
        model = find(name)
        assert model is not None
        assert model.config.rope.factor == 32.0


# --- attention ---


def test_mask_has_no_infinities_to_multiply() -> None:
    """Built from comparisons: triu of -inf is nan on MPS (pytorch/pytorch#100005)."""
    mask = _causal_mask(3, 5, None, torch.device("cpu"))
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    mask = _causal_mask(3, 5, 2, torch.device("cpu"))
    assert mask.int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


@pytest.mark.parametrize("position", GOLDEN["temperature"])
def test_golden_temperature(position: str) -> None:
    scaled = scale_by_position(torch.ones(1, 1, 1, 4), int(position), TemperatureConfig(8192, 0.1))
    assert scaled.flatten().tolist() == pytest.approx([GOLDEN["temperature"][position]] * 4, 1e-6)


def test_temperature_acts_beyond_32k_on_every_head() -> None:
    """vllm-project/vllm-gaudi#842 reshaped q wrongly there."""
    q = torch.ones(2, 8, 6, 4, dtype=torch.bfloat16)
    scaled = scale_by_position(q, 32764, TemperatureConfig(8192, 0.1))
    assert scaled.shape == q.shape
    assert scaled.dtype == q.dtype
    before, after = 1 + 0.1 * math.log(4), 1 + 0.1 * math.log(5)
    expected = [before] * 3 + [after] * 3  # position 32767 ends the fourth step
    assert scaled[1, 7, :, 3].tolist() == pytest.approx(expected, rel=2**-8)


# --- ids, logits ---


@pytest.mark.parametrize("bad", [-1, 97, 2**40])
def test_ids_without_a_row_are_refused(bad: int) -> None:
    """A pad id beyond the table (huggingface/transformers#23401)."""
    _, model = BY_NAME["gqa"].build()
    with pytest.raises(InputError, match=f"token id {bad} has no embedding: there are 97"):
        model(torch.tensor([[1, bad]]))


def test_no_pad_token_is_needed() -> None:
    """huggingface/transformers#22312: a config without a pad id runs in batches."""
    _, model = BY_NAME["gqa"].build()
    assert model.config.pad_token_id is None
    ids = BY_NAME["gqa"].ids(3)
    rows = torch.cat([model(ids[i : i + 1]) for i in range(3)])
    assert (model(ids) - rows).abs().max() <= 1e-5


def test_overflow_in_float16_is_said() -> None:
    """meta-llama/llama#380, JIA-Lab/LongLoRA#165: nan in float16, cured by bfloat16."""
    _, model = BY_NAME["biases"].build()
    model.layers["1"].mlp.up_proj.bias.fill_(3e4)
    model.layers["1"].mlp.down_proj.weight.mul_(100)
    ids = BY_NAME["biases"].ids(1)
    for dtype in (torch.float32, torch.bfloat16):
        require_finite(copy.deepcopy(model).to(dtype)(ids), dtype)
    half = copy.deepcopy(model).half()
    assert all(bool(parameter.isfinite().all()) for parameter in half.parameters())
    with pytest.raises(UnsupportedError, match="overflow in float16") as caught:
        require_finite(half(ids), torch.float16)
    assert caught.value.hint == "run it in bfloat16 or float32"


def test_logits_are_fp32_and_only_those_asked_for() -> None:
    _, model = BY_NAME["llama-3.2-like"].build(dtype=torch.bfloat16)
    ids = BY_NAME["gqa"].ids()
    whole = model(ids, logits_to_keep=None)
    for keep in (0, 1, 7, 40, 1000):
        logits = model(ids, logits_to_keep=keep)
        assert logits.dtype == torch.float32
        assert logits.shape == (2, min(keep, 40), 97)
        assert keep == 0 or (logits - whole[:, -keep:]).abs().max() <= 2**-6
    assert model(ids).shape == (2, 1, 97)


def test_the_last_layer_answers_only_what_is_asked() -> None:
    """Its queries, feed-forward and the output table see one position of forty."""
    from torch.utils.flop_counter import FlopCounterMode

    _, model = BY_NAME["gqa"].build()
    ids = BY_NAME["gqa"].ids(1)
    flops = {}
    for keep in (0, 1, None):
        with FlopCounterMode(display=False) as counter:
            model(ids, logits_to_keep=keep)
        flops[keep] = counter.get_total_flops()
    per_position = 2 * (2 * 64 * 64 + 3 * 64 * 96 + 64 * 97)  # q, o, feed-forward, output table
    assert flops[1] - flops[0] == pytest.approx(per_position, rel=0.15)  # and some attention
    assert flops[None] - flops[0] > 39 * per_position


def test_embeddings_in_place_of_ids() -> None:
    _, model = BY_NAME["scout"].build()
    ids = BY_NAME["scout"].ids()
    by_ids = model(ids, logits_to_keep=None)
    by_vectors = model(embeddings_BTD=model.embed(ids), logits_to_keep=None)
    assert torch.equal(by_ids, by_vectors)
    for both in ({}, {"ids_BT": ids, "embeddings_BTD": model.embed(ids)}):
        with pytest.raises(ValueError, match="either ids or embeddings"):
            model(**both)


def test_other_activations_are_refused() -> None:
    theirs, _ = BY_NAME["gqa"].build()
    values = {**theirs.config.to_dict(), "hidden_act": "gelu"}
    with pytest.raises(UnsupportedError, match="`hidden_act` is `gelu`"):
        Decoder(parse_huggingface(values, where="a test"))


def test_cross_attention_layers_are_skipped_for_text() -> None:
    """The text-only run of an image model equals the model without those layers."""
    transformers = pytest.importorskip("transformers")
    fields = {k: v for k, v in DENSE.items() if k != "initializer_range"}
    config = transformers.MllamaConfig(
        text_config={
            **fields, "num_hidden_layers": 5, "cross_attention_layers": [1, 3],
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "initializer_range": 0.12,
        },
        vision_config={"hidden_size": 32, "attention_heads": 2, "intermediate_size": 32,
                       "num_hidden_layers": 2, "num_global_layers": 1, "vision_output_dim": 96,
                       "image_size": 28, "intermediate_layers_indices": [0, 1]},
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.MllamaForConditionalGeneration(config).eval()
    with torch.device("meta"):
        ours = Decoder(parse_huggingface(config.to_dict(), where="a test"))
    assert list(ours.layers) == ["0", "2", "4"]
    state = {}
    for name, tensor in theirs.state_dict().items():
        name = name.removeprefix("model.").removeprefix("language_model.")
        if name in dict(ours.named_parameters()):
            state[name] = tensor
    ours.load_state_dict(state, assign=True)
    ids = BY_NAME["gqa"].ids()
    with torch.no_grad():
        expected = theirs(ids).logits
    assert (ours(ids, logits_to_keep=None) - expected).abs().max() <= 1e-5
    assert ours.embed_tokens.weight.shape[0] == 97 + 8
    assert ours.new_cache(10).num_bytes == 3 * 2 * 10 * 4 * 8 * 4
