"""Parameter counts by group, exact to the parameter, from a configuration alone.

Counted by formula over the layer plan, never by building the model: a model on a meta device
loses the tie of input and output table (21 % too much for Llama 3.2 1B).
"""

from llamatool.config.layers import LayerSpec, plan_layers, splits_tower
from llamatool.config.model import ModelConfig, VisionConfig
from llamatool.records import record

GROUPS = (
    "embedding",
    "lm_head",
    "attention",
    "mlp",
    "norms",
    "router",
    "routed_experts",
    "shared_experts",
    "cross_attention",
    "cross_attention_gates",
    "vision_tower",
    "projector",
)


@record
class ActiveParameters:
    """Parameters that one token of text passes through in a mixture of experts."""

    total: int  # with both vocabulary tables
    without_input_embedding: int


@record
class ParameterCount:
    """Parameters of a model, each tensor once."""

    total: int
    stored: int  # elements in the files of this layout: a tied output table may be a copy there
    tied: bool
    active: ActiveParameters | None  # None for a dense model
    text: int  # without image tower and projector
    per_layer: int | None  # of one decoder layer, where all are alike
    by_group: dict[str, int]  # without the groups that are empty
    replicated: int  # of the text model: every tensor-parallel rank holds these whole

    @property
    def vision(self) -> int:
        """Parameters of the image tower and its projector."""
        return self.total - self.text


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Parameters of the whole model.

    Embedding rows x D; per layer D x E x (2H + 2K) of attention (and biases), 3 x D x F of
    feed-forward, 2 x D of norms; an output table unless it is tied; image tower and projector.

    Example: Llama 3.1 8B -> 8030261248; Llama 4 Scout -> 108641793536, of which 17172894720 are
    active.
    Source: the modules of transformers modeling_llama.py, modeling_mllama.py, modeling_llama4.py.
    """
    plan = plan_layers(config)
    groups = dict.fromkeys(GROUPS, 0)
    groups["embedding"] = config.embedding_rows * config.hidden_size
    table = config.vocab_size * config.hidden_size
    groups["lm_head"] = 0 if config.tie_word_embeddings else table
    groups["norms"] = config.hidden_size
    for layer in plan:
        for group, count in layer_parameters(layer, config.hidden_size).items():
            groups[group] += count
    text = sum(groups.values())
    active = _active(plan, config, text)
    if config.vision is not None:
        groups["vision_tower"] = vision_tower_parameters(config.vision)
        groups["projector"] = projector_parameters(config.vision, config.hidden_size)
    total = sum(groups.values())
    # Meta's files of the tied models hold the output table too, as a copy of the input table.
    copied = config.tie_word_embeddings and config.source_format == "meta"
    layer_sizes = {sum(layer_parameters(layer, config.hidden_size).values()) for layer in plan}
    return ParameterCount(
        total=total,
        stored=total + (table if copied else 0),
        tied=config.tie_word_embeddings,
        active=active,
        text=text,
        per_layer=layer_sizes.pop() if len(layer_sizes) == 1 else None,
        by_group={group: count for group, count in groups.items() if count},
        replicated=groups["norms"] + groups["router"] + groups["cross_attention_gates"],
    )


def layer_parameters(layer: LayerSpec, hidden_size: int) -> dict[str, int]:
    """Parameters of one decoder layer by group.

    Example: a layer of Llama 3.1 8B -> attention 41943040, mlp 176160768, norms 8192.
    """
    heads, kv_heads, head_dim = (
        layer.num_attention_heads,
        layer.num_key_value_heads,
        layer.head_dim,
    )
    attention = hidden_size * head_dim * (2 * heads + 2 * kv_heads)
    if layer.attention_bias:
        attention += head_dim * (heads + 2 * kv_heads)
    if layer.attention_output_bias:
        attention += hidden_size
    qk_norms = 2 * head_dim if layer.qk_norm == "weighted" else 0
    groups = {"norms": 2 * hidden_size}
    if layer.attention == "cross":
        groups["cross_attention"] = attention + qk_norms
        groups["cross_attention_gates"] = 2
    else:
        groups["attention"] = attention
        groups["norms"] += qk_norms
    if layer.moe is None:
        groups["mlp"] = 3 * hidden_size * layer.intermediate_size
        if layer.mlp_bias:
            groups["mlp"] += 2 * layer.intermediate_size + hidden_size
    else:
        groups["router"] = layer.moe.num_experts * hidden_size
        groups["routed_experts"] = layer.moe.num_experts * 3 * hidden_size * layer.intermediate_size
        groups["shared_experts"] = 3 * hidden_size * layer.moe.shared_intermediate_size
    return groups


def _active(plan: tuple[LayerSpec, ...], config: ModelConfig, text: int) -> ActiveParameters | None:
    idle = 0
    for layer in plan:
        if layer.moe is not None:
            resting = layer.moe.num_experts - layer.moe.num_experts_per_tok
            idle += resting * 3 * config.hidden_size * layer.intermediate_size
    if not any(layer.moe for layer in plan):
        return None
    total = text - idle
    # A tied table works as output table too, so it stays.
    table = 0 if config.tie_word_embeddings else config.embedding_rows * config.hidden_size
    return ActiveParameters(total=total, without_input_embedding=total - table)


def vision_tower_parameters(vision: VisionConfig, num_ranks: int = 1) -> int:
    """Parameters of an image tower, its adapter included; or of a rank's part of it.

    Ranks divide the heads, the feed-forward and the adapter's inner width; norms, tables, the
    patch embedding and the biases of what is summed are whole on each.

    Example: Llama 3.2 11B Vision at 560 px -> 863567379; Llama 4 -> 850960896, and on each of
    two ranks 426447744.
    """
    parts = num_ranks if splits_tower(vision, num_ranks) else 1
    width, inner = vision.hidden_size, vision.intermediate_size
    heads_width, inner_part = width // parts, inner // parts
    norm = 2 * width  # LayerNorm: weight and bias
    patch = vision.num_channels * vision.patch_size**2 * width
    positions = width + vision.num_patches * width  # class token and position table
    block = 4 * width * heads_width + 2 * width * inner_part + inner_part + width + 2 * norm
    if vision.kind == "llama4":
        block += 3 * heads_width + width  # biases of q, k, v and o
        adapter_part = vision.projector_input_size // parts
        adapter = adapter_part * (inner + vision.projector_output_size)
        return patch + positions + 2 * norm + vision.num_hidden_layers * block + adapter
    tiles, ratios = vision.max_num_tiles, len(vision.supported_aspect_ratios) + 1
    tile_table = ratios * tiles * vision.num_patches * width + 1
    around_tables = 2 * (ratios * tiles * width + 1)
    blocks = vision.num_hidden_layers * block + vision.num_global_layers * (block + 2)
    return patch + positions + tile_table + around_tables + 2 * norm + blocks


def projector_parameters(vision: VisionConfig, hidden_size: int) -> int:
    """Parameters of the matrix from an image's features to the decoder's width.

    Example: Llama 3.2 11B Vision -> 31461376; Llama 4 -> 20971520.
    """
    if vision.kind == "llama4":
        return vision.output_size * hidden_size
    return vision.output_size * hidden_size + hidden_size
