"""What a configuration says, in one form for every source and every generation.

The field names are config.json's. `huggingface.py`, `meta.py` and `gguf.py` build these values;
`layers.py` derives from them what each layer is. Nothing here knows which Llama it is.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from llamatool.records import record

Origin = Literal["file", "default", "derived"]

MAX_SIZE = 2**31 - 1  # the largest size of anything we accept
MAX_LAYERS = 4096


@record
class Note:
    """A trap found in a configuration or checkpoint: a stable code and a sentence."""

    code: str
    message: str


@record
class RopeConfig:
    """Rotary position embedding: its base frequency and how it is scaled.

    `factor` and the fields after it have a meaning only for some types (config/rope.py).
    """

    theta: float
    type: str = "default"  # default, linear, dynamic, yarn, longrope or llama3
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    interleaved: bool = False  # pairs (2i, 2i+1) as in Llama 4, else (i, i + head_dim/2)


@record
class MoeConfig:
    """Mixture of experts: which layers have one, and its shape."""

    num_local_experts: int
    num_experts_per_tok: int
    moe_layers: tuple[int, ...]  # zero-based indices of the layers with experts


@record
class TemperatureConfig:
    """Attention temperature of the layers without RoPE: q is scaled by a slow log of position."""

    floor_scale: float  # positions per step
    attn_scale: float


@record
class VisionConfig:
    """An image tower. `kind` says which of the two architectures the fields describe."""

    kind: Literal["mllama", "llama4"]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    image_size: int  # pixels along one side of a tile
    patch_size: int
    num_channels: int
    output_size: int  # width of what the projector reads
    norm_eps: float
    max_num_tiles: int  # tiles of one image at most, the global tile not counted
    image_token_id: int  # the input id that stands for an image, or for a piece of one
    num_global_layers: int = 0  # mllama
    intermediate_layers_indices: tuple[int, ...] = ()  # mllama
    supported_aspect_ratios: tuple[tuple[int, int], ...] = ()  # mllama
    projector_input_size: int = 0  # llama4
    projector_output_size: int = 0  # llama4
    pixel_shuffle_ratio: float = 0.0  # llama4
    rope_theta: float = 0.0  # llama4

    @property
    def num_patches(self) -> int:
        """Positions of one tile, the class token included: 1601 at 560 px with patches of 14."""
        return (self.image_size // self.patch_size) ** 2 + 1

    @property
    def tokens_per_tile(self) -> int:
        """Tokens of text that a tile takes where its features stand among them (llama4).

        Its patches times the square of the shuffle ratio: 576 patches and 1/2 -> 144.
        """
        return int((self.num_patches - 1) * self.pixel_shuffle_ratio**2)


@record
class QuantizationConfig:
    """How the stored weights are packed; it never touches the parameter count or the KV cache."""

    method: str  # fp8, fbgemm_fp8, compressed-tensors, bitsandbytes, gptq, awq, ...
    bits: float | None  # bits per quantised weight, None where the scheme is not understood
    group_size: int | None  # weights that share a scale; None: one scale per output row
    modules_to_not_convert: tuple[str, ...] = ()
    zero_points: bool = False
    embedding_bits: float | None = None  # of both vocabulary tables; None: they stay as they are


@record
class ModelConfig:
    """A complete, consistent configuration of a decoder of the Llama kind."""

    model_type: str
    architectures: tuple[str, ...]
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # heads that hold a key/value pair (GQA)
    head_dim: int
    intermediate_size: int  # of the dense feed-forward; of one expert where `moe` is set
    vocab_size: int
    max_position_embeddings: int | None
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    rope: RopeConfig
    dtype: str | None  # of the stored weights
    embedding_rows: int  # rows of the input table: vocab_size, and 8 more in 3.2 Vision
    attention_bias: bool = False  # of q, k and v
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "unit", "weighted"] = "none"  # "unit" has no weight
    num_key_value_heads_per_layer: tuple[int, ...] | None = None
    sliding_window: int | None = None  # tokens; None where the model does not use it
    attention_chunk_size: int | None = None  # tokens
    layer_types: tuple[str, ...] | None = None
    no_rope_layers: tuple[int, ...] = ()  # zero-based indices of the layers without RoPE
    cross_attention_layers: tuple[int, ...] = ()
    temperature: TemperatureConfig | None = None
    moe: MoeConfig | None = None
    intermediate_size_mlp: int | None = None  # dense layers of a model that also has experts
    vision: VisionConfig | None = None
    quantization: QuantizationConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    transformers_version: str | None = None
    name_or_path: str | None = None
    source_format: Literal["huggingface", "meta", "gguf"] = "huggingface"
    origins: Mapping[str, Origin] = field(default_factory=dict)  # where each value comes from
    present_keys: frozenset[str] = frozenset()  # keys that the file itself has
    notes: tuple[Note, ...] = ()
