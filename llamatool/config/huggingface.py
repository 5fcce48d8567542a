"""config.json to ModelConfig, in the spellings of transformers 4 and 5.

Where a key is absent, the default is that of the model's own class in transformers, and the
value's origin says `default`. Sizes have no default: a missing one is an error.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from llamatool.config.model import (
    MAX_LAYERS,
    ModelConfig,
    MoeConfig,
    Note,
    QuantizationConfig,
    RopeConfig,
    TemperatureConfig,
    VisionConfig,
)
from llamatool.config.reader import Reader
from llamatool.errors import ConfigError, UnsupportedError


class _Family(NamedTuple):
    """What transformers' class for a model_type does when the file is silent."""

    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qkv_bias: bool | str = "attention_bias"  # a constant, or the key that says so
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    qk_norm: Literal["none", "unit", "weighted"] = "none"
    sliding: Literal["never", "always", "on request"] = "never"
    sliding_window: int | None = None
    extra_embedding_rows: int = 0
    chunked: bool = False


_LLAMA4 = _Family(
    rope_theta=500000.0,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    head_dim=128,
    mlp_bias=False,
    chunked=True,
)
_MLLAMA = _Family(
    rope_theta=500000.0,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    extra_embedding_rows=8,  # transformers modeling_mllama.py: Embedding(vocab_size + 8)
)
_QWEN = _Family(
    max_position_embeddings=32768,
    mlp_bias=False,
    sliding="on request",
    sliding_window=4096,
)
# Source: transformers 5.24, models/*/configuration_*.py and modeling_*.py.
_FAMILIES = {
    "llama": _Family(),
    "mllama": _MLLAMA,
    "mllama_text_model": _MLLAMA,
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "mistral": _Family(
        max_position_embeddings=131072,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        sliding="always",
        sliding_window=4096,
    ),
    "qwen2": _QWEN._replace(qkv_bias=True, output_bias=False),
    "qwen3": _QWEN._replace(head_dim=128, qk_norm="weighted"),
    "internlm": _Family(qkv_bias="bias", output_bias="bias", mlp_bias=False),
}

