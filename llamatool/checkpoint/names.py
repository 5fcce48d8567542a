"""Who calls which tensor what: Hugging Face, Meta and GGUF names, shapes and splits in one table.

The rows below are read in every direction: `inspect` compares a checkpoint with them, the
converter and `verify` move bytes by them, and the model's loader finds its weights through them.
Which rows apply, and how large their tensors are, comes from the layer plan.

`tensor_specs(config)` gives one TensorSpec per Hugging Face tensor. A spec says how the tensor is
made of Meta's:

  parts = spec.ways[0]                   # other spellings of the same follow
  for part in parts:                     # one Meta tensor, or the rows of one that belong here
      shards = [stored(rank, part.name)[slice(*part.rows(num_shards))]
                .reshape(part.shard_shape(num_shards)) for rank in range(num_shards)]
      whole  = concatenate(shards, part.axis), or shards[0] where part.axis is None
  tensor = concatenate(wholes, spec.join_axis), then:
      "permute"    the rows of each head, from pairs (2i, 2i+1) to (i, i + head_dim/2):
                   view(num_heads, head_dim/2, 2, -1).transpose(1, 2).reshape(shape)
      "transpose"  the two axes exchanged
      "tiles"      the table by aspect ratio, see `tile_cells`
      "copy"       reshaped to spec.shape, where that differs at all
GGUF's tensors stand unsplit under `spec.gguf` and take the same operation.

Source: transformers convert_llama_weights_to_hf.py, convert_mllama_weights_to_hf.py and
convert_llama4_weights_to_hf.py; llama-models llama3/, llama4/ and their load hooks; fairscale's
parallel layers; llama.cpp convert_hf_to_gguf.py and gguf-py tensor_mapping.py.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from llamatool.config.layers import LayerSpec, plan_layers
from llamatool.config.model import ModelConfig, VisionConfig

Operation = Literal["copy", "permute", "transpose", "tiles"]
Layout = Literal["huggingface", "meta", "gguf"]


@dataclass(frozen=True, slots=True)
class Part:
    """A Meta tensor, or the rows of one that hold a certain matrix, and how ranks share it."""

    name: str
    shape: tuple[int, ...]  # over all ranks, as Meta's code views it
    axis: int | None  # of `shape` that is split over the ranks; None: every rank has it whole
    num_rows_before: int = 0  # rows of other matrices above it in the same tensor, over all ranks
    num_rows_total: int | None = None  # rows of the whole tensor over all ranks; None: its own
    flat: bool = False  # stored with all axes but the last merged into one

    def shard_shape(self, num_shards: int) -> tuple[int, ...]:
        """Shape of one rank's share, as viewed."""
        if self.axis is None:
            return self.shape
        shape = list(self.shape)
        shape[self.axis] //= num_shards
        return tuple(shape)

    def stored_shape(self, num_shards: int) -> tuple[int, ...]:
        """Shape of the whole tensor in one rank's file.

        Example: `wqkv` of Scout over 8 ranks -> (896, 5120): 640 rows of q, 128 of k and of v.
        """
        shape = self.shard_shape(num_shards)
        if self.flat:
            shape = (math.prod(shape[:-1]), shape[-1])
        if self.num_rows_total is not None:
            shape = (self.num_rows_total // num_shards, *shape[1:])
        return shape

    def rows(self, num_shards: int) -> tuple[int, int]:
        """First row, and the row after the last, of the matrix within one rank's tensor."""
        num_rows = self.stored_shape(num_shards)[0] if self.shape else 1
        if self.num_rows_total is None:
            return 0, num_rows
        start = self.num_rows_before // num_shards
        return start, start + self.shape[0] // num_shards


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the Hugging Face layout, and where the other layouts keep it."""

    name: str
    shape: tuple[int, ...]
    operation: Operation
    ways: tuple[tuple[Part, ...], ...]  # spellings of Meta's, the published first; (): none
    gguf: str | None
    join_axis: int = 0  # of `shape`, along which several parts lie one after the other
    num_heads: int = 0  # "permute"
    aspect_ratios: tuple[tuple[int, int], ...] = ()  # "tiles": (height, width), ids from 1
    repeats: str | None = None  # tied: the tensor whose copy this is, not stored by Hugging Face

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


_OPERATIONS: dict[str, Operation] = {
    "copy": "copy",
    "permute": "permute",
    "transpose": "transpose",
    "tiles": "tiles",
}


class _Row(NamedTuple):
    """One line of the table. Shapes are written in the letters of `_sizes`."""

    hf: str
    meta: str | None
    shape: str
    axis: int | None = None
    gguf: str | None = None
    op: str = "copy"  # "permute q" and "permute k" name the heads
    when: str = ""  # features of the layer that the row belongs to
    hf_shape: str = ""  # where it differs
    before: str = ""  # letters of the matrices above it in a fused tensor
    total: str = ""  # letters of all matrices in a fused tensor
    flat: bool = False
    join: int = 0
    other: tuple["_Row", ...] = ()  # another spelling of Meta's


def _norm(hf: str, meta: str | None, shape: str = "D", gguf: str | None = None) -> _Row:
    return _Row(hf, meta, shape, None, gguf)


# Letters: V vocabulary, D hidden_size, Q and K the widths of queries and keys (heads x head_dim),
# E head_dim, F intermediate_size, X experts, L rows that the vision model adds to the input table.
_TABLES = (
    _Row("model.embed_tokens.weight", "tok_embeddings.weight", "V D", 0, "token_embd.weight"),
    _norm("model.norm.weight", "norm.weight", gguf="output_norm.weight"),
    _Row("lm_head.weight", "output.weight", "V D", 0, "output.weight"),
)
_SELF_ATTENTION = (
    _Row("self_attn.q_proj.weight", "attention.wq.weight", "Q D", 0, "attn_q.weight", "permute q"),
    _Row("self_attn.k_proj.weight", "attention.wk.weight", "K D", 0, "attn_k.weight", "permute k"),
    _Row("self_attn.v_proj.weight", "attention.wv.weight", "K D", 0, "attn_v.weight"),
    _Row("self_attn.o_proj.weight", "attention.wo.weight", "D Q", 1, "attn_output.weight"),
    # Meta's code has no biases and no weighted q/k norm; relatives of Llama do.
    _Row("self_attn.q_proj.bias", None, "Q", 0, "attn_q.bias", "permute q", "qkv_bias"),
    _Row("self_attn.k_proj.bias", None, "K", 0, "attn_k.bias", "permute k", "qkv_bias"),
    _Row("self_attn.v_proj.bias", None, "K", 0, "attn_v.bias", when="qkv_bias"),
    _Row("self_attn.o_proj.bias", None, "D", None, "attn_output.bias", when="o_bias"),
    _Row("self_attn.q_norm.weight", None, "E", None, "attn_q_norm.weight", when="qk_norm"),
    _Row("self_attn.k_norm.weight", None, "E", None, "attn_k_norm.weight", when="qk_norm"),
    _norm("input_layernorm.weight", "attention_norm.weight", gguf="attn_norm.weight"),
)
_CROSS_ATTENTION = (
    _Row("cross_attn.q_proj.weight", "attention.wq.weight", "Q D", 0),
    _Row("cross_attn.k_proj.weight", "attention.wk.weight", "K D", 0),
    _Row("cross_attn.v_proj.weight", "attention.wv.weight", "K D", 0),
    _Row("cross_attn.o_proj.weight", "attention.wo.weight", "D Q", 1),
    _norm("cross_attn.q_norm.weight", "attention.q_norm.weight", "E"),
    _norm("cross_attn.k_norm.weight", "attention.k_norm.weight", "E"),
    _norm("input_layernorm.weight", "attention_norm.weight"),
    _norm("cross_attn_attn_gate", "gate_attn", "1"),
    _norm("cross_attn_mlp_gate", "gate_ffwd", "1"),
)
_MLP = (
    _norm("post_attention_layernorm.weight", "ffn_norm.weight", gguf="ffn_norm.weight"),
    _Row("mlp.gate_proj.weight", "feed_forward.w1.weight", "F D", 0, "ffn_gate.weight"),
    _Row("mlp.down_proj.weight", "feed_forward.w2.weight", "D F", 1, "ffn_down.weight"),
    _Row("mlp.up_proj.weight", "feed_forward.w3.weight", "F D", 0, "ffn_up.weight"),
    _Row("mlp.gate_proj.bias", None, "F", 0, "ffn_gate.bias", when="mlp_bias"),
    _Row("mlp.down_proj.bias", None, "D", None, "ffn_down.bias", when="mlp_bias"),
    _Row("mlp.up_proj.bias", None, "F", 0, "ffn_up.bias", when="mlp_bias"),
)
# Llama 4. Meta's files have the names of its training code; the names that its inference code
# gives them are accepted too.
_WQKV = "attention.wqkv.weight"
_LLAMA4_ATTENTION = (
    _Row(
        *("self_attn.q_proj.weight", _WQKV, "Q D", 0),
        total="QKK",
        other=(_Row("", "attention.wq.weight", "Q D", 0),),
    ),
    _Row(
        *("self_attn.k_proj.weight", _WQKV, "K D", 0),
        before="Q",
        total="QKK",
        other=(_Row("", "attention.wk.weight", "K D", 0),),
    ),
    _Row(
        *("self_attn.v_proj.weight", _WQKV, "K D", 0),
        before="QK",
        total="QKK",
        other=(_Row("", "attention.wv.weight", "K D", 0),),
    ),
    _Row("self_attn.o_proj.weight", "attention.wo.weight", "D Q", 1),
    _norm("input_layernorm.weight", "attention.wqkv.layer_norm_weight")._replace(
        other=(_norm("", "attention_norm.weight"),)
    ),
)
_LLAMA4_MOE = (
    _norm("post_attention_layernorm.weight", "feed_forward.norm.weight")._replace(
        other=(_norm("", "ffn_norm.weight"),)
    ),
    _Row("feed_forward.router.weight", "feed_forward.router_DE", "D X", None, op="transpose"),
    _Row(
        *("feed_forward.experts.gate_up_proj", "feed_forward.experts.moe_w_in_eD_F", "X D F", 2),
        flat=True,
        hf_shape="X D 2F",
        join=2,
        other=(_Row("", "feed_forward.experts.w1", "X D F", 2),),
    ),
    _Row(
        *("feed_forward.experts.gate_up_proj", "feed_forward.experts.moe_w_swiglu_eD_F"),
        *("X D F", 2),
        flat=True,
        other=(_Row("", "feed_forward.experts.w3", "X D F", 2),),
    ),
    _Row(
        *("feed_forward.experts.down_proj", "feed_forward.experts.moe_w_out_eF_D", "X F D", 1),
        flat=True,
        other=(_Row("", "feed_forward.experts.w2", "X F D", 1),),
    ),
    _Row(
        *("feed_forward.shared_expert.gate_proj.weight", "feed_forward.w_in_shared_FD.weight"),
        *("F D", 0),
        other=(_Row("", "feed_forward.shared_expert.w1.weight", "F D", 0),),
    ),
    _Row(
        *("feed_forward.shared_expert.up_proj.weight", "feed_forward.w_swiglu_FD.weight"),
        *("F D", 0),
        other=(_Row("", "feed_forward.shared_expert.w3.weight", "F D", 0),),
    ),
    _Row(
        *("feed_forward.shared_expert.down_proj.weight", "feed_forward.w_out_shared_DF.weight"),
        *("D F", 1),
        other=(_Row("", "feed_forward.shared_expert.w2.weight", "D F", 1),),
    ),
)
_FC1 = "feed_forward.mlp.fc1_weight"
_LLAMA4_DENSE = (
    _norm("post_attention_layernorm.weight", "feed_forward.mlp.layer_norm_weight")._replace(
        other=(_norm("", "ffn_norm.weight"),)
    ),
    _Row(
        *("feed_forward.gate_proj.weight", _FC1, "F D", 0),
        total="FF",
        other=(_Row("", "feed_forward.w1.weight", "F D", 0),),
    ),
    _Row(
        *("feed_forward.up_proj.weight", _FC1, "F D", 0),
        before="F",
        total="FF",
        other=(_Row("", "feed_forward.w3.weight", "F D", 0),),
    ),
    _Row(
        *("feed_forward.down_proj.weight", "feed_forward.mlp.fc2_weight", "D F", 1),
        other=(_Row("", "feed_forward.w2.weight", "D F", 1),),
    ),
)
# The image towers. Letters: W hidden_size, I intermediate_size, P pixels of a patch with all
# channels, N patches of a tile with the class token, O output_size, T tiles along a side,
# A aspect ratios and the padding row, M the width after the pixel shuffle, J projector_output_size.
_TOWER_BLOCK = (
    _Row("self_attn.q_proj.weight", "attn.wq.weight", "W W", 0),
    _Row("self_attn.k_proj.weight", "attn.wk.weight", "W W", 0),
    _Row("self_attn.v_proj.weight", "attn.wv.weight", "W W", 0),
    _Row("self_attn.o_proj.weight", "attn.wo.weight", "W W", 1),
    _Row("self_attn.q_proj.bias", "attn.wq.bias", "W", 0, when="tower_bias"),
    _Row("self_attn.k_proj.bias", "attn.wk.bias", "W", 0, when="tower_bias"),
    _Row("self_attn.v_proj.bias", "attn.wv.bias", "W", 0, when="tower_bias"),
    _norm("self_attn.o_proj.bias", "attn.wo.bias", "W")._replace(when="tower_bias"),
    _Row("mlp.fc1.weight", "mlp.c_fc.weight", "I W", 0),
    _Row("mlp.fc1.bias", "mlp.c_fc.bias", "I", 0),
    _Row("mlp.fc2.weight", "mlp.c_proj.weight", "W I", 1),
    _norm("mlp.fc2.bias", "mlp.c_proj.bias", "W"),
    _norm("input_layernorm.weight", "ln_1.weight", "W"),
    _norm("input_layernorm.bias", "ln_1.bias", "W"),
    _norm("post_attention_layernorm.weight", "ln_2.weight", "W"),
    _norm("post_attention_layernorm.bias", "ln_2.bias", "W"),
    _norm("gate_attn", "gate_attn", "1")._replace(when="gated"),
    _norm("gate_ffn", "gate_ffn", "1")._replace(when="gated"),
)
_TOWER_EDGES = (
    _norm("class_embedding", "class_embedding", "W"),
    _norm("layernorm_pre.weight", "ln_pre.weight", "W"),
    _norm("layernorm_pre.bias", "ln_pre.bias", "W"),
    _norm("layernorm_post.weight", "ln_post.weight", "W"),
    _norm("layernorm_post.bias", "ln_post.bias", "W"),
)
_MLLAMA_TOWER = (
    *_TOWER_EDGES,
    _Row("patch_embedding.weight", "conv1._linear.weight", "W P", 0, hf_shape="W C p p"),
    _norm("gated_positional_embedding.embedding", "positional_embedding", "N W"),
    _norm("gated_positional_embedding.gate", "gated_positional_embedding_gate", "1"),
    _Row(
        *("gated_positional_embedding.tile_embedding.weight", "gated_positional_embedding"),
        *("T T N W", None),
        op="tiles",
        hf_shape="A TNW",
    ),
    _Row(
        *("pre_tile_positional_embedding.embedding.weight", "pre_tile_pos_embed.embedding"),
        *("T T 1 W", None),
        op="tiles",
        hf_shape="A TW",
    ),
    _norm("pre_tile_positional_embedding.gate", "pre_tile_pos_embed.gate", "1"),
    _Row(
        *("post_tile_positional_embedding.embedding.weight", "post_tile_pos_embed.embedding"),
        *("T T 1 W", None),
        op="tiles",
        hf_shape="A TW",
    ),
    _norm("post_tile_positional_embedding.gate", "post_tile_pos_embed.gate", "1"),
)
_MLLAMA_PROJECTOR = (
    _Row("multi_modal_projector.weight", "vision_projection.weight", "D O", 0),
    _Row("multi_modal_projector.bias", "vision_projection.bias", "D", 0),
)
_LLAMA4_TOWER = (
    *_TOWER_EDGES,
    _norm("positional_embedding_vlm", "positional_embedding_vlm", "N W"),
    _Row("patch_embedding.linear.weight", "conv1._linear.weight", "W P", 0),
)
_LLAMA4_PROJECTOR = (
    _Row("vision_model.vision_adapter.mlp.fc1.weight", "c_fc.weight", "R M", 0),
    _Row("vision_model.vision_adapter.mlp.fc2.weight", "c_proj.weight", "J R", 1),
)


def tensor_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """The tensors of a model in the Hugging Face layout, in the order of the layers.

    The output table of a tied model is among them, marked by `repeats`.
    Example: Llama 3.1 8B -> 291 tensors; Llama 3.2 1B -> 147, of which `lm_head.weight` repeats
    the input table.
    """
    text, specs = _text_prefixes(config), []
    axis = embedding_axis(config)
    sizes = _text_sizes(config)
    gguf = "" if _has_gguf(config) else None
    for row in _TABLES:
        is_input = row.hf.startswith("model.embed_tokens")
        shown = row._replace(axis=axis) if is_input else row
        spec = _spec((shown,), sizes, text.hf, text.meta, gguf)
        if is_input and config.embedding_rows > config.vocab_size:
            spec = _with_learnable_rows(spec, config, text.meta)
        if row.hf == "lm_head.weight" and config.tie_word_embeddings:
            spec = replace(spec, repeats=text.hf + "model.embed_tokens.weight")
        specs.append(spec)
    self_index = cross_index = 0
    for layer in plan_layers(config):
        if layer.attention == "cross":
            meta = f"{text.meta}cross_attention_layers.{cross_index}."
            cross_index += 1
        else:
            meta = f"{text.meta}layers.{self_index}."
            self_index += 1
        specs += _layer_specs(config, layer, text.hf, meta)
    if config.vision is not None:
        specs += _vision_specs(config, config.vision)
    return tuple(specs)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a Hugging Face folder of this model stores."""
    return {spec.name: spec.shape for spec in tensor_specs(config) if spec.repeats is None}


def expected_meta_tensors(config: ModelConfig, num_shards: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in one of Meta's `num_shards` files, as published."""
    return {
        part.name: part.stored_shape(num_shards)
        for spec in tensor_specs(config)
        for part in (spec.ways[0] if spec.ways else ())
    }


def expected_gguf_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a GGUF file of this model; {} for the image models."""
    return {
        spec.gguf: spec.shape
        for spec in tensor_specs(config)
        if spec.gguf is not None and spec.repeats is None
    }


def embedding_axis(config: ModelConfig) -> int:
    """The axis on which Meta's code splits the input table: 1 up to Llama 2, 0 since Llama 3.

    Llama 3 is the first with more than 100,000 words and with a theta of 500,000. Where weights
    are at hand, their shapes decide instead.
    Source: llama llama/model.py ParallelEmbedding; llama-models llama3 VocabParallelEmbedding.
    """
    return 0 if config.vocab_size > 100_000 or config.rope.theta == 500000.0 else 1


def canonical_name(name: str, config: ModelConfig) -> str:
    """`name` as Hugging Face's hub files spell it.

    Some saves carry the names of transformers 5's modules (`model.language_model.layers...`), or
    lack the prefix that the whole image model has.
    """
    prefix = _text_prefixes(config).hf
    if prefix:
        for old, new in (
            ("model.language_model.", "language_model.model."),
            ("lm_head.", prefix + "lm_head."),
        ):
            if name.startswith(old):
                return new + name.removeprefix(old)
        for old in ("model.vision_model.", "model.multi_modal_projector."):
            if name.startswith(old):
                return name.removeprefix("model.")
        return name
    for old in ("model.language_model.", "language_model.model."):
        if name.startswith(old):
            return "model." + name.removeprefix(old)
    return name.removeprefix("language_model.")


_DROPPED = (
    (r"(text_model\.)?rope\.freqs", "RoPE frequencies, which follow from the configuration"),
    (r"freqs_cis|freq_cis", "RoPE frequencies, which follow from the configuration"),
    (r".*rotary_emb\.inv_freq", "RoPE frequencies, which follow from the configuration"),
    (r"rope_freqs\.weight", "divisors of the RoPE scaling, which the configuration names"),
    (r".*\._extra_state", "state of the training code"),
    (r".*(expert_activation_DE|(global|running)_gate_stats_3E)", "statistics of the training"),
    (r".*vision_adapter\.fc\.weight", "a layer that Meta's code does not use"),
)
_DROP_PATTERNS = tuple((re.compile(pattern), reason) for pattern, reason in _DROPPED)


def drop_reason(name: str) -> str | None:
    """Why a tensor of this name is left behind by every conversion; None: it is not."""
    for pattern, reason in _DROP_PATTERNS:
        if pattern.fullmatch(name):
            return reason
    return None


_ODD_NAMES = (
    (r"lora_[AB]|lora_(down|up)|base_model\.model\.", "an adapter (LoRA)", "merge it first"),
    (r"\.adaptor\.[AB]", "a QLoRA adaptor", "take the unquantised release"),
    (r"\.(qweight|qzeros|g_idx)$", "a GPTQ or AWQ weight", "take the unquantised release"),
    (r"\.(absmax|quant_map|quant_state.*|SCB)$", "bitsandbytes", "take the unquantised release"),
    (r"\.(weight_scale|input_scale|weight_scale_inv)$", "fp8 scales", "take the bfloat16 release"),
    (r"\.(scales|zeros)$", "int4 scales", "take the unquantised release"),
)


def odd_name(names: Iterable[str]) -> tuple[str, str, str] | None:
    """The first name that tells of an adapter or a quantised release, what it is, what to do."""
    patterns = [(re.compile(pattern), what, hint) for pattern, what, hint in _ODD_NAMES]
    for name in names:
        for pattern, what, hint in patterns:
            if pattern.search(name):
                return name, what, hint
    return None


def tile_cells(
    ratios: tuple[tuple[int, int], ...], max_num_tiles: int
) -> dict[tuple[int, int], tuple[int, int]]:
    """Cell (row, column) of Meta's tile table for each filled (id, slot) of Hugging Face's.

    Row `id` of the table by aspect ratio belongs to the ratio at index id - 1 (row 0 is padding)
    and holds the cells of its height x width tiles in reading order; other slots are zero.

    Example: ratios (1, 1), (1, 2) -> {(1, 0): (0, 0), (2, 0): (0, 0), (2, 1): (0, 1)}.
    """
    return {
        (number, slot): divmod(slot, width)
        for number, (height, width) in enumerate(ratios, start=1)
        for slot in range(min(height * width, max_num_tiles))
    }


class _Prefixes(NamedTuple):
    hf: str
    meta: str


def _text_prefixes(config: ModelConfig) -> _Prefixes:
    if config.model_type == "mllama":
        return _Prefixes("language_model.", "text_model.")
    if config.model_type == "mllama_text_model":
        return _Prefixes("", "text_model.")
    if config.model_type == "llama4":
        return _Prefixes("language_model." if config.vision is not None else "", "")
    return _Prefixes("", "")


def _has_gguf(config: ModelConfig) -> bool:
    return config.vision is None and not config.model_type.startswith(("llama4", "mllama"))


def _text_sizes(config: ModelConfig) -> dict[str, int]:
    return {"V": config.vocab_size, "D": config.hidden_size, "1": 1}


def _layer_specs(
    config: ModelConfig, layer: LayerSpec, hf_prefix: str, meta_prefix: str
) -> list[TensorSpec]:
    llama4 = config.model_type.startswith("llama4")
    rows: tuple[_Row, ...]
    if layer.attention == "cross":
        rows = (*_CROSS_ATTENTION, *_MLP)
    elif not llama4:
        rows = (*_SELF_ATTENTION, *_MLP)
    else:
        rows = (*_LLAMA4_ATTENTION, *(_LLAMA4_MOE if layer.moe else _LLAMA4_DENSE))
    features = {
        "qkv_bias": layer.attention_bias,
        "o_bias": layer.attention_output_bias,
        "mlp_bias": layer.mlp_bias,
        "qk_norm": layer.qk_norm == "weighted",
    }
    sizes = _text_sizes(config) | {
        "Q": layer.num_attention_heads * layer.head_dim,
        "K": layer.num_key_value_heads * layer.head_dim,
        "E": layer.head_dim,
        "F": layer.intermediate_size,
        "X": layer.moe.num_experts if layer.moe else 0,
        "q": layer.num_attention_heads,
        "k": layer.num_key_value_heads,
    }
    hf = f"{hf_prefix}model.layers.{layer.index}."
    gguf = f"blk.{layer.index}." if _has_gguf(config) else None
    chosen = [row for row in rows if not row.when or features[row.when]]
    return [_spec(group, sizes, hf, meta_prefix, gguf) for group in _grouped(chosen)]


def _vision_specs(config: ModelConfig, vision: VisionConfig) -> list[TensorSpec]:
    sizes = {
        "W": vision.hidden_size,
        "I": vision.intermediate_size,
        "C": vision.num_channels,
        "p": vision.patch_size,
        "P": vision.num_channels * vision.patch_size**2,
        "N": vision.num_patches,
        "O": vision.output_size,
        "D": config.hidden_size,
        "T": vision.max_num_tiles,
        "A": len(vision.supported_aspect_ratios) + 1,
        "1": 1,
    }
    if vision.kind == "mllama":
        hf, meta = "vision_model.", "vision_model.vision_encoder."
        specs = [_tower_spec(row, sizes, hf, meta, vision) for row in _MLLAMA_TOWER]
        specs += _blocks(hf + "transformer.layers.", meta, sizes, vision.num_hidden_layers)
        specs += _blocks(
            hf + "global_transformer.layers.",
            meta,
            sizes,
            vision.num_global_layers,
            tower="global_transformer",
            features={"gated"},
        )
        return specs + [_spec((row,), sizes, "", "vision_model.") for row in _MLLAMA_PROJECTOR]
    hf, meta = "vision_model.", "vision_embeddings.vision_encoder."
    specs = [_spec((row,), sizes, hf, meta) for row in _LLAMA4_TOWER]
    specs += _blocks(
        hf + "model.layers.", meta, sizes, vision.num_hidden_layers, features={"tower_bias"}
    )
    # The pixel shuffle stacks the patches of a square of 1 / ratio patches.
    sizes["M"] = int(vision.hidden_size / vision.pixel_shuffle_ratio**2)
    sizes |= {"R": vision.projector_input_size, "J": vision.projector_output_size}
    adapter = "vision_embeddings.vision_adapter.mlp."
    specs += [_spec((row,), sizes, "", adapter) for row in _LLAMA4_PROJECTOR]
    projector = _Row("multi_modal_projector.linear_1.weight", "vision_projection.weight", "D O", 0)
    return [*specs, _spec((projector,), sizes, "", "")]


def _blocks(
    hf: str,
    meta: str,
    sizes: Mapping[str, int],
    num_layers: int,
    *,
    tower: str = "transformer",
    features: frozenset[str] | set[str] = frozenset(),
) -> list[TensorSpec]:
    rows = [row for row in _TOWER_BLOCK if not row.when or row.when in features]
    return [
        _spec((row,), sizes, f"{hf}{index}.", f"{meta}{tower}.resblocks.{index}.")
        for index in range(num_layers)
        for row in rows
    ]


def _tower_spec(
    row: _Row, sizes: Mapping[str, int], hf: str, meta: str, vision: VisionConfig
) -> TensorSpec:
    spec = _spec((row,), sizes, hf, meta)
    if spec.operation != "tiles":
        return spec
    return replace(spec, aspect_ratios=vision.supported_aspect_ratios)


def _grouped(rows: Iterable[_Row]) -> list[tuple[_Row, ...]]:
    """Rows of the same Hugging Face tensor together."""
    groups: dict[str, tuple[_Row, ...]] = {}
    for row in rows:
        groups[row.hf] = (*groups.get(row.hf, ()), row)
    return list(groups.values())


def _spec(
    rows: tuple[_Row, ...],
    sizes: Mapping[str, int],
    hf: str,
    meta: str,
    gguf: str | None = None,
) -> TensorSpec:
    first = rows[0]
    operation, _, heads = first.op.partition(" ")
    shape = _shape(first.hf_shape or first.shape, sizes)
    if operation == "transpose":
        shape = shape[::-1]
    ways = []
    if first.meta is not None:
        ways.append(tuple(_part(row, sizes, meta) for row in rows))
        if first.other:
            ways.append(tuple(_part(row.other[0], sizes, meta) for row in rows))
    return TensorSpec(
        name=hf + first.hf,
        shape=shape,
        operation=_OPERATIONS[operation],
        ways=tuple(ways),
        gguf=gguf + first.gguf if gguf is not None and first.gguf else None,
        join_axis=first.join,
        num_heads=sizes[heads] if heads else 0,
    )


def _part(row: _Row, sizes: Mapping[str, int], prefix: str) -> Part:
    assert row.meta is not None
    return Part(
        name=prefix + row.meta,
        shape=_shape(row.shape, sizes),
        axis=row.axis,
        num_rows_before=sum(sizes[letter] for letter in row.before),
        num_rows_total=sum(sizes[letter] for letter in row.total) if row.total else None,
        flat=row.flat,
    )


def _shape(letters: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes of `A TNW`: one number per word, the product of its letters; `2` doubles."""
    return tuple(
        math.prod(2 if letter == "2" else sizes[letter] for letter in word)
        for word in letters.split()
    )


def _with_learnable_rows(spec: TensorSpec, config: ModelConfig, meta: str) -> TensorSpec:
    """The input table of the vision model: below the vocabulary, rows for its image tokens."""
    extra = config.embedding_rows - config.vocab_size
    rows = Part(meta + "learnable_embedding.weight", (extra, config.hidden_size), 0)
    return replace(
        spec,
        shape=(config.embedding_rows, config.hidden_size),
        ways=tuple((*way, rows) for way in spec.ways),
    )
