"""The layer plan: what each layer of a model is, decided here and nowhere else.

Parameter counts, KV-cache sizes, tensor names, the model and its tensor-parallel split all read
this plan, so none of them asks which Llama it is.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from llamatool.config.model import ModelConfig, TemperatureConfig, VisionConfig
from llamatool.errors import ConfigError, UsageError
from llamatool.records import record

AttentionKind = Literal["full", "chunked", "sliding", "cross"]

# The names that config.json's `layer_types` uses.
_LAYER_TYPES: dict[str, AttentionKind] = {
    "full_attention": "full",
    "chunked_attention": "chunked",
    "sliding_attention": "sliding",
}


@record
class MoeSpec:
    """A mixture-of-experts feed-forward; `LayerSpec.intermediate_size` is one expert's width."""

    num_experts: int
    num_experts_per_tok: int
    shared_intermediate_size: int


@record
class LayerSpec:
    """One decoder layer."""

    index: int  # zero-based, as config.json counts (cross-attention layers included)
    attention: AttentionKind
    window: int | None  # tokens: the chunk of a chunked layer, the window of a sliding one
    uses_rope: bool
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    moe: MoeSpec | None = None
    temperature: TemperatureConfig | None = None
    qk_norm: Literal["none", "unit", "weighted"] = "none"
    attention_bias: bool = False  # of q, k and v
    attention_output_bias: bool = False
    mlp_bias: bool = False

    @property
    def kv_width(self) -> int:
        """Elements of keys and values that one token leaves in this layer: 2 x K x head_dim."""
        return 2 * self.num_key_value_heads * self.head_dim


def plan_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """The layers of the language model, in order.

    Example: Llama 4 Scout -> 48 layers, of which 3, 7, ..., 47 are full and without RoPE and the
    other 36 are chunked at 8192 tokens.
    Source: transformers modeling_llama4.py, modeling_mllama.py, modeling_mistral.py.
    """
    return tuple(_layer(config, index) for index in range(config.num_hidden_layers))


def split_layers(layers: Sequence[LayerSpec], num_ranks: int) -> tuple[LayerSpec, ...]:
    """The layers as each of `num_ranks` tensor-parallel ranks holds them: all ranks alike.

    Heads and the widths of feed-forwards and experts are divided. With more ranks than key/value
    heads, several ranks hold the same head.

    Raises: UsageError naming the numbers that do not divide, and the numbers of ranks that do.
    Example: Llama 3.1 70B on 4 ranks -> 16 heads, 2 key/value heads, width 7168 in each layer.
    """
    problem = next(filter(None, (_indivisible(layer, num_ranks) for layer in layers)), None)
    if problem is not None:
        works = [str(number) for number in possible_splits(layers)]
        raise UsageError(
            f"{num_ranks} ranks cannot share this model: {problem}",
            hint=f"it can be shared by {', '.join(works[:-1])} or {works[-1]} ranks"
            if len(works) > 1
            else "it runs on one rank only",
        )
    return tuple(_split(layer, num_ranks) for layer in layers)


def possible_splits(layers: Sequence[LayerSpec]) -> tuple[int, ...]:
    """The numbers of ranks that can share these layers, ascending, 1 included.

    Example: SmolLM2-135M, 9 heads and 3 key/value heads -> (1, 3).
    """
    layers = tuple({replace(layer, index=0): None for layer in layers})  # most are alike
    most = min((layer.num_attention_heads for layer in layers), default=1)
    return tuple(
        number
        for number in range(1, most + 1)
        if not any(_indivisible(layer, number) for layer in layers)
    )


