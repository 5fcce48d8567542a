"""Weight bytes by dtype and by quantisation, with real packed layers as the oracle."""

import pytest

from llamatool.config.catalog import find
from llamatool.config.huggingface import parse_huggingface
from llamatool.sizing.parameters import count_parameters
from llamatool.sizing.weights import linear_modules, stored_weights, uniform_bytes
from tests.config.helpers import GOLDEN, config_values, llama, llama4


def parse(values):
    return parse_huggingface(values, where="config.json")


def stored(values):
    config = parse(values)
    return stored_weights(config, count_parameters(config))


def test_bytes_in_one_dtype():
    sizes = uniform_bytes(count_parameters(parse(config_values("llama-3.1-8b"))))
    assert sizes["bfloat16"] == 16_060_522_496
    assert sizes["float32"] == 32_121_044_992
    assert sizes["float8_e4m3fn"] == 8_030_261_248
    assert sizes["int4"] == 4_015_130_624


def test_the_dtype_of_the_file_counts_once():
    # 70B in bfloat16 was once shown elsewhere as half its size.
    assert stored(config_values("llama-3.1-70b-instruct")).num_bytes == 141_107_412_992


def test_405b_in_fp8_against_the_published_files():
    config = find("llama-3.1-405b-fp8").config
    count = count_parameters(config)
    found = stored_weights(config, count)
    assert found.num_bytes == 487_229_259_776
    assert found.exact
    # Meta's eight files hold the same tensors without row scales and with the norms eight times.
    published = GOLDEN_PTH["fp8_predicted_ffn_of_124_layers_fp8"] * 8
    norms_again = 7 * 2 * count.by_group["norms"]
    row_scales = 124 * 4 * (2 * 53248 + 16384)
    assert found.num_bytes == published - norms_again + row_scales


GOLDEN_PTH = GOLDEN["llama3.1_405b_pth_sizes"]


def test_modules_that_stay_are_honoured():
    block = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["model.layers.0", "lm_head"]}
    config = parse(llama(quantization_config=block))
    modules = [(name, r, c) for name, r, c in linear_modules(config)]
    packed = [(r, c) for name, r, c in modules if not name.startswith("model.layers.0.")]
    assert len(packed) == len(modules) - 7
    elements = sum(r * c for r, c in packed)
    expected = elements + sum(4 * r for r, _ in packed)
    expected += 2 * (count_parameters(config).total - elements)
    assert stored(llama(quantization_config=block)).num_bytes == expected


@pytest.mark.parametrize(
    "pattern", ["self_attn", "re:.*self_attn.*", "re:model\\.layers\\.\\d+\\.self_attn"]
)
def test_patterns_of_modules_that_stay(pattern):
    block = {"quant_method": "compressed-tensors", "ignore": [pattern]}
    block["config_groups"] = {"group_0": {"weights": {"num_bits": 8, "group_size": None}}}
    with_attention = stored(llama(quantization_config={**block, "ignore": []})).num_bytes
    assert stored(llama(quantization_config=block)).num_bytes > with_attention


def test_gptq_layout():
    # One q_proj of 64 x 64 at 4 bits in groups of 32: 2048 bytes of words, 2 x 128 of scales,
    # 64 of zero points and 256 of input indices.
    block = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    from llamatool.sizing.weights import _packed_bytes

    quantization = parse(llama(quantization_config=block)).quantization
    assert _packed_bytes(64, 64, quantization) == 2048 + 256 + 64 + 256


def test_an_unknown_scheme_is_an_estimate():
    found = stored(llama(quantization_config={"quant_method": "quip"}))
    assert not found.exact
    assert "not understood" in found.description


def test_experts_count_one_by_one():
    names = [name for name, _, _ in linear_modules(parse(llama4()))]
    assert sum(name.endswith("experts.gate_proj") for name in names) == 2 * 4
    assert sum(".shared_expert." in name for name in names) == 2 * 3


def test_embeddings_of_metas_int4_are_8_bit():
    entry = find("llama-3.2-1b-instruct-spinquant-int4")
    count = count_parameters(entry.config)
    found = stored_weights(entry.config, count)
    assert not found.exact
    linear = count.by_group["attention"] + count.by_group["mlp"]
    table = count.by_group["embedding"]
    assert found.num_bytes == linear // 2 + 2 * linear // 32 + table + 2 * count.by_group["norms"]
