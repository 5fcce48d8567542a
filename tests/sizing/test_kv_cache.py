"""Bytes of the KV cache: golden integers, the four policies, element types, images, ranks."""

import json
from functools import cache
from pathlib import Path

import pytest

from llamatool.config.huggingface import parse_huggingface
from llamatool.config.layers import plan_layers, split_layers
from llamatool.config.model import ModelConfig
from llamatool.dtypes import by_name
from llamatool.errors import UsageError
from llamatool.sizing.curve import Crossing, crossings, curve_lengths
from llamatool.sizing.kv_cache import (
    KV_DTYPES,
    POLICIES,
    KvCache,
    Policy,
    image_positions,
    kv_bytes,
    kv_cache,
    layer_bytes_per_token,
    with_kv_heads,
)

DATA = Path(__file__).parent.parent / "data"
GOLDEN = json.loads((DATA / "golden.json").read_text())["models"]
LENGTHS = (8000, 8192, 100_000, 128_000, 131_072)

# A published shape whose head_dim is not hidden_size / num_attention_heads (3072 / 32 is 96).
MINITRON = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 3072,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9216,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}


@cache
def raw(model: str) -> str:
    return (DATA / GOLDEN[model]["config"]).read_text()


@cache
def config(model: str) -> ModelConfig:
    if model == "minitron-4b-width":
        return parse_huggingface(MINITRON, where=model)
    return parse_huggingface(json.loads(raw(model)), where=model)


def changed(model: str, **text: object) -> ModelConfig:
    """The model's configuration with some keys of its text block replaced."""
    values = json.loads(raw(model))
    values.get("text_config", values).update(text)
    return parse_huggingface(values, where=model)


def cache_of(model: str, dtype: str = "bfloat16") -> KvCache:
    return kv_cache(plan_layers(config(model)), dtype=dtype, vision=config(model).vision)


SCOUT = "llama-4-scout-17b-16e-instruct"
MAVERICK = "llama-4-maverick-17b-128e-instruct"


@pytest.mark.parametrize("model", GOLDEN)
def test_golden_integers_of_every_model_and_length(model: str) -> None:
    golden = GOLDEN[model]["kv_cache_bf16"]
    held = cache_of(model)
    assert held.growing_bytes_per_token == golden["bytes_per_token_global"]
    assert held.in_window_bytes_per_token == golden["bytes_per_token_all_layers"]
    windowed = [group for group in held.groups if group.window is not None]
    assert sum(group.num_layers for group in windowed) == golden["local_layers"]
    assert sum(g.num_layers for g in held.groups if g.window is None) == golden["global_layers"]
    assert all(group.window == golden["local_window"] for group in windowed)
    for tokens in LENGTHS:
        row = golden[str(tokens)]
        assert held.num_bytes(tokens) == row["total_capped"]
        assert held.num_bytes(tokens, policy="no_eviction") == row["total_no_eviction"]
        assert held.growing_bytes_per_token * tokens == row["global"]
        assert kv_bytes(plan_layers(config(model)), tokens) == row["total_capped"]


@pytest.mark.parametrize(
    ("model", "per_token", "at_100000"),
    [
        ("llama-1-7b", 524_288, 52_428_800_000),
        ("llama-2-7b", 524_288, 52_428_800_000),
        ("llama-2-13b", 819_200, 81_920_000_000),
        ("llama-1-30b", 1_597_440, 159_744_000_000),
        ("llama-1-65b", 2_621_440, 262_144_000_000),
        ("llama-2-70b", 327_680, 32_768_000_000),
        ("llama-3.3-70b-instruct", 327_680, 32_768_000_000),
        ("llama-3.2-90b-vision-instruct", 327_680, 32_768_000_000),
        ("codellama-34b", 196_608, 19_660_800_000),
        ("llama-3.1-8b", 131_072, 13_107_200_000),
        ("minitron-4b-width", 131_072, 13_107_200_000),
        ("llama-3.2-11b-vision-instruct", 131_072, 13_107_200_000),
        ("llama-3.1-405b-instruct", 516_096, 51_609_600_000),
        ("llama-3.1-405b-mp16", 1_032_192, 103_219_200_000),
        ("llama-3.2-1b", 32_768, 3_276_800_000),
        ("llama-3.2-3b", 114_688, 11_468_800_000),
    ],
)
def test_published_table_of_full_attention_models(
    model: str, per_token: int, at_100000: int
) -> None:
    held = cache_of(model)
    assert held.growing_bytes_per_token == held.in_window_bytes_per_token == per_token
    for policy in POLICIES:
        assert held.num_bytes(100_000, policy=policy) == at_100000


