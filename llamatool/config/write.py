"""ModelConfig back to files: config.json in the spelling of transformers 4, and params.json.

Transformers 4 spells the type `torch_dtype` and RoPE `rope_theta` with `rope_scaling`; version 5
reads that too, so one file serves both. What a file must say although ModelConfig does not keep it
(token ids of a family, constants of an image tower) is written here.

Source: the config.json files of the published models; llama-models llama3/args.py, llama4/args.py.
"""

from dataclasses import asdict
from typing import Any, NamedTuple

from llamatool.config.meta import TIED_SHAPES, feed_forward_size
from llamatool.config.model import ModelConfig, RopeConfig, VisionConfig
from llamatool.errors import UnsupportedError

Json = dict[str, Any]


# (dim, width) whose published keys are not the first ones that fit.
# Source: params.json of Llama 2 70B, 3.1 405B, 3.2 1B and 3B, Code Llama 34B.
_PUBLISHED: dict[tuple[int, int], tuple[int, float | None]] = {
    (8192, 28672): (4096, 1.3),
    (16384, 53248): (4096, 1.2),
    (2048, 8192): (256, 1.5),
    (3072, 8192): (256, 1.0),
    (4096, 14336): (1024, 1.3),
}


class _Ids(NamedTuple):
    """Token ids of a family's tokenizer."""

    bos: int
    eos_base: tuple[int, ...]
    eos_instruct: tuple[int, ...]
    pad: int | None


_LLAMA2 = _Ids(1, (2,), (2,), None)
_LLAMA3 = _Ids(128000, (128001,), (128001, 128009), None)
_LLAMA31 = _Ids(128000, (128001,), (128001, 128008, 128009), None)
_VISION = _Ids(128000, (128001,), (128001, 128008, 128009), 128004)
_LLAMA4 = _Ids(200000, (200001,), (200001, 200007, 200008), 200018)


