"""How many bytes the keys and values of a sequence take, read from the layer plan.

Full layers grow with every token. Chunked layers (Llama 4) and sliding ones are capped, and how
many bytes they really take depends on the engine: the four policies below. Cross-attention
layers (Llama 3.2 Vision) hold a fixed amount for each image and nothing for text.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from llamatool.config.layers import AttentionKind, LayerSpec
from llamatool.config.model import ModelConfig, VisionConfig
from llamatool.dtypes import DType, by_name
from llamatool.errors import UsageError
from llamatool.records import record

Policy = Literal["capped", "live_chunk_only", "no_eviction", "vllm_hybrid"]

DEFAULT_MAX_BATCHED_TOKENS = 8192  # tokens of one prefill step

POLICIES: dict[Policy, str] = {
    "capped": "at most the window in a local layer",
    "live_chunk_only": "drops finished chunks at once",
    "no_eviction": "every token in every layer",
    "vllm_hybrid": "window + max batched tokens",
}

KV_DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "fp8",
    "int8",
    "q8_0",
    "q5_1",
    "q5_0",
    "q4_1",
    "q4_0",
    "iq4_nl",
)


@record
class KvGroup:
    """The layers of a model that hold keys and values of text in the same way."""

    attention: AttentionKind
    window: int | None  # tokens that a chunked or sliding layer can see
    num_layers: int
    bytes_per_token: int  # of all these layers together


@record
class KvCache:
    """A model's cache in one element type: its size as a function of tokens."""

    groups: tuple[KvGroup, ...]
    bytes_per_image: int  # of the cross-attention layers, 0 where there are none

    @property
    def growing_bytes_per_token(self) -> int:
        """Bytes that each further token adds for ever: those of the full layers.

        Example: Llama 3.1 8B -> 131072; Llama 4 Scout -> 49152.
        """
        return sum(group.bytes_per_token for group in self.groups if group.window is None)

    @property
    def in_window_bytes_per_token(self) -> int:
        """Bytes that a token adds while it is inside every window: those of all layers.

        Example: Llama 3.1 8B -> 131072; Llama 4 Scout -> 196608.
        """
        return sum(group.bytes_per_token for group in self.groups)

    def num_bytes(
        self,
        num_tokens: int,
        *,
        batch_size: int = 1,
        num_images: int = 0,
        policy: Policy = "capped",
        max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
        page_tokens: int = 1,
    ) -> int:
        """Bytes of `batch_size` sequences of `num_tokens` tokens and `num_images` images each.

        batch_size x (sum over groups of bytes_per_token x tokens held + images x bytes_per_image)

        Args: page_tokens: tokens of one page; a started page counts whole.
        Example: Llama 4 Scout, 100000 tokens, bfloat16 -> 6123159552.
        """
        text = sum(
            group.bytes_per_token
            * held_tokens(group, num_tokens, policy, max_batched_tokens, page_tokens)
            for group in self.groups
        )
        return batch_size * (text + num_images * self.bytes_per_image)


def kv_cache(
    layers: Sequence[LayerSpec], *, dtype: str = "bfloat16", vision: VisionConfig | None = None
) -> KvCache:
    """The cache of a layer plan.

    Per layer and token: 2 x num_key_value_heads x bytes of head_dim elements.
    Per image: the same bytes x cross-attention layers x tiles x positions of one tile.

    Args: dtype: of the cache, not of the weights. vision: needed for the bytes of an image.
    Raises: UsageError if the element type is unknown.
    Example: Llama 3.1 8B -> 131072 bytes per token (2 x 32 layers x 8 heads x 128 x 2 bytes).
    Source: transformers cache_utils.py and modeling_mllama.py; llama.cpp llama-kv-cache.cpp for
    block formats, which are laid along one head.
    """
    element = kv_dtype(dtype)
    groups: dict[tuple[AttentionKind, int | None], tuple[int, int]] = {}
    image_bytes_per_position = 0
    for layer in layers:
        per_token = layer_bytes_per_token(layer, element)
        if layer.attention == "cross":
            image_bytes_per_position += per_token
            continue
        key = (layer.attention, layer.window)
        count, total = groups.get(key, (0, 0))
        groups[key] = (count + 1, total + per_token)
    return KvCache(
        groups=tuple(
            KvGroup(attention, window, count, total)
            for (attention, window), (count, total) in groups.items()
        ),
        bytes_per_image=image_bytes_per_position * image_positions(vision),
    )


def kv_bytes(
    layers: Sequence[LayerSpec], num_tokens: int, *, batch_size: int = 1, dtype: str = "bfloat16"
) -> int:
    """Bytes of KV cache that `num_tokens` tokens occupy, windows respected.

    Per layer: 2 x min(num_tokens, window) x num_key_value_heads x head_dim x element bytes
    x batch_size; a full layer has no window.

    Args: dtype: of the cache, not of the weights.
    Raises: UsageError if the element type is unknown.
    Example: Llama 3.1 8B, 131072 tokens, bfloat16 -> 17179869184 (16 GiB).
    Source: transformers modeling_llama4.py (attention_chunk_size); Llama 4 config.json.
    """
    return kv_cache(layers, dtype=dtype).num_bytes(num_tokens, batch_size=batch_size)