def test_docstring_numbers() -> None:
    layers = plan_layers(config("llama-3.1-8b"))
    assert kv_bytes(layers, 131_072) == 17_179_869_184
    assert kv_bytes(layers, 128_000) == 16_777_216_000
    widths = {name: layer_bytes_per_token(layers[0], _dtype(name)) for name in ("bf16", "q8_0")}
    assert widths == {"bf16": 4096, "q8_0": 2176}
    assert layer_bytes_per_token(layers[0], _dtype("q4_0")) == 1152
    assert image_positions(config("llama-3.2-11b-vision-instruct").vision) == 6404
    assert image_positions(config("llama-3.2-11b-vision").vision) == 4100


# tokens: global layers only, capped, vLLM hybrid with 8,192 batched tokens, no eviction
LLAMA_4_ROWS = [
    (8_192, 402_653_184, 1_610_612_736, 1_610_612_736, 1_610_612_736),
    (32_768, 1_610_612_736, 2_818_572_288, 4_026_531_840, 6_442_450_944),
    (65_536, 3_221_225_472, 4_429_185_024, 5_637_144_576, 12_884_901_888),
    (100_000, 4_915_200_000, 6_123_159_552, 7_331_119_104, 19_660_800_000),
    (131_072, 6_442_450_944, 7_650_410_496, 8_858_370_048, 25_769_803_776),
    (1_048_576, 51_539_607_552, 52_747_567_104, 53_955_526_656, 206_158_430_208),
    (10_485_760, 515_396_075_520, 516_604_035_072, 517_811_994_624, 2_061_584_302_080),
]


@pytest.mark.parametrize("model", [SCOUT, MAVERICK])
@pytest.mark.parametrize(("tokens", "full", "capped", "vllm", "everything"), LLAMA_4_ROWS)
def test_llama_4_policies(
    model: str, tokens: int, full: int, capped: int, vllm: int, everything: int
) -> None:
    held = cache_of(model)
    assert tokens * held.growing_bytes_per_token == full
    assert held.num_bytes(tokens) == capped
    assert held.num_bytes(tokens, policy="vllm_hybrid") == vllm
    assert held.num_bytes(tokens, policy="no_eviction") == everything


def test_live_chunk_keeps_the_tokens_of_the_unfinished_chunk() -> None:
    held = cache_of(SCOUT)
    assert held.num_bytes(100_000, policy="live_chunk_only") == 5_165_285_376  # 1,696 tokens
    assert held.num_bytes(8_191, policy="live_chunk_only") == held.num_bytes(8_191)
    assert held.num_bytes(8_192, policy="live_chunk_only") == 8_192 * 49_152


@pytest.mark.parametrize(
    ("batched", "local_tokens"), [(2_048, 10_240), (8_192, 16_384), (131_072, 100_000)]
)
def test_vllm_charges_the_batched_tokens_up_to_the_length(batched: int, local_tokens: int) -> None:
    held = cache_of(SCOUT)
    expected = 49_152 * 100_000 + 147_456 * local_tokens
    assert held.num_bytes(100_000, policy="vllm_hybrid", max_batched_tokens=batched) == expected


