"""Cross-attention of text to images: a layer between two layers of a language model.

The text model's own layers are those of the model without images. Between them stand layers in
which text asks and the image answers: keys and values are made of the image's features, once, and
kept. What they add is scaled by the tanh of a learned gate, which begins at zero.

A token sees the last image before it (or at it), and those directly before that one. So what it
sees is always one stretch of the kept keys: a slice, never a mask. Tokens before the first image
see none, and for them the layer is as if it were not there: attention and feed-forward are both
multiplied by zero.

Letters: B batch, T query tokens, N new tokens, S image tokens, D hidden_size, H query heads,
K key/value heads, E head_dim.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from llamatool.config.layers import LayerSpec
from llamatool.model.attention import attend_all
from llamatool.model.cache import CrossLayerCache, SeenImage
from llamatool.model.linear import Linear
from llamatool.model.mlp import SwiGLU
from llamatool.model.norm import RMSNorm


class CrossBlock(nn.Module):
    """x + tanh(gate) attention(norm(x)), then that + tanh(gate) feed-forward(norm(that))."""

    def __init__(self, spec: LayerSpec, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.cross_attn = CrossAttention(spec, hidden_size, eps)
        self.cross_attn_attn_gate = nn.Parameter(torch.empty(1))
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp = SwiGLU(hidden_size, spec.intermediate_size, spec.mlp_bias)
        self.cross_attn_mlp_gate = nn.Parameter(torch.empty(1))

    def forward(
        self,
        x_BND: Tensor,
        cache: CrossLayerCache,
        images: Sequence[SeenImage],
        start: int,
        num_queries: int,
    ) -> Tensor:
        """The layer's output for the last `num_queries` of the tokens, [B, num_queries, D].

        Args: start: position of the first token.
        """
        x_BTD = x_BND[:, x_BND.shape[1] - num_queries :]
        first = start + x_BND.shape[1] - num_queries
        parts = []
        for begin, end, keys in stretches(images, first, first + num_queries):
            part_BTD = x_BTD[:, begin - first : end - first]
            parts.append(part_BTD if keys is None else self._look(part_BTD, cache, keys))
        return parts[0] if len(parts) == 1 else torch.cat([x_BTD[:, :0], *parts], dim=1)

    def _look(self, x_BTD: Tensor, cache: CrossLayerCache, keys: slice) -> Tensor:
        read_BTD = self.cross_attn(self.input_layernorm(x_BTD), cache, keys)
        x_BTD = x_BTD + self.cross_attn_attn_gate.tanh() * read_BTD
        fed_BTD: Tensor = self.mlp(self.post_attention_layernorm(x_BTD))
        return x_BTD + self.cross_attn_mlp_gate.tanh() * fed_BTD


class CrossAttention(nn.Module):
    """Queries of text, keys and values of images; norms with weights, no rotation."""

    def __init__(self, spec: LayerSpec, hidden_size: int, eps: float) -> None:
        super().__init__()
        heads, kv_heads, head_dim = (
            spec.num_attention_heads,
            spec.num_key_value_heads,
            spec.head_dim,
        )
        self.head_dim = head_dim
        self.q_proj = Linear(hidden_size, heads * head_dim, bias=False)
        self.k_proj = Linear(hidden_size, kv_heads * head_dim, bias=False)
        self.v_proj = Linear(hidden_size, kv_heads * head_dim, bias=False)
        self.o_proj = Linear(heads * head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(head_dim, eps)
        self.k_norm = RMSNorm(head_dim, eps)

    def forward(self, x_BTD: Tensor, cache: CrossLayerCache, keys: slice) -> Tensor:
        """What the tokens read from the image tokens `keys` of the cache, [B, T, D]."""
        q_BHTE = self.q_norm(self._heads(self.q_proj(x_BTD)))
        k_BKSE, v_BKSE = cache.k_BKSE[:, :, keys], cache.v_BKSE[:, :, keys]
        out_BHTE = attend_all(q_BHTE, k_BKSE, v_BKSE)
        out_BTD: Tensor = self.o_proj(out_BHTE.transpose(1, 2).flatten(2))
        return out_BTD

    def keys_and_values(self, image_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of an image, to be kept: [B, K, S, E] each."""
        k_BKSE = self.k_norm(self._heads(self.k_proj(image_BSD)))
        return k_BKSE, self._heads(self.v_proj(image_BSD))

    def _heads(self, x_BTW: Tensor) -> Tensor:
        # -1 and not H: a rank of a tensor-parallel group holds only some of the heads.
        return x_BTW.view(*x_BTW.shape[:-1], -1, self.head_dim).transpose(1, 2)


def stretches(
    images: Sequence[SeenImage], start: int, stop: int
) -> Iterator[tuple[int, int, slice | None]]:
    """Positions `start` to `stop` in stretches that see the same images, and which keys they see.

    Example: images at 4 and 9 of 10 tokens each, positions 0 to 12 -> (0, 4, None),
    (4, 9, 0:10), (9, 12, 10:20); at 4 and 5, from 5 on -> 0:20.
    Source: create_vision_mask in llama-models llama3/chat_format.py.
    """
    borders = [start, *(i.position for i in images if start < i.position < stop), stop]
    for begin, end in pairwise(borders):
        if begin < end:
            yield begin, end, _keys(images, begin)


def _keys(images: Sequence[SeenImage], position: int) -> slice | None:
    seen = [image for image in images if image.position <= position]
    if not seen:
        return None
    first = seen[-1]
    for image in reversed(seen[:-1]):
        if image.position != first.position - 1:
            break
        first = image
    return slice(first.first_key, seen[-1].stop_key)
