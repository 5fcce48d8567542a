"""params.json of every generation against the config.json of the same model."""

import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamatool.config.generation import identify
from llamatool.config.huggingface import parse_huggingface
from llamatool.config.layers import plan_layers
from llamatool.config.meta import feed_forward_size, is_meta, parse_meta
from llamatool.errors import ConfigError, InputError
from llamatool.sizing.parameters import count_parameters
from tests.config.helpers import CODE_ROWS, CONFIGS, GOLDEN, PARAMS, config_values, params_values


def parse(name, **options):
    options.setdefault("embedding_rows", CODE_ROWS.get(name))
    return parse_meta(params_values(name), where="params.json", **options)


COUNTERPARTS = sorted({p.stem for p in PARAMS} & {p.stem for p in CONFIGS})


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_the_same_model_as_its_config_json(name):
    ours, theirs = parse(name), parse_huggingface(config_values(name), where="config.json")
    for field in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "intermediate_size_mlp",
        "vocab_size",
        "embedding_rows",
        "tie_word_embeddings",
        "cross_attention_layers",
        "no_rope_layers",
        "attention_chunk_size",
        "qk_norm",
        "temperature",
        "moe",
        "vision",
        "rms_norm_eps",
    ):
        assert getattr(ours, field) == getattr(theirs, field), field
    if name != "llama-guard-3-8b":  # its params.json says that RoPE is not scaled
        assert ours.rope == theirs.rope
    assert plan_layers(ours) == plan_layers(theirs)
    count = count_parameters(ours)
    assert count.total == GOLDEN["models"][name]["params"]["total"]


@pytest.mark.parametrize(
    ("name", "unique", "stored"),
    [
        ("llama-3.2-1b", 1_235_814_400, 1_498_482_688),
        ("llama-3.2-3b", 3_212_749_824, 3_606_752_256),
        ("llama-3.2-1b-instruct-qlora-int4-eo8", 1_235_814_400, 1_498_482_688),
        ("llama-guard-3-1b-int4", 860_407_808, 1_123_076_096),
        ("llama-3.1-8b", 8_030_261_248, 8_030_261_248),
    ],
)
def test_the_tie_follows_from_the_shape_and_the_files_hold_a_copy(name, unique, stored):
    count = count_parameters(parse(name))
    assert (count.total, count.stored) == (unique, stored)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("llama-3.2-1b", 32.0),
        ("llama-3.2-3b", 32.0),
        ("llama-guard-3-1b", 32.0),
        ("llama-3.1-8b", 8.0),
        ("llama-3.1-405b", 8.0),
        ("llama-3.2-11b-vision", 8.0),
        ("llama-4-scout-17b-16e", 16.0),
        ("llama-4-maverick-17b-128e", None),
        ("llama-3-8b", None),
    ],
)
def test_the_factor_of_the_rope_scaling_is_not_in_the_file(name, factor):
    config = parse(name)
    assert config.rope.factor == factor
    if name == "llama-4-scout-17b-16e":
        assert (config.rope.low_freq_factor, config.rope.high_freq_factor) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"dim": 4096, "multiple_of": 256, "multiplier": None}, 11008),
        ({"dim": 5120, "multiple_of": 256, "multiplier": None}, 13824),
        ({"dim": 6656, "multiple_of": 256, "multiplier": None}, 17920),
        ({"dim": 8192, "multiple_of": 256, "multiplier": 1.0}, 22016),
        ({"dim": 4096, "multiple_of": 1024, "multiplier": 1.3}, 14336),
        ({"dim": 8192, "multiple_of": 4096, "multiplier": 1.3}, 28672),
        ({"dim": 16384, "multiple_of": 4096, "multiplier": 1.2}, 53248),
        ({"dim": 2048, "multiple_of": 256, "multiplier": 1.5}, 8192),
        ({"dim": 3072, "multiple_of": 256, "multiplier": 1.0}, 8192),
        ({"dim": 5120, "multiple_of": 2048, "multiplier": 1.2}, 16384),
        ({"dim": 5120, "multiple_of": 2048, "multiplier": 1.2, "shrink": 2.0}, 8192),
    ],
)
def test_feed_forward_sizes(arguments, expected):
    assert feed_forward_size(arguments.pop("dim"), **arguments) == expected


def test_a_vocabulary_of_minus_one_is_taken_from_the_rows_or_is_32000():
    assert parse("llama-2-7b").vocab_size == 32000
    assert parse("llama-2-7b").origins["vocab_size"] == "derived"
    assert parse("llama-2-7b", embedding_rows=32016).vocab_size == 32016