@pytest.mark.parametrize("tokens", [1, 100, 8_191, 8_192])
@pytest.mark.parametrize("policy", ["capped", "no_eviction", "vllm_hybrid"])
def test_below_the_chunk_every_layer_holds_every_token(tokens: int, policy: Policy) -> None:
    assert cache_of(SCOUT).num_bytes(tokens, policy=policy) == tokens * 196_608


def test_no_chunk_size_makes_every_layer_full() -> None:
    config_ = changed(SCOUT, attention_chunk_size=None, layer_types=None)
    assert kv_bytes(plan_layers(config_), 100_000) == 19_660_800_000


@pytest.mark.parametrize("no_rope_layers", [[], None, [1, 1, 1, 0] * 12])
def test_no_rope_layers_empty_absent_or_spelled_out(no_rope_layers: object) -> None:
    config_ = changed(SCOUT, no_rope_layers=no_rope_layers, layer_types=None)
    assert kv_bytes(plan_layers(config_), 100_000) == 6_123_159_552


def test_explicit_layer_types_decide() -> None:
    kinds = ["chunked_attention"] * 40 + ["full_attention"] * 8
    held = kv_bytes(plan_layers(changed(SCOUT, layer_types=kinds)), 100_000)
    assert held == 4096 * (8 * 100_000 + 40 * 8192)


def test_a_million_tokens_over_eight_ranks_without_eviction() -> None:
    # vllm issue 16118 quotes 24.00 GiB per GPU.
    rank = kv_cache(split_layers(plan_layers(config(SCOUT)), 8))
    assert rank.num_bytes(1_048_576, policy="no_eviction") == 25_769_803_776 == 24 * 2**30


def test_crossing_of_scout_and_8b() -> None:
    pair = [(SCOUT, cache_of(SCOUT)), ("llama-3.1-8b", cache_of("llama-3.1-8b"))]
    for models in (pair, pair[::-1]):
        assert crossings(models, 131_072) == (
            Crossing(14_746, 14_746 * 49_152 + 1_207_959_552, SCOUT, "llama-3.1-8b"),
        )
    scout, dense = pair[0][1], pair[1][1]
    assert scout.num_bytes(14_745) > dense.num_bytes(14_745)
    assert scout.num_bytes(14_746) < dense.num_bytes(14_746)
    assert crossings(pair, 14_745) == ()
    # Sequences count on both sides; an image counts for none of the two.
    assert [c.num_tokens for c in crossings(pair, 131_072, batch_size=7, num_images=2)] == [14_746]
    assert crossings(pair, 131_072, batch_size=7)[0].num_bytes == 7 * scout.num_bytes(14_746)


def test_images_move_the_crossing() -> None:
    vision, dense = cache_of("llama-3.2-11b-vision-instruct"), cache_of(SCOUT)
    pair = [("vision", vision), (SCOUT, dense)]
    assert [c.num_tokens for c in crossings(pair, 131_072)] == [14_746]
    with_image = crossings(pair, 131_072, num_images=1)
    assert [(c.num_tokens, c.smaller) for c in with_image] == [(3_203, "vision"), (12_185, SCOUT)]
    for crossing in with_image:
        before, at = (
            vision.num_bytes(n, num_images=1) - dense.num_bytes(n, num_images=1)
            for n in (crossing.num_tokens - 1, crossing.num_tokens)
        )
        assert before * at <= 0 != at


def test_equal_curves_do_not_cross() -> None:
    same = cache_of("llama-3.1-8b")
    assert crossings([("a", same), ("b", same)], 131_072) == ()
    # Mistral's is the same up to its window and smaller after it: no change of order.
    assert crossings([("a", same), ("b", cache_of("mistral-7b-v0.1"))], 131_072) == ()


def test_curve_lengths() -> None:
    assert curve_lengths(131_072) == (4096, 8192, 16384, 32768, 65536, 131072)
    assert curve_lengths(100_000)[-2:] == (65536, 100_000)
    assert curve_lengths(2048) == (2048,)


