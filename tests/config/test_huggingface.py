"""config.json in every spelling, with the class defaults of transformers as the oracle."""

import copy
import warnings

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamatool.config.huggingface import parse_huggingface
from llamatool.config.layers import plan_layers
from llamatool.errors import ConfigError, InputError, UnsupportedError
from llamatool.sizing.parameters import count_parameters
from tests.config.helpers import CONFIGS, config_values, llama, llama4


def parse(values):
    return parse_huggingface(values, where="config.json")


def resaved(name: str) -> dict:
    """The configuration as transformers 5 writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(**copy.deepcopy(config_values(name)))
    return config.to_dict()


READABLE = [path.stem for path in CONFIGS if path.stem != "internlm-chat-7b"]


@pytest.mark.parametrize("name", READABLE)
def test_the_spelling_of_transformers_5_gives_the_same_model(name):
    old, new = parse(config_values(name)), parse(resaved(name))
    assert "rope_parameters" in str(resaved(name))
    for field in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
        "rope",
        "moe",
        "no_rope_layers",
        "attention_chunk_size",
        "sliding_window",
        "vision",
        "rms_norm_eps",
        "qk_norm",
    ):
        assert getattr(old, field) == getattr(new, field), field
    assert plan_layers(old) == plan_layers(new)
    assert count_parameters(old) == count_parameters(new)


@pytest.mark.parametrize("name", READABLE)
def test_layer_kinds_are_those_of_transformers(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoConfig.for_model(**copy.deepcopy(config_values(name)))
    text = theirs.get_text_config()
    ours = plan_layers(parse(config_values(name)))
    types = getattr(text, "layer_types", None)
    if types is not None and text.model_type != "mistral":
        assert [f"{layer.attention}_attention" for layer in ours] == list(types)
    if hasattr(text, "no_rope_layers"):
        assert [int(layer.uses_rope) for layer in ours] == list(text.no_rope_layers)
        assert [i for i, layer in enumerate(ours) if layer.moe] == list(text.moe_layers)


def test_every_value_remembers_its_origin():
    config = parse(llama(num_key_value_heads=...))
    assert config.origins["hidden_size"] == "file"
    assert config.origins["num_key_value_heads"] == "default"
    assert config.origins["head_dim"] == "derived"
    assert config.origins["rope_theta"] == "default"
    assert config.origins["tie_word_embeddings"] == "default"


@pytest.mark.parametrize("absent", [..., None])
def test_absent_or_null_key_value_heads_mean_multi_head_attention(absent):
    assert parse(llama(num_key_value_heads=absent)).num_key_value_heads == 8


@pytest.mark.parametrize("absent", [..., None])
def test_absent_or_null_head_dim_is_derived(absent):
    assert parse(llama(head_dim=absent)).head_dim == 8


def test_an_explicit_head_dim_wins():
    # Llama-3.1-Minitron-4B-Width: 128 although 3072 / 32 is 96.
    minitron = llama(
        hidden_size=3072,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=9216,
        vocab_size=128256,
        head_dim=128,
    )
    assert count_parameters(parse(minitron)).total == 4_512_746_496


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"],
)
@pytest.mark.parametrize("absent", [..., None])
def test_a_missing_size_is_an_error_that_names_the_key(key, absent):
    with pytest.raises(ConfigError, match=f"`{key}` is (missing|null)") as caught:
        parse(llama(**{key: absent}))
    assert caught.value.where == "config.json"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, '`hidden_size` is `"64"`, expected a whole number'),
        ({"hidden_size": True}, "`hidden_size` is true, expected a whole number"),
        ({"hidden_size": 64.5}, "`hidden_size` is 64.5, expected a whole number"),
        ({"hidden_size": -64}, "`hidden_size` is -64, expected a number from 1"),
        ({"hidden_size": 2**40}, "expected a number from 1 to 2147483647"),
        ({"num_hidden_layers": 5000}, "`num_hidden_layers` is 5000, expected at most 4096"),
        ({"num_key_value_heads": 3}, "`num_key_value_heads` = 3 does not divide"),
        ({"num_attention_heads": 7}, "`num_attention_heads` = 7 does not divide"),
        ({"num_attention_heads": 64}, "`head_dim` = 1 is odd"),
        ({"head_dim": 7}, "`head_dim` = 7 is odd"),
        ({"rope_theta": "big"}, '`rope_theta` is `"big"`, expected a number'),
        ({"rope_theta": -1}, "`rope_theta` is -1, expected a positive number"),
        ({"eos_token_id": ["a"]}, '`eos_token_id` is `"a"`, expected a whole number'),
        ({"rope_scaling": []}, "`rope_scaling` is a list of 0, expected an object"),
        ({"rope_scaling": {"rope_type": "magic"}}, "`rope_scaling.rope_type` is `magic`"),
        ({"rope_scaling": {"type": "linear"}}, "`rope_scaling.factor` is missing"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "low_freq_factor` is missing"),
        ({"layer_types": ["full_attention"]}, "`layer_types` is a list of 1, expected a list of 4"),
        ({"num_key_value_heads": [2, 2]}, "`num_key_value_heads` is a list of 2"),
        ({"num_key_value_heads": [2, 2, 2, 3]}, "expected a divisor of 8"),
        (
            {"tie_word_embeddings": "yes"},
            '`tie_word_embeddings` is `"yes"`, expected true or false',
        ),
        ({"model_type": ...}, "`model_type` is missing"),
        ({"model_type": "mllama"}, "`text_config` is missing"),
    ],
)
def test_a_wrong_value_is_one_clear_error(changes, message):
    with pytest.raises(ConfigError) as caught:
        parse(llama(**changes))
    assert message in str(caught.value)


@pytest.mark.parametrize("model_type", ["gpt2", "phi3", "gemma2", "deepseek_v3"])
def test_another_architecture_is_refused_by_name(model_type):
    with pytest.raises(UnsupportedError, match=f"model_type `{model_type}`"):
        parse(llama(model_type=model_type))


def test_a_list_of_head_dims_is_refused():
    with pytest.raises(UnsupportedError, match="`head_dim` is a list"):
        parse(llama(head_dim=[16, 16, 16, 16]))


def test_key_value_heads_per_layer_are_sized_by_layer():
    config = parse(llama(num_key_value_heads=[1, 2, 4, 8]))
    assert [layer.num_key_value_heads for layer in plan_layers(config)] == [1, 2, 4, 8]
    expected = sum(64 * 8 * (2 * 8 + 2 * heads) for heads in (1, 2, 4, 8))
    assert count_parameters(config).by_group["attention"] == expected


LLAMA3_BLOCK = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_type_and_rope_type_are_one():
    block = dict(LLAMA3_BLOCK)
    block["type"] = block.pop("rope_type")
    assert parse(llama(rope_scaling=block)).rope == parse(llama(rope_scaling=LLAMA3_BLOCK)).rope


def test_theta_stands_in_either_spelling():
    # A default of 10000 beside `rope_parameters` was once a hundredfold mistake elsewhere.
    new = llama(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert parse(new).rope.theta == parse(llama(rope_theta=1e6)).rope.theta == 1e6
    assert parse(llama()).rope.theta == 10000.0
    assert parse(llama()).origins["rope_theta"] == "default"


def test_rope_scaling_wins_over_rope_parameters_with_a_warning():
    values = llama(
        rope_theta=500000.0,
        rope_scaling=LLAMA3_BLOCK,
        rope_parameters={**LLAMA3_BLOCK, "factor": 32.0, "rope_theta": 500000.0},
    )
    config = parse(values)
    assert config.rope.factor == 8.0
    assert [note.code for note in config.notes] == ["rope-spellings-disagree"]
    theirs = transformers.LlamaConfig(**values)
    assert theirs.rope_parameters["factor"] == 8.0


def test_theta_of_rope_parameters_wins_as_in_transformers():
    values = llama(rope_theta=7.0, rope_parameters={"rope_type": "default", "rope_theta": 9.0})
    assert parse(values).rope.theta == 9.0
    assert transformers.LlamaConfig(**values).rope_parameters["rope_theta"] == 9.0
    assert parse(values).notes[0].code == "rope-spellings-disagree"


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16", "torch_dtype": ...},
        {"torch_dtype": "float16"},
        {"torch_dtype": "torch.float16"},
        {"dtype": None, "torch_dtype": "float16"},
    ],
)
def test_both_names_of_the_dtype(changes):
    assert parse(llama(**changes)).dtype == "float16"


def test_a_nested_dtype_and_tie_are_found():
    values = config_values("llama-3.2-11b-vision")
    del values["torch_dtype"]
    values["tie_word_embeddings"] = None
    values["text_config"]["tie_word_embeddings"] = True
    config = parse(values)
    assert config.dtype == "bfloat16"
    assert config.tie_word_embeddings


def test_no_dtype_is_a_warning():
    config = parse(llama(torch_dtype=...))
    assert config.dtype is None
    assert [note.code for note in config.notes] == ["dtype-missing"]


@pytest.mark.parametrize("value", [2, [2], [128001, 128008, 128009]])
def test_eos_is_a_number_or_a_list(value):
    expected = tuple(value) if isinstance(value, list) else (value,)
    assert parse(llama(eos_token_id=value)).eos_token_ids == expected


# --- Llama 4 --------------------------------------------------------------------------------


def kinds(**changes):
    layers = plan_layers(parse(llama4(**changes)))
    return "".join(layer.attention[0].upper() if layer.uses_rope else "-" for layer in layers)


@pytest.mark.parametrize("value", [..., None, [], [1, 1, 1, 0]])
def test_absent_empty_and_explicit_no_rope_layers_agree(value):
    # 1 means that the layer uses RoPE.
    assert kinds(no_rope_layers=value) == "CCC-"


def test_scout_with_its_explicit_list_is_the_same():
    values = config_values("llama-4-scout-17b-16e-instruct")
    explicit = copy.deepcopy(values)
    explicit["text_config"]["no_rope_layers"] = [int((i + 1) % 4 != 0) for i in range(48)]
    assert plan_layers(parse(values)) == plan_layers(parse(explicit))
    nope = [layer.index for layer in plan_layers(parse(values)) if not layer.uses_rope]
    assert nope == list(range(3, 48, 4))


def test_a_null_chunk_size_makes_every_layer_full():
    layers = plan_layers(parse(llama4(attention_chunk_size=None)))
    assert {layer.attention for layer in layers} == {"full"}
    assert [layer.uses_rope for layer in layers] == [True, True, True, False]


def test_an_absent_chunk_size_is_the_default_of_transformers():
    config = parse(llama4(attention_chunk_size=...))
    assert config.attention_chunk_size == transformers.Llama4TextConfig().attention_chunk_size
    assert [note.code for note in config.notes] == ["chunk-size-missing"]


def test_explicit_layer_types_win():
    types = ["full_attention", "chunked_attention", "chunked_attention", "full_attention"]
    layers = plan_layers(parse(llama4(layer_types=types)))
    assert [layer.attention for layer in layers] == ["full", "chunked", "chunked", "full"]
    with pytest.raises(ConfigError, match=r"`layer_types\[0\]` is `strange`"):
        plan_layers(parse(llama4(layer_types=["strange"] * 4)))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1, 3]),
        ({"interleave_moe_layer_step": 1}, [0, 1, 2, 3]),
        ({"interleave_moe_layer_step": 0}, []),
        ({"moe_layers": []}, []),
        ({"moe_layers": [2]}, [2]),
        ({"num_local_experts": 0}, []),
    ],
)
def test_layers_with_experts(changes, expected):
    layers = plan_layers(parse(llama4(**changes)))
    assert [layer.index for layer in layers if layer.moe] == expected
    assert {layer.intermediate_size for layer in layers if not layer.moe} <= {256}


@pytest.mark.parametrize(("value", "expected"), [(4, True), (True, True), (0, False), (..., True)])
def test_temperature_tuning_is_read_by_truth(value, expected):
    # Early files hold the integer 4 here.
    layers = plan_layers(parse(llama4(attn_temperature_tuning=value)))
    assert [layer.temperature is not None for layer in layers] == [False] * 3 + [expected]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "`no_rope_layers` is a list of 2, expected a list of 4"),
        ({"moe_layers": [4]}, "`moe_layers` is 4, expected an index below"),
        ({"moe_layers": [1, 1]}, "distinct layer indices"),
        ({"num_experts_per_tok": 5}, "at most num_local_experts = 4"),
        ({"intermediate_size_mlp": ...}, "`intermediate_size_mlp` is missing"),
        ({"num_local_experts": ...}, "`num_local_experts` is missing"),
    ],
)
def test_contradictions_of_llama_4(changes, message):
    with pytest.raises(ConfigError) as caught:
        parse(llama4(**changes))
    assert message in str(caught.value)


# --- windows --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, 4),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, 0),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            1,
        ),
        ({"model_type": "llama", "sliding_window": 64}, 0),
    ],
)
def test_a_sliding_window_counts_only_where_the_model_uses_it(changes, expected):
    layers = plan_layers(parse(llama(**changes)))
    assert sum(layer.attention == "sliding" for layer in layers) == expected


# --- quantisation ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "method", "bits", "group"),
    [
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8", 8, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8, 16384),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq", 4, 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "gptq", 4, None),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "awq", 4, 64),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", 4, 64),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes", 8, None),
        (
            {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}}},
            "compressed-tensors",
            4,
            128,
        ),
        ({"quant_method": "quip"}, "quip", None, None),
    ],
)
def test_quantisation_changes_bytes_and_never_the_count(block, method, bits, group):
    plain, packed = parse(llama()), parse(llama(quantization_config=block))
    assert packed.quantization is not None
    assert packed.quantization.method == method
    assert packed.quantization.bits == bits
    assert packed.quantization.group_size == group
    assert count_parameters(plain) == count_parameters(packed)
    assert plan_layers(plain) == plan_layers(packed)


# --- anything at all ------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(2**70), max_value=2**70),
    st.integers(min_value=0, max_value=64),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = sorted(
    set(llama4())
    | {"rope_scaling", "rope_parameters", "text_config", "vision_config", "head_dim"}
    | {"quantization_config", "eos_token_id", "layer_types", "moe_layers", "no_rope_layers"}
    | {"cross_attention_layers", "sliding_window", "tie_word_embeddings", "architectures"}
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    base=st.sampled_from(["llama", "llama4", "scout", "vision", "qwen2", "empty"]),
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
)
def test_any_object_gives_a_model_or_an_error_of_ours(base, changes):
    values = {
        "llama": llama(),
        "llama4": llama4(),
        "scout": config_values("llama-4-scout-17b-16e"),
        "vision": config_values("llama-3.2-11b-vision"),
        "qwen2": llama(model_type="qwen2", use_sliding_window=True),
        "empty": {},
    }[base]
    values.update(changes)
    try:
        config = parse(values)
        count = count_parameters(config)
    except InputError:
        return
    assert count.total > 0
    assert len(plan_layers(config)) == config.num_hidden_layers
