"""One decoding step of fixed shape, for CUDA graphs: the position is a tensor, not a number.

A graph replays the same kernels on the same memory, so nothing may depend on a number that the
host knows: keys and values go to a slot by index, and what is not to be seen is masked. The one
thing that changes is how much of the cache is looked at: a power of two of slots, so that a short
context does not read a long, empty cache and a run needs few graphs.

Letters: B batch, D hidden_size, V vocab_size, H query heads, K key/value heads, G = H / K,
S slots in sight, E head_dim, P = E / 2, X experts, k experts per token.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamatool.config.layers import LayerSpec
from llamatool.config.rope import attention_factor
from llamatool.errors import UnsupportedError
from llamatool.model.cache import ChunkLayerCache, KVCache
from llamatool.model.decoder import Block, Decoder
from llamatool.model.fast import FusedAttention
from llamatool.model.moe import MixtureOfExperts
from llamatool.model.norm import rms_norm
from llamatool.model.rope import Rotation

LEAST_SLOTS = 256  # fewer are not worth a graph of their own


class StaticStep:
    """Reads one token of each row in a model that `speed_up` has been through, on one cache."""

    def __init__(self, model: Decoder, cache: KVCache, *, backend: str | None = None) -> None:
        """A step for `model` and `cache`; other caches are refused.

        Args: backend: of torch.compile; None runs the same code without compiling it, and `auto`
        takes inductor, with CUDA graphs on a GPU.
        Raises: UnsupportedError for a model with parts that `speed_up` left alone.
        """
        self.model = model
        self.cache = cache
        self.network = _Network(model, cache)
        self._forward = self.network.forward
        if backend is not None:
            on_gpu = model.device.type == "cuda"
            # Each number of slots is a shape of its own: not one shape that varies.
            self._forward = torch.compile(
                self.network.forward,
                fullgraph=True,
                dynamic=False,
                backend="inductor" if backend == "auto" else backend,
                mode="reduce-overhead" if backend == "auto" and on_gpu else None,
            )

    @torch.no_grad()
    def __call__(self, token_B: Tensor, cache: KVCache) -> Tensor:
        """Logits in fp32, [B, V], after `token_B`, whose keys and values go into the cache."""
        if cache is not self.cache:
            raise ValueError("the step was made for another cache")
        position = cache.length
        cache.require_room(len(token_B), 1)
        cache.rope_length = max(cache.rope_length, position + 1)
        self.network.look_at(position, cache.rope_length)
        logits_BV: Tensor = self._forward(token_B, _slots(position, cache.max_tokens))
        for layer in cache.layers.values():
            if isinstance(layer, ChunkLayerCache):
                layer.current = position // layer.chunk
        cache.advance(1)
        # Out of the graph's memory, which the next step writes over.
        return logits_BV.clone()


class _Layer(NamedTuple):
    """What a layer is, without asking its modules."""

    number: int
    spec: LayerSpec
    block: Block
    attention: FusedAttention


class _Network(nn.Module):
    """The computation of a step. Keys, values and position are buffers: their place is fixed."""

    position: Tensor
    frequencies: Tensor

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        super().__init__()
        if model.has_tower and model.has_cross_layers:
            raise UnsupportedError("a model with cross-attention to images is not compiled")
        if model.ranks is not None:
            raise UnsupportedError("a model that is split over ranks is not compiled")
        if len(model.devices) > 1:
            names = ", ".join(map(str, model.devices))
            raise UnsupportedError(
                f"a model that lies on several devices ({names}) is not compiled"
            )
        self.model = model
        self.scale = attention_factor(
            model.config.rope, max_position_embeddings=model.config.max_position_embeddings
        )
        self.plan: list[_Layer] = []
        for spec in model.plan:
            if spec.attention == "cross":
                continue
            block = model.layers[str(spec.index)]
            assert isinstance(block, Block)
            attention: nn.Module = block.self_attn
            if not isinstance(attention, FusedAttention):
                raise UnsupportedError("a model with hooks on its layers is not compiled")
            self.plan.append(_Layer(spec.index, spec, block, attention))
            layer = cache.layers[spec.index]
            self.register_buffer(f"k{spec.index}", layer.k_BKSE)
            self.register_buffer(f"v{spec.index}", layer.v_BKSE)
        self.register_buffer("position", torch.zeros(1, dtype=torch.long, device=model.device))
        frequencies = model.rope._inverse_frequencies(1, model.device)
        self.register_buffer("frequencies", frequencies.clone())

    def look_at(self, position: int, length: int) -> None:
        """Sets where the next token stands, outside of the graph."""
        self.position.fill_(position)
        if self.model.rope.depends_on_length:
            self.frequencies.copy_(self.model.rope._inverse_frequencies(length, self.model.device))

    def forward(self, token_B: Tensor, slots: int) -> Tensor:
        """Logits in fp32, [B, V]; `slots` of the cache are looked at in full layers."""
        x_BD = F.embedding(token_B, self.model.embed_tokens.weight)
        rotation = self._rotation(x_BD.dtype)
        for layer in self.plan:
            block = layer.block
            eps = block.input_layernorm.eps
            h_BD = rms_norm(x_BD, block.input_layernorm.weight, eps)
            x_BD = x_BD + self._attend(h_BD, layer, rotation, slots)
            h_BD = rms_norm(x_BD, block.post_attention_layernorm.weight, eps)
            mlp: nn.Module = block.mlp
            fed_BD = _routed(h_BD, mlp) if isinstance(mlp, MixtureOfExperts) else mlp(h_BD)
            x_BD = x_BD + fed_BD
        return self.model.logits(x_BD)

    def _rotation(self, dtype: torch.dtype) -> Rotation:
        angles_1P = self.position.float()[:, None] * self.frequencies
        cos_1P, sin_1P = angles_1P.cos() * self.scale, angles_1P.sin() * self.scale
        if not self.model.rope.rope.interleaved:
            cos_1P, sin_1P = cos_1P.to(dtype), sin_1P.to(dtype)
        return Rotation(cos_1P, sin_1P, self.model.rope.rope.interleaved)

    def _attend(self, h_BD: Tensor, layer: _Layer, rotation: Rotation, slots: int) -> Tensor:
        attention, spec = layer.attention, layer.spec
        H, K, E = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
        heads_BA1E = attention.qkv_proj(h_BD).view(len(h_BD), -1, 1, E)
        q_BH1E, k_BK1E, v_BK1E = attention._placed(heads_BA1E, rotation)
        if spec.temperature is not None:
            steps_1 = torch.floor((self.position.float() + 1) / spec.temperature.floor_scale)
            scale_1 = torch.log1p(steps_1) * spec.temperature.attn_scale + 1.0
            q_BH1E = (q_BH1E * scale_1).to(q_BH1E.dtype)
        k_BKSE, v_BKSE = getattr(self, f"k{layer.number}"), getattr(self, f"v{layer.number}")
        size = k_BKSE.shape[2]
        window = spec.window
        slot_1 = self.position if window is None else self.position % window
        k_BKSE.index_copy_(2, slot_1, k_BK1E.to(k_BKSE.dtype))
        v_BKSE.index_copy_(2, slot_1, v_BK1E.to(v_BKSE.dtype))
        seen = min(slots, size)
        # A ring of the last tokens is filled up to the position, then wholly; a ring of one chunk
        # is filled up to the slot.
        last_1 = slot_1 if spec.attention == "chunked" else self.position
        mask_S = torch.arange(seen, device=h_BD.device) <= last_1
        out_BKGE = F.scaled_dot_product_attention(
            q_BH1E.reshape(len(h_BD), K, H // K, E),
            k_BKSE[:, :, :seen],
            v_BKSE[:, :, :seen],
            attn_mask=mask_S[None, None, None],
        )
        out_BD: Tensor = attention.o_proj(out_BKGE.reshape(len(h_BD), H * E))
        return out_BD


def _routed(x_BD: Tensor, moe: MixtureOfExperts) -> Tensor:
    """The mixture of experts without asking which experts are meant: their weights are gathered.

    For a few rows only: each brings its own copy of an expert.
    """
    logits_Bk, experts_Bk = moe.router(x_BD).topk(moe.num_experts_per_tok, dim=-1)
    scores_Bk = torch.sigmoid(logits_Bk.float()).to(x_BD.dtype)
    shared_BD: Tensor = moe.shared_expert(x_BD)
    routed = []
    for choice in range(moe.num_experts_per_tok):
        expert_B = experts_Bk[:, choice]
        routed_B1D = (x_BD * scores_Bk[:, choice, None]).unsqueeze(1)
        gate_up_B1F = torch.bmm(routed_B1D, moe.experts.gate_up_proj[expert_B])
        gate_B1F, up_B1F = gate_up_B1F.chunk(2, dim=-1)
        down_B1D = torch.bmm(F.silu(gate_B1F) * up_B1F, moe.experts.down_proj[expert_B])
        routed.append(down_B1D.squeeze(1))
    return shared_BD + torch.stack(routed).sum(dim=0)


def _slots(position: int, max_tokens: int) -> int:
    """The smallest power of two above `position`, at least LEAST_SLOTS, at most all.

    Example: position 300 of 4096 -> 512.
    """
    return min(max(LEAST_SLOTS, 1 << position.bit_length()), max_tokens)