def config_json(config: ModelConfig, *, dtype: str, instruct: bool) -> Json:
    """The object of a config.json that transformers 4 and 5 read as this model.

    Args: dtype: of the stored weights. instruct: chooses the ids that end a text, where the
    configuration has none of its own.
    """
    if config.attention_bias != config.attention_output_bias:
        raise UnsupportedError(
            "biases of q, k and v without one of the output",
            hint="Hugging Face's Llama has either all of them or none",
        )
    text = _text_block(config, dtype, token_ids(config, instruct=instruct))
    vision = config.vision
    if config.model_type == "mllama" and vision is not None:
        return {
            "architectures": ["MllamaForConditionalGeneration"],
            "image_token_index": config.vocab_size,
            "model_type": "mllama",
            "text_config": text | {"model_type": "mllama_text_model"},
            "torch_dtype": dtype,
            "vision_config": _mllama_vision(vision) | {"torch_dtype": dtype},
        }
    if config.model_type == "llama4" and vision is not None:
        return {
            "architectures": ["Llama4ForConditionalGeneration"],
            "boi_token_index": 200080,
            "eoi_token_index": 200081,
            "image_token_index": 200092,
            "model_type": "llama4",
            "text_config": text | {"model_type": "llama4_text"},
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
            "vision_config": _llama4_vision(vision),
        }
    if config.model_type.startswith("llama4"):
        return text | {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
    if config.model_type != "llama":
        raise UnsupportedError(f"llamatool does not write a config.json of {config.model_type}")
    return text | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def generation_json(config: ModelConfig, *, instruct: bool, sampling: bool) -> Json:
    """The object of a generation_config.json: token ids, and Meta's sampling if wanted."""
    ids = token_ids(config, instruct=instruct)
    if sampling:
        return ids | {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    return ids


def token_ids(config: ModelConfig, *, instruct: bool) -> Json:
    """bos, eos and pad ids as config.json spells them; ids outside the vocabulary are left out."""
    ids = _family_ids(config)
    bos = ids.bos if config.bos_token_id is None else config.bos_token_id
    eos = config.eos_token_ids or (ids.eos_instruct if instruct else ids.eos_base)
    pad = ids.pad if config.pad_token_id is None else config.pad_token_id
    eos = tuple(token for token in eos if 0 <= token < config.vocab_size)
    # The classes of the image models have a default here, so that only a null means "none".
    result: Json = {} if config.model_type == "llama" else {"pad_token_id": None}
    if 0 <= bos < config.vocab_size:
        result["bos_token_id"] = bos
    if eos:
        result["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
    if pad is not None and 0 <= pad < config.vocab_size:
        result["pad_token_id"] = pad
    return result


def params_json(config: ModelConfig, *, original_style: bool = False) -> Json:
    """The object of a params.json that Meta's code reads as this model.

    Args: original_style: writes `vocab_size` as -1, as the files of Llama 1 and 2 have it.
    Raises: UnsupportedError for what Meta's code cannot express, naming it.
    Example: Llama 3.1 8B -> multiple_of 1024, ffn_dim_multiplier 1.3, use_scaled_rope true.
    """
    _check_expressible(config)
    params: Json = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers - len(config.cross_attention_layers),
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": -1 if original_style else config.vocab_size,
        "norm_eps": config.rms_norm_eps,
    }
    if config.rope.theta != 10000.0:  # the code of Llama 1 and 2 does not know the key
        params["rope_theta"] = config.rope.theta
    if config.model_type.startswith("llama4"):
        return params | _llama4_params(config)
    if config.rope.type == "llama3":
        params["use_scaled_rope"] = True
    if config.vision is not None:
        params["vision_chunk_size"] = config.vision.image_size
        params["vision_max_num_chunks"] = config.vision.max_num_tiles
        params["vision_num_cross_attention_layers"] = len(config.cross_attention_layers)
    return params | feed_forward_keys(config.hidden_size, config.intermediate_size)


def feed_forward_keys(dim: int, width: int) -> Json:
    """`multiple_of` and `ffn_dim_multiplier` from which Meta's code derives `width`.

    The published combinations come first; a width that none of them gives is met exactly with
    multiple_of 1.
    Example: dim 4096, width 14336 -> multiple_of 1024, ffn_dim_multiplier 1.3.
    """
    multipliers = [None, *(round(1 + 0.05 * step, 2) for step in range(21))]
    candidates: list[tuple[int, float | None]] = [
        *([_PUBLISHED[dim, width]] if (dim, width) in _PUBLISHED else []),
        *((m, f) for m in (256, 512, 1024, 2048, 4096) for f in multipliers),
        (1, (width + 0.5) / int(2 * 4 * dim / 3)),
    ]
    for multiple_of, multiplier in candidates:
        if feed_forward_size(dim, multiple_of=multiple_of, multiplier=multiplier) == width:
            keys: Json = {"multiple_of": multiple_of}
            return keys | ({} if multiplier is None else {"ffn_dim_multiplier": multiplier})
    raise UnsupportedError(f"no params.json gives the feed-forward width {width} at dim {dim}")


def _family_ids(config: ModelConfig) -> _Ids:
    if config.vision is not None and config.vision.kind == "mllama":
        return _VISION
    if config.model_type.startswith("llama4"):
        return _LLAMA4
    if config.vocab_size > 100_000:
        return _LLAMA31 if config.rope.type == "llama3" else _LLAMA3
    return _LLAMA2


def _text_block(config: ModelConfig, dtype: str, ids: Json) -> Json:
    text: Json = {
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": rope_scaling(config.rope),
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    } | ids
    if config.max_position_embeddings is not None:
        text["max_position_embeddings"] = config.max_position_embeddings
    if config.model_type == "llama":
        text["mlp_bias"] = config.mlp_bias
    if config.model_type == "mllama":
        text["cross_attention_layers"] = list(config.cross_attention_layers)
    if config.model_type.startswith("llama4"):
        text |= _llama4_text(config)
    return text


def rope_scaling(rope: RopeConfig) -> Json | None:
    """The `rope_scaling` object, or None without scaling."""
    if rope.type == "default":
        return None
    skipped = ("theta", "type", "interleaved", "truncate")
    values = {k: v for k, v in asdict(rope).items() if k not in skipped and v is not None}
    lists = {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
    return lists | {"rope_type": rope.type}


def _llama4_text(config: ModelConfig) -> Json:
    moe, temperature = config.moe, config.temperature
    without = set(config.no_rope_layers)
    layers = range(config.num_hidden_layers)
    text: Json = {
        "attention_chunk_size": config.attention_chunk_size,
        "attn_temperature_tuning": temperature is not None,
        "intermediate_size_mlp": config.intermediate_size_mlp,
        "moe_layers": list(moe.moe_layers) if moe else [],
        "no_rope_layers": [int(index not in without) for index in layers],
        "num_experts_per_tok": moe.num_experts_per_tok if moe else 1,
        "num_local_experts": moe.num_local_experts if moe else 0,
        "interleave_moe_layer_step": _step(moe.moe_layers) if moe else 1,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "use_qk_norm": config.qk_norm == "unit",
    }
    if temperature is not None:
        text["floor_scale"] = int(temperature.floor_scale)
        text["attn_scale"] = temperature.attn_scale
    return text


def _step(moe_layers: tuple[int, ...]) -> int:
    return moe_layers[0] + 1


def _mllama_vision(vision: VisionConfig) -> Json:
    return {
        "attention_heads": vision.num_attention_heads,
        "hidden_act": "gelu",
        "hidden_size": vision.hidden_size,
        "image_size": vision.image_size,
        "intermediate_layers_indices": list(vision.intermediate_layers_indices),
        "intermediate_size": vision.intermediate_size,
        "max_num_tiles": vision.max_num_tiles,
        "model_type": "mllama_vision_model",
        "norm_eps": vision.norm_eps,
        "num_channels": vision.num_channels,
        "num_global_layers": vision.num_global_layers,
        "num_hidden_layers": vision.num_hidden_layers,
        "patch_size": vision.patch_size,
        "supported_aspect_ratios": [list(ratio) for ratio in vision.supported_aspect_ratios],
        "vision_output_dim": vision.output_size,
    }


def _llama4_vision(vision: VisionConfig) -> Json:
    return {
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_size": vision.hidden_size,
        "image_size": vision.image_size,
        "initializer_range": 0.02,
        "intermediate_size": vision.intermediate_size,
        "model_type": "llama4_vision_model",
        "multi_modal_projector_bias": False,
        "norm_eps": vision.norm_eps,
        "num_attention_heads": vision.num_attention_heads,
        "num_channels": vision.num_channels,
        "num_hidden_layers": vision.num_hidden_layers,
        "patch_size": vision.patch_size,
        "pixel_shuffle_ratio": vision.pixel_shuffle_ratio,
        "projector_dropout": 0.0,
        "projector_input_dim": vision.projector_input_size,
        "projector_output_dim": vision.projector_output_size,
        "rope_theta": vision.rope_theta,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "vision_output_dim": vision.output_size,
    }


def _check_expressible(config: ModelConfig) -> None:
    """Refuses what Meta's code has no key for."""
    llama4 = config.model_type.startswith("llama4")
    problems: list[tuple[bool, str]] = [
        (config.model_type not in ("llama", "mllama", "llama4", "llama4_text"), config.model_type),
        (config.attention_bias or config.attention_output_bias, "attention_bias"),
        (config.mlp_bias, "mlp_bias"),
        (config.hidden_act != "silu", f"hidden_act `{config.hidden_act}`"),
        (config.sliding_window is not None, "a sliding window"),
        (config.num_key_value_heads_per_layer is not None, "key/value heads that vary by layer"),
        (config.qk_norm == "weighted", "q/k norms with weights"),
        (
            not llama4 and config.head_dim * config.num_attention_heads != config.hidden_size,
            f"head_dim {config.head_dim} beside {config.num_attention_heads} heads of"
            f" {config.hidden_size}",
        ),
        (config.rope.type not in ("default", "llama3"), f"RoPE scaling `{config.rope.type}`"),
        (not llama4 and not _is_metas_scaling(config), "RoPE scaling with other factors"),
    ]
    for wrong, what in problems:
        if wrong:
            raise UnsupportedError(
                f"Meta's code has no way to express {what}",
                hint="such a model stays in the Hugging Face layout",
            )


def _is_metas_scaling(config: ModelConfig) -> bool:
    """Whether the scaling is the one that `use_scaled_rope` stands for in params.json."""
    rope = config.rope
    if rope.type != "llama3":
        return True
    bands = (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings)
    shape = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads)
    return bands == (1.0, 4.0, 8192) and (rope.factor == 8.0 or shape in TIED_SHAPES)


def _llama4_params(config: ModelConfig) -> Json:
    moe, temperature = config.moe, config.temperature
    dense = config.intermediate_size_mlp or config.intermediate_size
    params: Json = {
        "ffn_exp": 4.0,
        "use_qk_norm": config.qk_norm == "unit",
        "attention_chunk_size": config.attention_chunk_size,
        "nope_layer_interval": _interval(config),
        "attn_temperature_tuning": temperature is not None,
        "quantization_args": None,
        "lora_args": None,
        "moe_args": None,
    }
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        params["head_dim"] = config.head_dim
    if temperature is not None:
        params |= {"floor_scale": temperature.floor_scale, "attn_scale": temperature.attn_scale}
    expert = config.intermediate_size if moe is not None else dense
    widths, capacity = _llama4_feed_forward(config.hidden_size, dense, expert)
    params |= widths
    if moe is not None:
        params["moe_args"] = {
            "num_experts": moe.num_local_experts,
            "capacity_factor": capacity,
            "auto_scale_F": expert != dense,
            "top_k": moe.num_experts_per_tok,
            "interleave_moe_layer_step": _step(moe.moe_layers),
        }
    if config.rope.type == "llama3":
        params["use_scaled_rope"] = True
        params["rope_scaling_factor"] = config.rope.factor
        params["rope_high_freq_factor"] = config.rope.high_freq_factor
    if config.vision is not None:
        params["vision_args"] = _vision_args(config.vision)
    return params


def _llama4_feed_forward(dim: int, dense: int, expert: int) -> tuple[Json, float]:
    """Keys for the widths of dense layers and experts, and the capacity factor that goes along.

    An expert is narrower by the capacity factor plus one, 2 in the published models.
    """
    base = int(2 * int(4 * dim) / 3)
    multipliers = (1.2, *(round(0.05 * step, 2) for step in range(1, 41)))
    candidates = [
        *((m, f, 1.0) for m in (2048, 1024, 512, 256) for f in multipliers),
        (1, (dense + 0.5) / base, dense / (expert + 0.5) - 1),
        (1, (dense + 0.5) / base, dense / expert - 1),
    ]
    for multiple_of, multiplier, capacity in candidates:
        shrink = 1.0 if expert == dense else capacity + 1
        widths = [
            feed_forward_size(dim, multiple_of=multiple_of, multiplier=multiplier, shrink=by)
            for by in (1.0, shrink)
        ]
        if widths == [dense, expert]:
            return {"multiple_of": multiple_of, "ffn_dim_multiplier": multiplier}, capacity
    raise UnsupportedError(
        f"no params.json gives the feed-forward widths {dense} and {expert} together"
    )


def _interval(config: ModelConfig) -> int | None:
    """`nope_layer_interval`: every n-th layer is without RoPE."""
    without = config.no_rope_layers
    if not without:
        return None
    interval = without[0] + 1
    if without != tuple(range(interval - 1, config.num_hidden_layers, interval)):
        raise UnsupportedError("Meta's code places layers without RoPE at equal distances only")
    return interval


def _vision_args(vision: VisionConfig) -> Json:
    return {
        "image_size": {"height": vision.image_size, "width": vision.image_size},
        "patch_size": {"height": vision.patch_size, "width": vision.patch_size},
        "dim": vision.hidden_size,
        "n_layers": vision.num_hidden_layers,
        "n_heads": vision.num_attention_heads,
        "mlp_ratio": vision.intermediate_size / vision.hidden_size,
        "output_dim": vision.output_size,
        "pixel_shuffle_ratio": vision.pixel_shuffle_ratio,
    }
