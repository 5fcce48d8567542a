"""Meta's params.json to ModelConfig; the only home of Meta's configuration names.

A params.json leaves out what Meta's code knows by heart: the RoPE factor, the tie of input and
output table, the image tower's shape, the context length. What can be derived from the shape is
derived here and marked so; the context length follows from the identification of the model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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
from llamatool.errors import ConfigError

# Keys that only Llama 4's code reads.
_LLAMA4_KEYS = ("moe_args", "nope_layer_interval", "vision_args", "ffn_exp", "attention_chunk_size")
_VISION_KEYS = ("vision_chunk_size", "vision_num_cross_attention_layers")

# The shapes of Llama 3.2 1B and 3B, (hidden_size, layers, heads): the input table serves as
# output table too, and RoPE is scaled by 32 instead of 8. params.json says neither.
# Source: config.json of Llama-3.2-1B and -3B.
TIED_SHAPES = ((2048, 16, 32), (3072, 28, 24))

# Tile geometry of Llama 3.2 Vision, not in its params.json.
# Source: config.json of Llama-3.2-11B-Vision; llama-models llama3/multimodal/model.py.
ASPECT_RATIOS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))


def is_meta(values: Mapping[str, Any]) -> bool:
    """Whether an object looks like a params.json (possibly wrapped in `model`)."""
    params = _unwrapped(values)
    return "dim" in params and "n_layers" in params


def states_vocabulary(values: Mapping[str, Any]) -> bool:
    """Whether a params.json says its vocabulary, and does not leave it to the weights."""
    return _unwrapped(values).get("vocab_size") not in (None, -1)


def embedding_rows(
    values: Mapping[str, Any], ranks: Sequence[Mapping[str, tuple[int, ...]]]
) -> int | None:
    """Rows of the input table over all ranks, or None where the weights have no such table.

    Llama 1 and 2 split the table by columns (each rank has every row), later ones by rows.

    Args: ranks: the shapes of each rank's tensors by name.
    """
    for name in ("tok_embeddings.weight", "text_model.tok_embeddings.weight"):
        shapes = [shapes[name] for shapes in ranks if name in shapes]
        if shapes and len(shapes) == len(ranks) and all(len(shape) == 2 for shape in shapes):
            by_rows = shapes[0][1] == _unwrapped(values).get("dim")
            return sum(shape[0] for shape in shapes) if by_rows else shapes[0][0]
    return None


def _unwrapped(values: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = values.get("model")
    return inner if isinstance(inner, dict) and "dim" not in values else values


def parse_meta(
    values: Mapping[str, Any], *, where: str, embedding_rows: int | None = None
) -> ModelConfig:
    """The model that the object of a params.json describes.

    Args: embedding_rows: rows of `tok_embeddings`, summed over shards, where the weights are at
    hand; they settle a `vocab_size` of -1.
    Raises: ConfigError, naming the key, if a size is missing, wrong or contradictory.
    """
    outer = Reader(values, where=where)
    params = (outer.block("model") or outer) if "dim" not in values else outer
    llama4 = any(params.has(key) for key in _LLAMA4_KEYS)
    vision_32 = any(params.has(key) for key in _VISION_KEYS) or params.has("vision_model")
    if llama4:
        return _llama4(params, embedding_rows)
    return _dense(params, embedding_rows, vision=vision_32)


def feed_forward_size(
    dim: int,
    *,
    multiple_of: int,
    multiplier: float | None,
    expansion: float = 4.0,
    shrink: float = 1.0,
) -> int:
    """Width of the feed-forward layer that Meta's code derives from `dim`.

    h = int(2 x int(expansion x dim) / 3), times the multiplier, divided by `shrink` (the
    capacity factor plus one of a mixture of experts), rounded up to a multiple of `multiple_of`.

    Example: dim 4096, multiple_of 1024, multiplier 1.3 -> 14336 (Llama 3 8B).
    Source: llama-models llama3/model.py FeedForward; llama4/model.py TransformerBlock.
    """
    hidden = int(2 * int(expansion * dim) / 3)
    if multiplier is not None:
        hidden = int(multiplier * hidden)
    hidden = int(hidden / shrink)
    return multiple_of * -(-hidden // multiple_of)


def _width(params: Reader, expansion: float = 4.0, shrink: float = 1.0) -> int:
    """The derived width, checked like a size that stands in the file."""
    llama4 = any(params.has(key) for key in _LLAMA4_KEYS)
    width = feed_forward_size(
        params.size("dim"),
        multiple_of=params.size("multiple_of", 256 if llama4 else None),
        multiplier=params.optional_number("ffn_dim_multiplier"),
        expansion=expansion,
        shrink=shrink,
    )
    return params.check_size("the feed-forward width that follows", width)


def _shape(params: Reader) -> tuple[int, int, int, int, int]:
    dim, num_layers = params.size("dim"), params.size("n_layers")
    if num_layers > MAX_LAYERS:
        raise params.wrong("n_layers", num_layers, f"at most {MAX_LAYERS}")
    num_heads = params.size("n_heads")
    num_kv_heads = params.size("n_kv_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"`n_kv_heads` = {num_kv_heads} does not divide `n_heads` = {num_heads}",
            where=params.where,
        )
    head_dim = params.optional_size("head_dim")
    if head_dim is None:
        if dim % num_heads:
            raise ConfigError(
                f"`n_heads` = {num_heads} does not divide `dim` = {dim}", where=params.where
            )
        head_dim = dim // num_heads
    if head_dim % 2:
        raise ConfigError(f"head size {head_dim} is odd: RoPE needs pairs", where=params.where)
    return dim, num_layers, num_heads, num_kv_heads, head_dim


def _vocab_size(params: Reader, embedding_rows: int | None, notes: list[Note]) -> int:
    stated = params.values.get("vocab_size")
    if embedding_rows is not None:
        params.origins["vocab_size"] = "derived"
        if isinstance(stated, int) and stated not in (-1, embedding_rows):
            notes.append(
                Note(
                    "vocab-rows-differ",
                    f"`vocab_size` is {stated}, the embedding has {embedding_rows} rows; "
                    "the rows count",
                )
            )
        return embedding_rows
    if stated == -1:  # so in the published files of Llama 1 and 2, whose tokenizer has 32000
        params.origins["vocab_size"] = "derived"
        return 32000
    if stated is None:
        error = params.missing("vocab_size")
        error.hint = (
            "Code Llama's files leave it out: 32016 for 7B and 13B, 32000 for their Python "
            "variants and 34B; point at the whole folder, or add the key"
        )
        raise error
    return params.size("vocab_size")


def _theta(params: Reader, default: float) -> float:
    for key in ("rope_theta", "rope_freq_base"):
        theta = params.optional_number(key)
        if theta is not None:
            params.origins["rope_theta"] = "file"
            return theta
    params.origins["rope_theta"] = "default"
    return default


def _quantization(params: Reader) -> QuantizationConfig | None:
    block = params.block("quantization_args")
    if block is None:
        return None
    method = "qlora" if params.has("lora_args") else "spinquant"
    return QuantizationConfig(method, 4, block.optional_size("group_size"), embedding_bits=8)


def _dense(params: Reader, embedding_rows: int | None, *, vision: bool) -> ModelConfig:
    notes: list[Note] = []
    dim, num_self_layers, num_heads, num_kv_heads, head_dim = _shape(params)
    vocab_size = _vocab_size(params, embedding_rows, notes)
    small = (dim, num_self_layers, num_heads) in TIED_SHAPES and vocab_size == 128256
    pruned_guard = dim == 2048 and vocab_size == 128256 and params.has("hidden_dim")
    tied = small or pruned_guard
    cross_layers: tuple[int, ...] = ()
    if vision:
        cross_layers = _cross_layers(params, num_self_layers)
    rope = RopeConfig(theta=_theta(params, 10000.0))
    if params.flag("use_scaled_rope", False):
        rope = RopeConfig(
            theta=rope.theta,
            type="llama3",
            factor=32.0 if tied else 8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
        params.origins["rope_scaling"] = "derived"
    hidden_dim = params.optional_size("hidden_dim")
    if hidden_dim is None:
        hidden_dim = _width(params)
        params.origins["intermediate_size"] = "derived"
    return ModelConfig(
        model_type="mllama" if vision else "llama",
        architectures=(),
        hidden_size=dim,
        num_hidden_layers=num_self_layers + len(cross_layers),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=hidden_dim,
        vocab_size=vocab_size,
        embedding_rows=vocab_size + (8 if vision else 0),
        max_position_embeddings=None,
        rms_norm_eps=params.number("norm_eps", 1e-5),
        hidden_act="silu",
        tie_word_embeddings=tied,
        rope=rope,
        dtype=None,
        cross_attention_layers=cross_layers,
        vision=_vision_32(params, vocab_size) if vision else None,
        quantization=_quantization(params),
        source_format="meta",
        origins={**params.origins, **_renamed_origins(params), "tie_word_embeddings": "derived"},
        present_keys=frozenset(params.values),
        notes=tuple(notes),
    )


_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "hidden_dim": "intermediate_size",
}


def _renamed_origins(params: Reader) -> dict[str, Any]:
    return {ours: params.origins[meta] for meta, ours in _NAMES.items() if meta in params.origins}


def _cross_layers(params: Reader, num_self_layers: int) -> tuple[int, ...]:
    """Where config.json puts the cross-attention layers that params.json only counts.

    Example: 32 self-attention and 8 cross-attention layers -> 3, 8, ..., 38 of 40.
    Source: transformers convert_mllama_weights_to_hf.py.
    """
    reader, key = params, "vision_num_cross_attention_layers"
    nested = params.block("vision_model")
    adapter = nested.block("cross_attention_adapter") if nested else None
    if adapter is not None and not params.has(key):
        reader, key = adapter, "num_layers"
    count = reader.size(key)
    if count > num_self_layers:
        raise reader.wrong(key, count, f"at most n_layers = {num_self_layers}")
    step = -(-num_self_layers // count)
    layers = tuple(range(step - 1, num_self_layers + count, step + 1))
    if len(layers) != count:
        raise reader.wrong(key, count, f"a count that spreads over {num_self_layers} layers")
    return layers


def _vision_32(params: Reader, vocab_size: int) -> VisionConfig:
    # Widths and depths are those of both published sizes; only the tile size is in the file.
    return VisionConfig(
        kind="mllama",
        hidden_size=1280,
        intermediate_size=5120,
        num_hidden_layers=32,
        num_attention_heads=16,
        image_size=params.size("vision_chunk_size", minimum=14),
        patch_size=14,
        num_channels=3,
        output_size=7680,
        norm_eps=1e-5,
        max_num_tiles=params.size("vision_max_num_chunks", 4),
        image_token_id=vocab_size,  # the first of the rows that the image model adds
        num_global_layers=8,
        intermediate_layers_indices=(3, 7, 15, 23, 30),
        supported_aspect_ratios=ASPECT_RATIOS,
    )


def _llama4(params: Reader, embedding_rows: int | None) -> ModelConfig:
    notes: list[Note] = []
    dim, num_layers, num_heads, num_kv_heads, head_dim = _shape(params)
    vocab_size = _vocab_size(params, embedding_rows, notes)
    expansion = params.number("ffn_exp", 4.0)
    moe_args = params.block("moe_args")
    shrink, moe = 1.0, None
    if moe_args is not None and moe_args.size("num_experts", minimum=-1) > 0:
        if moe_args.flag("auto_scale_F", True):
            shrink = moe_args.number("capacity_factor", 1.0) + 1
        step = moe_args.size("interleave_moe_layer_step", 1)
        num_experts, per_token = moe_args.size("num_experts"), moe_args.size("top_k", 1)
        if per_token > num_experts:
            raise moe_args.wrong("top_k", per_token, f"at most num_experts = {num_experts}")
        moe = MoeConfig(num_experts, per_token, tuple(range(step - 1, num_layers, step)))
    dense_size = _width(params, expansion)
    expert_size = _width(params, expansion, shrink)
    interval = params.optional_size("nope_layer_interval")
    nope = tuple(i for i in range(num_layers) if interval and (i + 1) % interval == 0)
    params.origins["intermediate_size"] = params.origins["intermediate_size_mlp"] = "derived"
    return ModelConfig(
        model_type="llama4",
        architectures=(),
        hidden_size=dim,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=expert_size,
        intermediate_size_mlp=dense_size,
        vocab_size=vocab_size,
        embedding_rows=vocab_size,
        max_position_embeddings=None,
        rms_norm_eps=params.number("norm_eps", 1e-5),
        hidden_act="silu",
        tie_word_embeddings=False,
        rope=_llama4_rope(params),
        dtype=None,
        qk_norm="unit" if params.flag("use_qk_norm", False) else "none",
        attention_chunk_size=params.optional_size("attention_chunk_size"),
        no_rope_layers=nope,
        temperature=_llama4_temperature(params, bool(nope), notes),
        moe=moe,
        vision=_llama4_vision(params),
        quantization=_quantization(params),
        source_format="meta",
        origins={**params.origins, **_renamed_origins(params)},
        present_keys=frozenset(params.values),
        notes=tuple(notes),
    )


def _llama4_rope(params: Reader) -> RopeConfig:
    theta = _theta(params, 500000.0)
    if not params.flag("use_scaled_rope", False):
        return RopeConfig(theta=theta, interleaved=True)
    return RopeConfig(
        theta=theta,
        type="llama3",
        factor=params.number("rope_scaling_factor", 16.0),
        low_freq_factor=1.0,
        high_freq_factor=params.number("rope_high_freq_factor", 1.0),
        original_max_position_embeddings=8192,
        interleaved=True,
    )


def _llama4_temperature(
    params: Reader, has_nope_layers: bool, notes: list[Note]
) -> TemperatureConfig | None:
    # Meta's class defaults to off and the published config.json files to on; the published
    # models are meant to run with it.
    if not params.has("attn_temperature_tuning") and has_nope_layers:
        params.origins["attn_temperature_tuning"] = "derived"
        notes.append(
            Note(
                "temperature-derived",
                "params.json does not say `attn_temperature_tuning`; taken as on, as "
                "transformers has it for Llama 4",
            )
        )
    elif not params.values.get("attn_temperature_tuning"):
        return None
    return TemperatureConfig(
        floor_scale=params.number("floor_scale", 8192.0),
        attn_scale=params.number("attn_scale", 0.1),
    )


def _llama4_vision(params: Reader) -> VisionConfig | None:
    vision = params.block("vision_args")
    if vision is None:
        return None
    image, patch = vision.block("image_size"), vision.block("patch_size")
    if image is None or patch is None:
        raise vision.missing("image_size" if image is None else "patch_size")
    width, ratio = vision.size("dim"), vision.number("mlp_ratio")
    output, shuffle = vision.size("output_dim"), vision.number("pixel_shuffle_ratio")
    hidden = vision.check_size("the width that mlp_ratio gives", int(width * ratio))
    num_heads = vision.size("n_heads")
    if width % num_heads:
        raise vision.wrong("dim", width, f"a multiple of n_heads = {num_heads}")
    return VisionConfig(
        kind="llama4",
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=vision.size("n_layers"),
        num_attention_heads=num_heads,
        image_size=image.size("height"),
        patch_size=patch.size("height"),
        num_channels=3,
        output_size=output,
        norm_eps=1e-5,
        max_num_tiles=16,
        image_token_id=200092,
        projector_input_size=output,
        projector_output_size=output,
        pixel_shuffle_ratio=shuffle,
        rope_theta=10000.0,
    )
