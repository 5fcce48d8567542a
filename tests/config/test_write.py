"""What is written is read back as the same model, for every published one."""

from dataclasses import replace

import pytest

from llamatool.config.catalog import CatalogEntry, entries
from llamatool.config.huggingface import parse_huggingface
from llamatool.config.meta import parse_meta
from llamatool.config.model import ModelConfig, RopeConfig
from llamatool.config.write import (
    config_json,
    feed_forward_keys,
    generation_json,
    params_json,
    token_ids,
)
from llamatool.errors import LlamatoolError

PLAIN = [entry for entry in entries() if entry.config.quantization is None]


def facts(config: ModelConfig) -> ModelConfig:
    """The configuration without what only describes the file it came from."""
    return replace(
        config,
        architectures=(),
        origins={},
        present_keys=frozenset(),
        notes=(),
        transformers_version=None,
        name_or_path=None,
        source_format="huggingface",
        dtype=None,
    )


@pytest.mark.parametrize("entry", PLAIN, ids=lambda entry: entry.id)
def test_config_json(entry: CatalogEntry) -> None:
    config = entry.config
    written = config_json(config, dtype="bfloat16", instruct=entry.variant == "instruct")
    again = parse_huggingface(written, where="x")
    ids = {"bos_token_id": 0, "eos_token_ids": (), "pad_token_id": None}
    assert facts(replace(again, **ids)) == facts(replace(config, **ids))
    assert again.dtype == "bfloat16"
    if config.eos_token_ids:
        assert again.eos_token_ids == config.eos_token_ids


META_KEYS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "embedding_rows", "rms_norm_eps", "rope", "moe"),
    *("cross_attention_layers", "no_rope_layers", "attention_chunk_size", "qk_norm", "temperature"),
)


@pytest.mark.parametrize("entry", PLAIN, ids=lambda entry: entry.id)
def test_params_json(entry: CatalogEntry) -> None:
    config = entry.config
    again = parse_meta(params_json(config), where="x")
    for key in META_KEYS:
        if key == "intermediate_size" and config.intermediate_size_mlp and config.moe is None:
            continue  # the width of experts that a dense model does not have
        assert getattr(again, key) == getattr(config, key), key
    if config.moe is not None:
        assert again.intermediate_size_mlp == config.intermediate_size_mlp
    if config.vision is not None:
        assert again.vision is not None
        assert again.vision.image_size == config.vision.image_size
        assert again.vision.intermediate_size == config.vision.intermediate_size


@pytest.mark.parametrize(
    ("dim", "width", "expected"),
    [
        (4096, 11008, {"multiple_of": 256}),
        (4096, 14336, {"multiple_of": 1024, "ffn_dim_multiplier": 1.3}),
        (8192, 28672, {"multiple_of": 4096, "ffn_dim_multiplier": 1.3}),
        (16384, 53248, {"multiple_of": 4096, "ffn_dim_multiplier": 1.2}),
        (2048, 8192, {"multiple_of": 256, "ffn_dim_multiplier": 1.5}),
        (3072, 8192, {"multiple_of": 256, "ffn_dim_multiplier": 1.0}),
    ],
)
def test_feed_forward_keys(dim: int, width: int, expected: dict[str, float]) -> None:
    assert feed_forward_keys(dim, width) == expected


def test_any_width_can_be_written() -> None:
    for width in (1, 7, 1000, 1537, 99991):
        keys = feed_forward_keys(64, width)
        config = parse_meta(
            {"dim": 64, "n_layers": 1, "n_heads": 4, "vocab_size": 9} | keys, where="x"
        )
        assert config.intermediate_size == width


@pytest.mark.parametrize(("dense", "expert"), [(192, 96), (160, 96), (100, 33), (64, 64)])
def test_any_pair_of_widths_of_llama4(dense: int, expert: int) -> None:
    scout = llama("llama-4-scout-17b-16e")
    config = replace(scout, intermediate_size=expert, intermediate_size_mlp=dense)
    again = parse_meta(params_json(config), where="x")
    assert (again.intermediate_size, again.intermediate_size_mlp) == (expert, dense)


def llama(model: str) -> ModelConfig:
    return next(entry.config for entry in PLAIN if entry.id == model)


def test_token_ids() -> None:
    bare = replace(llama("llama-3.1-8b"), bos_token_id=None, eos_token_ids=())
    assert token_ids(bare, instruct=False) == {"bos_token_id": 128000, "eos_token_id": 128001}
    assert token_ids(bare, instruct=True)["eos_token_id"] == [128001, 128008, 128009]
    small = replace(bare, vocab_size=512)
    assert token_ids(small, instruct=True) == {"bos_token_id": 1, "eos_token_id": 2}
    sampled = generation_json(bare, instruct=True, sampling=True)
    assert (sampled["temperature"], sampled["top_p"]) == (0.6, 0.9)


def test_original_style() -> None:
    assert params_json(llama("llama-2-7b"), original_style=True)["vocab_size"] == -1
    assert "rope_theta" not in params_json(llama("llama-2-7b"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act `gelu`"),
        ({"sliding_window": 4096}, "a sliding window"),
        ({"head_dim": 64}, "head_dim 64"),
        ({"rope": RopeConfig(1e4, "linear", 2.0)}, "RoPE scaling `linear`"),
        ({"rope": RopeConfig(5e5, "llama3", 16.0, 1.0, 4.0, 8192)}, "with other factors"),
        ({"model_type": "qwen2"}, "qwen2"),
    ],
)
def test_what_meta_cannot_express_is_refused(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(LlamatoolError, match=expected) as error:
        params_json(replace(llama("llama-3.1-8b"), **changes))
    assert error.value.exit_code == 3