@pytest.mark.parametrize(
    ("model", "per_image"),
    [
        ("llama-3.2-11b-vision-instruct", 209_846_272),
        ("llama-3.2-11b-vision", 134_348_800),
        ("llama-3.2-90b-vision-instruct", 524_615_680),
        (SCOUT, 0),
        ("llama-3.1-8b", 0),
    ],
)
def test_an_image_adds_a_fixed_amount(model: str, per_image: int) -> None:
    held = cache_of(model)
    assert held.bytes_per_image == per_image
    grown = held.num_bytes(1000, num_images=3, batch_size=2)
    assert grown == 2 * (held.num_bytes(1000) + 3 * per_image)


def test_cross_attention_layers_hold_no_text() -> None:
    layers = plan_layers(config("llama-3.2-11b-vision-instruct"))
    assert sum(layer.attention == "cross" for layer in layers) == 8
    assert sum(group.num_layers for group in kv_cache(layers).groups) == 32


def test_sliding_window_caps_mistral() -> None:
    held = cache_of("mistral-7b-v0.1")
    assert held.num_bytes(4_095) < held.num_bytes(4_096) == held.num_bytes(10**6) == 536_870_912
    assert held.num_bytes(100_000, policy="no_eviction") == 13_107_200_000
    # vLLM: window - 1 + batched tokens, and with pages one more of them.
    assert held.num_bytes(100_000, policy="vllm_hybrid") == 131_072 * 12_287
    paged = held.num_bytes(100_000, policy="vllm_hybrid", page_tokens=16)
    assert paged == 131_072 * (12_288 + 16)


@pytest.mark.parametrize("model", ["qwen2-7b-instruct", "qwen3-8b", "mistral-7b-v0.3"])
def test_a_window_that_is_switched_off_caps_nothing(model: str) -> None:
    assert all(group.window is None for group in cache_of(model).groups)


@pytest.mark.parametrize(
    ("dtype", "per_token"),
    [
        ("float32", 262_144),
        ("bf16", 131_072),
        ("fp16", 131_072),
        ("fp8", 65_536),
        ("int8", 65_536),
        ("q8_0", 69_632),
        ("q4_0", 36_864),
        ("q5_0", 45_056),
    ],
)
def test_cache_element_types_of_8b(dtype: str, per_token: int) -> None:
    assert cache_of("llama-3.1-8b", dtype).growing_bytes_per_token == per_token


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_the_listed_element_types_are_known(dtype: str) -> None:
    assert cache_of("llama-3.1-8b", dtype).growing_bytes_per_token > 0


def test_a_started_block_of_a_head_counts_whole() -> None:
    # head_dim 100 needs four q8_0 blocks of 32 values.
    layer = plan_layers(config("open-llama-3b"))[0]
    assert layer.head_dim == 100
    assert layer_bytes_per_token(layer, _dtype("q8_0")) == 2 * 32 * 4 * 34


@pytest.mark.parametrize("dtype", ["q9_9", "bool", ""])
def test_unknown_element_type(dtype: str) -> None:
    with pytest.raises(UsageError, match="is no element type of a KV cache"):
        kv_cache(plan_layers(config("llama-3.1-8b")), dtype=dtype)


@pytest.mark.parametrize(
    ("scheme", "heads", "per_token"),
    [("mha", 64, 2_621_440), ("gqa:8", 8, 327_680), ("gqa:16", 16, 655_360), ("mqa", 1, 40_960)],
)
def test_what_if_llama_2_70b_had_other_heads(scheme: str, heads: int, per_token: int) -> None:
    other = with_kv_heads(config("llama-2-70b"), scheme)
    assert other.num_key_value_heads == heads
    assert kv_cache(plan_layers(other)).growing_bytes_per_token == per_token


@pytest.mark.parametrize(
    "scheme", ["", "gqa", "gqa:0", "gqa:7", "gqa:x", "gqa:-8", "mha:2", "gqa:99999999999", "mla"]
)
def test_what_if_schemes_that_make_no_sense(scheme: str) -> None:
    with pytest.raises(UsageError):
        with_kv_heads(config("llama-2-70b"), scheme)