def share(total: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """First of `total` things that a rank holds, and the one after its last.

    Where they do not divide, the last ranks hold fewer.
    Example: 10 rows over 4 ranks -> 0:3, 3:6, 6:9, 9:10.
    """
    most = -(-total // num_ranks)
    return min(rank * most, total), min((rank + 1) * most, total)


def splits_tower(vision: VisionConfig, num_ranks: int) -> bool:
    """Whether the ranks can share an image tower; where they cannot, each holds it whole.

    Example: the tower of Llama 4 has 16 heads, so 2, 4, 8 and 16 ranks share it, and 3 do not.
    """
    # The last of these is that of the adapter, 0 where there is none.
    sizes = vision.num_attention_heads, vision.intermediate_size, vision.projector_input_size
    return all(size % num_ranks == 0 for size in sizes)


def _split(layer: LayerSpec, num_ranks: int) -> LayerSpec:
    moe = layer.moe
    if moe is not None:
        shared = moe.shared_intermediate_size // num_ranks
        moe = replace(moe, shared_intermediate_size=shared)
    return replace(
        layer,
        num_attention_heads=layer.num_attention_heads // num_ranks,
        num_key_value_heads=max(1, layer.num_key_value_heads // num_ranks),
        intermediate_size=layer.intermediate_size // num_ranks,
        moe=moe,
    )


def _indivisible(layer: LayerSpec, num_ranks: int) -> str | None:
    """What of the layer cannot be divided by `num_ranks`, with its number."""
    heads, kv_heads = layer.num_attention_heads, layer.num_key_value_heads
    if heads % num_ranks:
        return f"{heads} attention heads are not divisible by {num_ranks}"
    if kv_heads % num_ranks and num_ranks % kv_heads:
        return f"neither of {kv_heads} key/value heads and {num_ranks} ranks divides the other"
    widths = {"intermediate_size": layer.intermediate_size}
    if layer.moe is not None:
        widths["shared expert's width"] = layer.moe.shared_intermediate_size
    for name, width in widths.items():
        if width % num_ranks:
            return f"{name} {width} is not divisible by {num_ranks}"
    return None


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    per_layer = config.num_key_value_heads_per_layer
    num_key_value_heads = per_layer[index] if per_layer else config.num_key_value_heads
    if index in config.cross_attention_layers:
        return LayerSpec(
            index=index,
            attention="cross",
            window=None,
            uses_rope=False,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            qk_norm="weighted",
        )
    uses_rope = index not in config.no_rope_layers
    attention, window = _attention(config, index, uses_rope)
    # The unit norm follows the rotation, so layers without RoPE have none; a weighted one
    # (Qwen3) stands in every layer.
    qk_norm = "none" if config.qk_norm == "unit" and not uses_rope else config.qk_norm
    intermediate_size = config.intermediate_size
    moe = None
    if config.moe is not None and index in config.moe.moe_layers:
        moe = MoeSpec(
            num_experts=config.moe.num_local_experts,
            num_experts_per_tok=config.moe.num_experts_per_tok,
            shared_intermediate_size=config.intermediate_size,
        )
    elif config.intermediate_size_mlp is not None:
        intermediate_size = config.intermediate_size_mlp
    return LayerSpec(
        index=index,
        attention=attention,
        window=window,
        uses_rope=uses_rope,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=intermediate_size,
        moe=moe,
        temperature=None if uses_rope else config.temperature,
        qk_norm=qk_norm,
        attention_bias=config.attention_bias,
        attention_output_bias=config.attention_output_bias,
        mlp_bias=config.mlp_bias,
    )


def _attention(
    config: ModelConfig, index: int, uses_rope: bool
) -> tuple[AttentionKind, int | None]:
    if config.layer_types is not None:
        kind = _LAYER_TYPES.get(config.layer_types[index])
        if kind is None:
            raise ConfigError(
                f"`layer_types[{index}]` is `{config.layer_types[index]}`",
                hint=f"known are {', '.join(_LAYER_TYPES)}",
            )
    elif config.attention_chunk_size is not None and uses_rope:
        kind = "chunked"
    elif config.sliding_window is not None:
        kind = "sliding"
    else:
        kind = "full"
    # A window of null bounds nothing.
    window = {"chunked": config.attention_chunk_size, "sliding": config.sliding_window}.get(kind)
    return (kind, window) if window is not None else ("full", None)