def test_an_absent_vocabulary_is_an_error_that_names_the_key():
    with pytest.raises(ConfigError, match="`vocab_size` is missing") as caught:
        parse("codellama-7b", embedding_rows=None)
    assert "32016 for 7B and 13B" in str(caught.value)


def test_rows_that_contradict_the_file_count_and_are_told():
    config = parse("llama-3-8b", embedding_rows=128264)
    assert config.vocab_size == 128264
    assert [note.code for note in config.notes] == ["vocab-rows-differ"]


@pytest.mark.parametrize("spelling", ["wrapped", "null", "freq_base"])
def test_other_spellings(spelling):
    values = params_values("llama-2-7b")
    if spelling == "wrapped":
        values = {"model": values}
    elif spelling == "null":
        values["n_kv_heads"] = None
    else:
        values["rope_freq_base"] = 10000.0
    assert is_meta(values)
    config = parse_meta(values, where="params.json")
    assert config.num_key_value_heads == 32
    assert config.rope.theta == 10000.0


def test_cross_attention_layers_are_placed_as_config_json_counts_them():
    assert parse("llama-3.2-11b-vision").cross_attention_layers == (3, 8, 13, 18, 23, 28, 33, 38)
    layers = parse("llama-3.2-90b-vision-instruct").cross_attention_layers
    assert layers == tuple(range(3, 100, 5))
    nested = params_values("llama-3.2-11b-vision")
    del nested["vision_num_cross_attention_layers"]
    nested["vision_model"] = {"cross_attention_adapter": {"num_layers": 8}}
    assert parse_meta(nested, where="p").cross_attention_layers[-1] == 38


def test_llama_4_without_experts():
    values = params_values("llama-4-scout-17b-16e")
    values["moe_args"] = None
    config = parse_meta(values, where="params.json")
    assert config.moe is None
    assert {layer.intermediate_size for layer in plan_layers(config)} == {16384}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama-2-7b", {"dim": -1}, "`dim` is -1"),
        ("llama-2-7b", {"n_layers": 10**9}, "`n_layers` is 1000000000, expected at most 4096"),
        ("llama-2-7b", {"n_heads": 33}, "`n_heads` = 33 does not divide `dim` = 4096"),
        ("llama-2-7b", {"n_kv_heads": 5}, "`n_kv_heads` = 5 does not divide"),
        ("llama-2-7b", {"multiple_of": None}, "`multiple_of` is null"),
        ("llama-4-scout-17b-16e", {"moe_args": 3}, "`moe_args` is 3, expected an object"),
        ("llama-2-7b", {"ffn_dim_multiplier": 1e30}, "the feed-forward width that follows"),
        (
            "llama-4-scout-17b-16e",
            {"moe_args": {"num_experts": 4, "capacity_factor": -1}},
            "`moe_args.capacity_factor` is -1",
        ),
        (
            "llama-4-scout-17b-16e",
            {"vision_args": {"dim": 8}},
            "`vision_args.image_size` is missing",
        ),
        ("llama-3.2-11b-vision", {"vision_num_cross_attention_layers": 33}, "at most n_layers"),
        ("llama-3.2-11b-vision", {"vision_chunk_size": None}, "`vision_chunk_size` is null"),
    ],
)
def test_wrong_values_name_the_key(name, changes, message):
    values = {**params_values(name), **changes}
    with pytest.raises(ConfigError) as caught:
        parse_meta(values, where="params.json")
    assert message in str(caught.value)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-2, 64),
    st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def damaged(draw):
    """A params.json with some values, also nested ones, put in place of others."""
    values = copy.deepcopy(params_values(draw(st.sampled_from([p.stem for p in PARAMS]))))
    for _ in range(draw(st.integers(0, 4))):
        block = values
        key = draw(st.sampled_from(sorted(block)))
        if isinstance(block[key], dict) and block[key] and draw(st.booleans()):
            block = block[key]
            key = draw(st.sampled_from(sorted(block)))
        block[key] = draw(VALUES)
    return values


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values=damaged(), rows=st.none() | st.integers(1, 2**31))
def test_any_object_gives_a_model_or_an_error_of_ours(values, rows):
    try:
        config = parse_meta(values, where="params.json", embedding_rows=rows)
        count = count_parameters(config)
    except InputError:
        return
    assert count.total > 0
    assert identify(config).family in ("llama", "llama-architecture")


def test_the_context_is_left_to_the_identification():
    assert parse("llama-3.1-8b").max_position_embeddings is None


def test_derived_values_say_so():
    config = parse("llama-3.1-8b")
    assert config.origins["hidden_size"] == "file"
    assert config.origins["intermediate_size"] == "derived"
    assert config.origins["tie_word_embeddings"] == "derived"
    assert config.origins["rope_scaling"] == "derived"