def layer_bytes_per_token(layer: LayerSpec, dtype: DType) -> int:
    """Bytes that one token leaves in one layer: keys and values of every KV head.

    Example: 8 heads of 128 in bfloat16 -> 4096; in q8_0 -> 2176; in q4_0 -> 1152.
    """
    return 2 * layer.num_key_value_heads * dtype.num_bytes(layer.head_dim)


def held_tokens(
    group: KvGroup, num_tokens: int, policy: Policy, max_batched_tokens: int, page_tokens: int = 1
) -> int:
    """Tokens that one layer of `group` holds once `num_tokens` are cached, whole pages counted.

    Example: a chunk of 8192 at 100000 tokens -> capped 8192, live chunk 1696, no eviction 100000,
    vLLM hybrid 16384.
    Source: vllm/v1/kv_cache_interface.py (ChunkedLocalAttentionSpec, SlidingWindowSpec).
    """
    if group.window is None or policy == "no_eviction":
        return _whole_pages(num_tokens, page_tokens)
    if policy == "vllm_hybrid":
        return _vllm_tokens(group, group.window, num_tokens, max_batched_tokens, page_tokens)
    if policy == "live_chunk_only" and group.attention == "chunked":
        return _whole_pages(num_tokens % group.window, page_tokens)
    return _whole_pages(min(num_tokens, group.window), page_tokens)


def image_positions(vision: VisionConfig | None) -> int:
    """Positions that one image puts into each cross-attention layer: tiles x positions of a tile.

    Example: Llama 3.2 11B Vision at 560 px -> 6404 (4 x 1601); at 448 px -> 4100 (4 x 1025).
    Source: transformers modeling_mllama.py; ollama PR #7456 confirms the geometry.
    """
    if vision is None or vision.kind != "mllama":
        return 0
    return vision.max_num_tiles * vision.num_patches


def image_tokens(vision: VisionConfig) -> tuple[int, int]:
    """Fewest and most tokens of text that one image takes.

    With cross-attention an image is one token. Else it is tokens_per_tile of each tile, a mark
    after each tile but the global one, which stands beside several tiles, and three marks around.

    Example: Llama 3.2 Vision -> (1, 1); Llama 4 -> (147, 2467): 144 + 3, 17 x 144 + 16 + 3.
    Source: transformers processing_llama4.py.
    """
    if vision.kind == "mllama":
        return 1, 1
    each, tiles = vision.tokens_per_tile, vision.max_num_tiles
    return each + 3, (tiles + 1) * each + tiles + 3


def kv_dtype(name: str) -> DType:
    """The element type of a cache.

    Raises: UsageError if it is unknown.
    """
    dtype = by_name(name)
    if dtype is None or dtype.name in ("bool", "complex64"):
        raise UsageError(
            f"`{name}` is no element type of a KV cache", hint=f"known are {', '.join(KV_DTYPES)}"
        )
    return dtype


def with_kv_heads(config: ModelConfig, scheme: str) -> ModelConfig:
    """The same model with other KV heads: `mha` (one for each head), `gqa:N` or `mqa` (one).

    Raises: UsageError if the scheme is none of these, or N does not divide the heads.
    Example: Llama 2 70B as `mha` -> 64 KV heads and 2621440 bytes per token.
    """
    heads = config.num_attention_heads
    kind, _, number = scheme.lower().partition(":")
    if kind == "mha" and not number:
        num_key_value_heads = heads
    elif kind == "mqa" and not number:
        num_key_value_heads = 1
    elif kind == "gqa" and number.isascii() and number.isdigit() and len(number) < 10:
        num_key_value_heads = int(number)
    else:
        raise UsageError(f"`{scheme}` is no attention scheme", hint="say mha, gqa:8 or mqa")
    if num_key_value_heads < 1 or heads % num_key_value_heads:
        raise UsageError(f"{num_key_value_heads} KV heads do not divide {heads} attention heads")
    return replace(
        config, num_key_value_heads=num_key_value_heads, num_key_value_heads_per_layer=None
    )


def _vllm_tokens(
    group: KvGroup, window: int, num_tokens: int, max_batched_tokens: int, page_tokens: int
) -> int:
    if group.attention == "chunked":
        return _whole_pages(min(window + max_batched_tokens, num_tokens), page_tokens)
    tokens = _whole_pages(min(window - 1 + max_batched_tokens, num_tokens), page_tokens)
    # A sliding window need not begin where a page begins, so one more page is charged.
    return tokens + page_tokens if page_tokens > 1 else tokens


def _whole_pages(num_tokens: int, page_tokens: int) -> int:
    return -(-num_tokens // page_tokens) * page_tokens