_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def parse_huggingface(values: Mapping[str, Any], *, where: str) -> ModelConfig:
    """The model that the object of a config.json describes.

    Raises: ConfigError, naming the key, if a size is missing, of the wrong kind or contradicts
    another; UnsupportedError for a model_type that is no Llama and no near relative.
    """
    outer = Reader(values, where=where)
    text = outer.block("text_config") or outer
    model_type = outer.text("model_type") or text.text("model_type")
    family = _family(outer, text, model_type)
    assert model_type is not None  # _family refuses a file without one
    vision = _vision(outer)

    hidden_size = text.size("hidden_size")
    num_layers = text.size("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise text.wrong("num_hidden_layers", num_layers, f"at most {MAX_LAYERS}")
    num_heads = text.size("num_attention_heads")
    per_layer = _kv_heads_per_layer(text, num_layers, num_heads)
    num_kv_heads = max(per_layer) if per_layer else _kv_heads(text, num_heads)
    head_dim = _head_dim(text, family, hidden_size, num_heads)
    moe = _moe(text, num_layers) if family.chunked else None
    vocab_size = text.size("vocab_size")
    notes: list[Note] = []
    dtype = _dtype(outer, text, notes)
    rope = _rope(text, family, notes)
    chunk_size = _chunk_size(text, family, notes)
    layer_types = text.strings("layer_types") or None
    if layer_types is not None and len(layer_types) != num_layers:
        raise text.wrong("layer_types", list(layer_types), f"a list of {num_layers}")

    config = ModelConfig(
        model_type=model_type,
        architectures=outer.strings("architectures"),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_key_value_heads_per_layer=per_layer,
        head_dim=head_dim,
        intermediate_size=text.size("intermediate_size"),
        intermediate_size_mlp=text.size("intermediate_size_mlp") if family.chunked else None,
        vocab_size=vocab_size,
        embedding_rows=vocab_size + family.extra_embedding_rows,
        max_position_embeddings=text.size(
            "max_position_embeddings", family.max_position_embeddings
        ),
        rms_norm_eps=text.number("rms_norm_eps", family.rms_norm_eps),
        hidden_act=text.text("hidden_act") or "silu",
        tie_word_embeddings=_tied(outer, text),
        rope=rope,
        dtype=dtype,
        attention_bias=_bias(text, family.qkv_bias),
        attention_output_bias=_bias(text, family.output_bias),
        mlp_bias=_bias(text, family.mlp_bias),
        qk_norm=_qk_norm(text, family),
        sliding_window=_sliding_window(text, family),
        attention_chunk_size=chunk_size,
        layer_types=layer_types or _windowed_layers(text, family, num_layers),
        no_rope_layers=_no_rope_layers(text, num_layers) if family.chunked else (),
        cross_attention_layers=_cross_attention_layers(text, family, num_layers),
        temperature=_temperature(text) if family.chunked else None,
        moe=moe,
        vision=vision,
        quantization=_quantization(outer),
        bos_token_id=text.token_id("bos_token_id"),
        eos_token_ids=text.token_ids("eos_token_id"),
        pad_token_id=text.token_id("pad_token_id"),
        transformers_version=outer.text("transformers_version"),
        name_or_path=outer.text("_name_or_path") or text.text("_name_or_path"),
        origins={**outer.origins, **text.origins},
        present_keys=frozenset(text.values) | frozenset(outer.values),
        notes=tuple(notes),
    )
    return _checked(config, where)


def _family(outer: Reader, text: Reader, model_type: str | None) -> _Family:
    if model_type is None:
        raise ConfigError(
            "`model_type` is missing",
            where=outer.where,
            hint="a Llama's config.json says `model_type`: `llama`, `mllama` or `llama4`",
        )
    if model_type in ("mllama", "llama4") and text is outer:
        raise outer.missing("text_config")
    family = _FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedError(
            f"model_type `{model_type}` is not a Llama or a relative that llamatool can size",
            where=outer.where,
            hint="known are " + ", ".join(sorted(name for name in _FAMILIES if "_" not in name)),
        )
    return family


def _kv_heads(text: Reader, num_heads: int) -> int:
    # Absent or null means multi-head attention: so in all Llama 1 files.
    return text.size("num_key_value_heads", num_heads)


def _kv_heads_per_layer(text: Reader, num_layers: int, num_heads: int) -> tuple[int, ...] | None:
    if not isinstance(text.values.get("num_key_value_heads"), list):
        return None
    counts = text.sizes("num_key_value_heads", minimum=1) or ()
    if len(counts) != num_layers:
        raise text.wrong("num_key_value_heads", list(counts), f"a list of {num_layers}")
    for count in counts:
        if num_heads % count:
            raise text.wrong("num_key_value_heads", count, f"a divisor of {num_heads}")
    return counts


def _head_dim(text: Reader, family: _Family, hidden_size: int, num_heads: int) -> int:
    if isinstance(text.values.get("head_dim"), list):
        raise UnsupportedError(
            "`head_dim` is a list: layers of different head sizes are not supported",
            where=text.where,
        )
    explicit = text.optional_size("head_dim")
    if explicit is not None:
        return explicit
    if family.head_dim is not None and "head_dim" not in text.values:
        text.origins["head_dim"] = "default"
        return family.head_dim
    text.origins["head_dim"] = "derived"
    if hidden_size % num_heads:
        raise ConfigError(
            f"`{text.path}num_attention_heads` = {num_heads} does not divide "
            f"`hidden_size` = {hidden_size}, and there is no `head_dim`",
            where=text.where,
        )
    return hidden_size // num_heads


def _tied(outer: Reader, text: Reader) -> bool:
    # transformers 5 prints the outer key of mllama as null: look inside before the default.
    if outer.has("tie_word_embeddings") or not text.has("tie_word_embeddings"):
        return outer.flag("tie_word_embeddings", False)
    return text.flag("tie_word_embeddings", False)


def _dtype(outer: Reader, text: Reader, notes: list[Note]) -> str | None:
    for reader in (outer, text):
        for key in ("dtype", "torch_dtype"):
            name = reader.text(key)
            reader.origins.pop("torch_dtype", None)  # one key for both spellings
            if name is not None and name != "auto":
                text.origins["dtype"] = "file"
                return name.removeprefix("torch.")
    text.origins["dtype"] = "default"
    notes.append(
        Note("dtype-missing", "the file names no `torch_dtype`; weights are sized as bfloat16")
    )
    return None


def _bias(text: Reader, rule: bool | str) -> bool:
    return text.flag(rule, False) if isinstance(rule, str) else rule


def _qk_norm(text: Reader, family: _Family) -> Literal["none", "unit", "weighted"]:
    if family.chunked:
        return "unit" if text.flag("use_qk_norm", True) else "none"
    return family.qk_norm


def _rope(text: Reader, family: _Family, notes: list[Note]) -> RopeConfig:
    old, new = text.block("rope_scaling"), text.block("rope_parameters")
    scaling = old or new
    theta_new = new.optional_number("rope_theta") if new else None
    theta_old = text.optional_number("rope_theta")
    if theta_new is not None and theta_old is not None and theta_new != theta_old:
        notes.append(
            Note(
                "rope-spellings-disagree",
                f"`rope_theta` is {theta_old:g} at the top and {theta_new:g} in "
                "`rope_parameters`; the latter counts, as in transformers",
            )
        )
    theta = theta_new if theta_new is not None else theta_old
    text.origins["rope_theta"] = "default" if theta is None else "file"
    theta = family.rope_theta if theta is None else theta
    if old and new:
        differing = sorted(
            key
            for key in {*old.values, *new.values} - {"rope_theta", "type", "rope_type"}
            if old.values.get(key) != new.values.get(key)
        )
        if differing or _rope_type(old) != _rope_type(new):
            notes.append(
                Note(
                    "rope-spellings-disagree",
                    "`rope_scaling` and `rope_parameters` differ; `rope_scaling` counts, as in "
                    "transformers",
                )
            )
    interleaved = family.chunked  # Llama 4 rotates the pairs (2i, 2i+1)
    if scaling is None:
        return RopeConfig(theta=theta, interleaved=interleaved)
    return _scaled_rope(text, scaling, theta, interleaved)


def _rope_type(scaling: Reader) -> str:
    return scaling.text("rope_type") or scaling.text("type") or "default"


def _scaled_rope(text: Reader, scaling: Reader, theta: float, interleaved: bool) -> RopeConfig:
    rope_type = _rope_type(scaling)
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise UnsupportedError(
            f"`{scaling.path[:-1]}` holds one block per layer type", where=text.where
        )
    if rope_type not in _ROPE_TYPES:
        raise ConfigError(
            f"`{scaling.path}rope_type` is `{rope_type}`",
            where=text.where,
            hint=f"known are {', '.join(_ROPE_TYPES)}",
        )
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError("partial rotary embeddings are not supported", where=text.where)
    original = scaling.optional_size("original_max_position_embeddings")
    if original is None:
        original = text.optional_size("original_max_position_embeddings")
    needs_factor = rope_type in ("linear", "dynamic", "yarn", "llama3")
    llama3 = rope_type == "llama3"
    factor = scaling.number("factor") if needs_factor else scaling.optional_number("factor")
    low = scaling.number("low_freq_factor") if llama3 else None
    high = scaling.number("high_freq_factor") if llama3 else None
    if low is not None and high is not None and high < low:
        raise scaling.wrong("high_freq_factor", high, f"at least low_freq_factor = {low:g}")
    if llama3 and original is None:
        raise scaling.missing("original_max_position_embeddings")
    short, long = scaling.numbers("short_factor"), scaling.numbers("long_factor")
    if rope_type == "longrope" and (short is None or long is None):
        raise scaling.missing("short_factor" if short is None else "long_factor")
    return RopeConfig(
        theta=theta,
        type=rope_type,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
        attention_factor=scaling.optional_number("attention_factor"),
        beta_fast=scaling.optional_number("beta_fast"),
        beta_slow=scaling.optional_number("beta_slow"),
        mscale=scaling.optional_number("mscale"),
        mscale_all_dim=scaling.optional_number("mscale_all_dim"),
        truncate=scaling.flag("truncate", True),
        short_factor=short,
        long_factor=long,
        interleaved=interleaved,
    )


def _sliding_window(text: Reader, family: _Family) -> int | None:
    if family.sliding == "never":
        return None
    if family.sliding == "on request" and not text.flag("use_sliding_window", False):
        return None
    if "sliding_window" in text.values:
        return text.optional_size("sliding_window")
    text.origins["sliding_window"] = "default"
    return family.sliding_window


def _windowed_layers(text: Reader, family: _Family, num_layers: int) -> tuple[str, ...] | None:
    # Qwen2 and Qwen3: only the layers from `max_window_layers` on use the window.
    if family.sliding != "on request" or _sliding_window(text, family) is None:
        return None
    first = text.size("max_window_layers", 28, minimum=0)
    return tuple(
        "sliding_attention" if index >= first else "full_attention" for index in range(num_layers)
    )


def _chunk_size(text: Reader, family: _Family, notes: list[Note]) -> int | None:
    if not family.chunked:
        return None
    if "attention_chunk_size" in text.values:  # null is legal: every layer is full
        return text.optional_size("attention_chunk_size")
    text.origins["attention_chunk_size"] = "default"
    notes.append(
        Note(
            "chunk-size-missing",
            "the file has no `attention_chunk_size`; transformers then takes 8192, and so do we",
        )
    )
    return 8192


def _no_rope_layers(text: Reader, num_layers: int) -> tuple[int, ...]:
    """Indices of the layers without RoPE. In the file, 1 means that a layer uses RoPE."""
    flags = text.sizes("no_rope_layers")
    if not flags:  # an empty list means the default, as an absent one does
        interval = text.size("no_rope_layer_interval", 4)
        text.origins["no_rope_layers"] = "derived"
        return tuple(index for index in range(num_layers) if (index + 1) % interval == 0)
    if len(flags) != num_layers:
        raise text.wrong("no_rope_layers", list(flags), f"a list of {num_layers}")
    return tuple(index for index, uses_rope in enumerate(flags) if not uses_rope)


def _cross_attention_layers(text: Reader, family: _Family, num_layers: int) -> tuple[int, ...]:
    if not family.extra_embedding_rows:
        return ()
    layers = text.sizes("cross_attention_layers")
    if layers is None:
        raise text.missing("cross_attention_layers")
    return _layer_indices(text, "cross_attention_layers", layers, num_layers)


def _layer_indices(
    text: Reader, key: str, layers: tuple[int, ...], num_layers: int
) -> tuple[int, ...]:
    for index in layers:
        if index >= num_layers:
            raise text.wrong(key, index, f"an index below num_hidden_layers = {num_layers}")
    if len(set(layers)) < len(layers):
        raise text.wrong(key, list(layers), "distinct layer indices")
    return tuple(sorted(layers))


def _temperature(text: Reader) -> TemperatureConfig | None:
    # Early files hold the integer 4 here: what counts is whether it is truthy.
    value = text.values.get("attn_temperature_tuning", True)
    if not value:
        return None
    return TemperatureConfig(
        floor_scale=text.number("floor_scale", 8192), attn_scale=text.number("attn_scale", 0.1)
    )


def _moe(text: Reader, num_layers: int) -> MoeConfig | None:
    num_experts = text.size("num_local_experts", minimum=0)
    layers = text.sizes("moe_layers")
    if layers is None:
        step = text.size("interleave_moe_layer_step", 1, minimum=0)
        layers = tuple(range(step - 1, num_layers, step)) if step else ()
        text.origins["moe_layers"] = "derived"
    else:
        layers = _layer_indices(text, "moe_layers", layers, num_layers)
    if not num_experts or not layers:
        return None
    per_token = text.size("num_experts_per_tok", 1)
    if per_token > num_experts:
        raise text.wrong(
            "num_experts_per_tok", per_token, f"at most num_local_experts = {num_experts}"
        )
    return MoeConfig(num_experts, per_token, layers)


def _vision(outer: Reader) -> VisionConfig | None:
    vision = outer.block("vision_config")
    if vision is None:
        return None
    mllama = outer.text("model_type") == "mllama"
    config = VisionConfig(
        kind="mllama" if mllama else "llama4",
        hidden_size=vision.size("hidden_size"),
        intermediate_size=vision.size("intermediate_size"),
        num_hidden_layers=vision.size("num_hidden_layers"),
        num_attention_heads=vision.size("attention_heads" if mllama else "num_attention_heads"),
        image_size=vision.size("image_size"),
        patch_size=vision.size("patch_size"),
        num_channels=vision.size("num_channels", 3),
        output_size=vision.size("vision_output_dim"),
        norm_eps=vision.number("norm_eps", 1e-5),
        # Llama 4's limit stands in its image processor, not in the configuration.
        max_num_tiles=vision.size("max_num_tiles", 4) if mllama else 16,
        image_token_id=_image_token_id(outer, 128256 if mllama else 200092),
    )
    if mllama:
        config = replace(
            config,
            num_global_layers=vision.size("num_global_layers", minimum=0),
            intermediate_layers_indices=vision.sizes("intermediate_layers_indices") or (),
            supported_aspect_ratios=_aspect_ratios(vision),
        )
    else:
        config = replace(
            config,
            projector_input_size=vision.size("projector_input_dim"),
            projector_output_size=vision.size("projector_output_dim"),
            pixel_shuffle_ratio=vision.number("pixel_shuffle_ratio", 0.5),
            rope_theta=vision.number("rope_theta", 10000.0),
        )
    return _checked_vision(vision, config)


def _image_token_id(outer: Reader, default: int) -> int:
    """The id under either of its names; `default` is that of the published models."""
    ids = [outer.token_id(key) for key in ("image_token_index", "image_token_id")]
    return next((token_id for token_id in ids if token_id is not None), default)


def _checked_vision(reader: Reader, vision: VisionConfig) -> VisionConfig:
    if vision.image_size < vision.patch_size:
        raise reader.wrong("image_size", vision.image_size, f"at least {vision.patch_size}")
    if vision.hidden_size % vision.num_attention_heads:
        raise reader.wrong(
            "hidden_size", vision.hidden_size, f"a multiple of {vision.num_attention_heads} heads"
        )
    return vision


def _aspect_ratios(vision: Reader) -> tuple[tuple[int, int], ...]:
    rows = vision.items("supported_aspect_ratios")
    if rows is None:
        raise vision.missing("supported_aspect_ratios")
    ratios: list[tuple[int, int]] = []
    for row in rows:
        if not isinstance(row, list) or len(row) != 2:
            raise vision.wrong("supported_aspect_ratios", row, "pairs of tile counts")
        height, width = (vision.check_size("supported_aspect_ratios", side) for side in row)
        ratios.append((height, width))
    return tuple(ratios)


def _quantization(outer: Reader) -> QuantizationConfig | None:
    block = outer.block("quantization_config") or outer.block("compression_config")
    if block is None:
        return None
    method = block.text("quant_method")
    if method is None and block.has("config_groups"):
        method = "compressed-tensors"
    kept = (
        block.strings("modules_to_not_convert")
        or block.strings("ignore")
        or block.strings("llm_int8_skip_modules")
        or block.strings("ignored_layers")
    )
    bits: float | None = None
    group_size: int | None = None
    zero_points = False
    if method in ("fp8", "fbgemm_fp8"):
        bits = 8
        blocks = block.sizes("weight_block_size", minimum=1)
        group_size = blocks[0] * blocks[-1] if blocks else None
    elif method == "bitsandbytes":
        four = block.flag("load_in_4bit", False)
        bits = 4 if four else 8
        group_size = 64 if four else None  # bitsandbytes' block size of nf4 and fp4
    elif method in ("gptq", "awq"):
        bits = block.size("bits", 4 if method == "awq" else None)
        raw_group = block.values.get("group_size", 128)
        group_size = None if raw_group in (-1, None) else block.check_size("group_size", raw_group)
        zero_points = method == "gptq" or block.flag("zero_point", True)
    elif method == "compressed-tensors":
        bits, group_size = _compressed_tensors(block)
    elif method in ("spinquant", "qlora"):  # Meta's own; the catalogue writes them so
        bits, group_size = block.size("bits"), block.size("group_size")
        return QuantizationConfig(method, bits, group_size, embedding_bits=8)
    return QuantizationConfig(method or "unknown", bits, group_size, kept, zero_points)


def _compressed_tensors(block: Reader) -> tuple[float | None, int | None]:
    groups = block.block("config_groups")
    schemes: set[tuple[float | None, int | None]] = set()
    for name in groups.values if groups else ():
        group = groups.block(name) if groups else None
        weights = group.block("weights") if group else None
        if weights is None:
            continue
        raw_group = weights.values.get("group_size")
        size = None if raw_group in (-1, None) else weights.check_size("group_size", raw_group)
        schemes.add((weights.optional_size("num_bits"), size))
    return schemes.pop() if len(schemes) == 1 else (None, None)


def _checked(config: ModelConfig, where: str) -> ModelConfig:
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"`num_key_value_heads` = {config.num_key_value_heads} does not divide "
            f"`num_attention_heads` = {config.num_attention_heads}",
            where=where,
        )
    if config.head_dim % 2:
        raise ConfigError(f"`head_dim` = {config.head_dim} is odd: RoPE needs pairs", where=where)
    for name in ("short_factor", "long_factor"):
        factors = getattr(config.rope, name)
        if factors is not None and len(factors) != config.head_dim // 2:
            raise ConfigError(
                f"`rope_scaling.{name}` has {len(factors)} values, expected head_dim / 2 = "
                f"{config.head_dim // 2}",
                where=where,
            )
    return config