@pytest.mark.parametrize(("ranks", "per_token"), [(1, 516_096), (2, 258_048), (8, 64_512)])
def test_ranks_share_the_kv_heads(ranks: int, per_token: int) -> None:
    layers = split_layers(plan_layers(config("llama-3.1-405b-instruct")), ranks)
    assert kv_cache(layers).growing_bytes_per_token == per_token


def test_more_ranks_than_kv_heads_do_not_halve_the_cache() -> None:
    layers = plan_layers(config("llama-3.1-405b-instruct"))
    at_8 = kv_cache(split_layers(layers, 8)).num_bytes(100_000)
    assert kv_cache(split_layers(layers, 16)).num_bytes(100_000) == at_8 == 6_451_200_000


def test_pages_count_whole() -> None:
    held = cache_of("llama-3.1-8b")
    assert held.num_bytes(1, page_tokens=16) == held.num_bytes(16)
    assert held.num_bytes(100_001, page_tokens=16) == held.num_bytes(100_016)


# What other tools print for 100,000 tokens in bfloat16, and the right figure. Each of their
# mistakes is one of ours to make: all layers counted as full, cross-attention counted as self
# attention, head_dim taken as hidden_size / num_attention_heads, KV heads taken as heads.
WRONG_ELSEWHERE = [
    ("hf-mem: no eviction as the only figure", SCOUT, 19_660_800_000, 6_123_159_552),
    ("hf-mem: 192 GiB", SCOUT, 206_158_430_208, 52_747_567_104),
    ("modelinfo: 18.31", SCOUT, 19_660_800_000, 6_123_159_552),
    ("modelinfo: 25.18, a vision tower's k_proj", SCOUT, 27_033_600_000, 6_123_159_552),
    ("vramscout: 40 layers", "llama-3.2-11b-vision-instruct", 16_384_000_000, 13_107_200_000),
    ("modelinfo: 19.07", "llama-3.2-11b-vision-instruct", 20_480_000_000, 13_107_200_000),
    ("modelinfo: head_dim 96", "minitron-4b-width", 9_830_400_000, 13_107_200_000),
    ("hf-vram-calc: head_dim 96", "minitron-4b-width", 9_830_400_000, 13_107_200_000),
    ("llm-plan: 4 x", "llama-3.1-8b", 52_428_800_000, 13_107_200_000),
    ("llm-plan: 4 x", "llama-3.2-1b", 13_107_200_000, 3_276_800_000),
    ("llm-plan: 3 x", "minitron-4b-width", 39_321_600_000, 13_107_200_000),
    ("llm-plan: 8 x", "llama-2-70b", 262_144_000_000, 32_768_000_000),
]


@pytest.mark.parametrize(
    ("model", "wrong", "right"), [row[1:] for row in WRONG_ELSEWHERE], ids=lambda v: str(v)
)
def test_figures_that_other_tools_get_wrong(model: str, wrong: int, right: int) -> None:
    tokens = 1_048_576 if right == 52_747_567_104 else 100_000
    assert cache_of(model).num_bytes(tokens) == right != wrong


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-3.1-8b", "llama-3.2-1b"])
def test_figures_that_other_tools_get_right(model: str) -> None:
    expected = {"llama-2-7b": 48.83, "llama-3.1-8b": 12.21, "llama-3.2-1b": 3.05}
    assert round(cache_of(model).num_bytes(100_000) / 2**30, 2) == expected[model]


def test_kv_heads_per_layer_are_summed() -> None:
    heads = [4, 8] * 16
    values = dict(MINITRON, num_key_value_heads=heads)
    layers = plan_layers(parse_huggingface(values, where="per layer"))
    assert kv_cache(layers).growing_bytes_per_token == 2 * 128 * 2 * sum(heads)


def _dtype(name: str):
    dtype = by_name(name)
    assert dtype is not None
    return dtype
