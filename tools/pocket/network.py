"""The network of the pocket models, for training, and the weights it starts from.

The decoder of llamatool runs without gradients and with a cache; this one is its counterpart for
training. Its parameters have the names of Hugging Face's Llama, and RoPE turns the pairs
(i, i + head_dim / 2); `export.py` reorders the rows for the interleaved pairs of Llama 4.

Letters: B rows, T tokens, D hidden_size, H query heads, K key/value heads, E head_dim.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """What a pocket model is; the defaults are what both share."""

    vocab_size: int
    rope_theta: float
    chunk: int | None  # tokens; None: every layer is full
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 320
    rms_norm_eps: float = 1e-5
    floor_scale: int = 512  # of the attention temperature in the layer without RoPE
    attn_scale: float = 0.2
    rope_factor: float = 1.0  # llama3 scaling where it is above 1
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_original: int = 512

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def is_global(self, layer: int) -> bool:
        """Without RoPE and chunk: the last layer of the Llama 4 layout."""
        return self.chunk is not None and layer == self.num_layers - 1


def inverse_frequencies(shape: Shape) -> Tensor:
    """One per pair of dimensions; scaled by wavelength as Llama 3.1 does.

    The weights that ship depend on the rounding of these expressions: other ones train others.
    """
    exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    plain = shape.rope_theta**-exponents
    if shape.rope_factor == 1.0:
        return plain
    turns = shape.rope_original * plain / (2 * math.pi)  # within the original window
    blend = ((turns - shape.rope_low) / (shape.rope_high - shape.rope_low)).clamp(0, 1)
    return plain * (blend + (1 - blend) / shape.rope_factor)


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))
        self.eps = shape.rms_norm_eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, (x_BTD.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        width, kv_width = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        shape = self.shape
        B, T, _ = x_BTD.shape
        q = self.q_proj(x_BTD).view(B, T, -1, shape.head_dim).transpose(1, 2)
        k = self.k_proj(x_BTD).view(B, T, -1, shape.head_dim).transpose(1, 2)
        v = self.v_proj(x_BTD).view(B, T, -1, shape.head_dim).transpose(1, 2)
        if shape.is_global(self.layer):
            steps = torch.floor((torch.arange(T) + 1.0) / shape.floor_scale)
            q = q * (1 + shape.attn_scale * torch.log1p(steps))[:, None]
        else:
            q, k = _rotate(q, cos_TE, sin_TE), _rotate(k, cos_TE, sin_TE)
        group = shape.num_heads // shape.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        step = T if shape.chunk is None or shape.is_global(self.layer) else shape.chunk
        parts = [
            F.scaled_dot_product_attention(q_c, k_c, v_c, is_causal=True)
            for q_c, k_c, v_c in zip(
                q.split(step, 2), k.split(step, 2), v.split(step, 2), strict=True
            )
        ]
        return self.o_proj(torch.cat(parts, 2).transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Layer(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape)
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = Norm(shape)
        self.mlp = FeedForward(shape)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TE, sin_TE)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Network(nn.Module):
    """Embedding, layers, norm; the embedding is also the output table."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.num_layers))
        self.norm = Norm(shape)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits of all positions."""
        angles = torch.outer(torch.arange(ids_BT.shape[1]).float(), inverse_frequencies(self.shape))
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        x_BTD = self.embed_tokens(ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos, sin)
        return F.linear(self.norm(x_BTD), self.embed_tokens.weight)


def _rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    a, b = x_BHTE.chunk(2, -1)
    return x_BHTE * cos_TE + torch.cat([-b, a], -1) * sin_TE


@torch.no_grad()
def write_circuit(network: Network, seed: int) -> None:
    """Starting weights: a machine that continues an n-gram as it was continued before.

    The residual stream is halved. The lower half holds the embedding, with a constant in dim 0;
    the upper half holds one slot per head, empty at first.
      Layer 0: head j attends exactly j + 1 tokens back and writes a code of that token into slot j.
      Last layer: keys are the codes of the four tokens before a position, queries those of the
      current token and the three before it. So a position scores by how many of the tokens before
      it equal the latest ones; its own token is copied to the output.
    All other writes into the stream are zero. Training then refines every weight.
    """
    shape, draw = network.shape, torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draw)

    for name, weight in network.named_parameters():
        if weight.dim() == 2 and "layers" in name:
            quiet = name.endswith(("o_proj.weight", "down_proj.weight"))
            weight.copy_(normal(*weight.shape) * (0.0 if quiet else weight.shape[1] ** -0.5))
    half, heads, width = shape.hidden_size // 2, shape.num_heads, shape.head_dim
    slot = half // heads
    network.norm.weight.fill_(0.3)  # tied logits start small
    table = network.embed_tokens.weight
    table.zero_()
    table[:, 0] = 0.5 * half**0.5
    table[:, 1:half] = 0.5 * normal(shape.vocab_size, half - 1)
    code = torch.zeros(slot, shape.hidden_size)
    code[:, 1:half] = normal(slot, half - 1) / (half - 1) ** 0.5
    _write_look_back(network.layers[0].self_attn, shape, code, half, slot, normal)
    _write_match_and_copy(network.layers[-1].self_attn, shape, code, half, slot, normal)
    assert width * heads == shape.hidden_size


def _write_look_back(attention, shape, code, half, slot, normal) -> None:  # type: ignore[no-untyped-def]
    """Q k = sum over the four fastest pairs of w^2 cos((distance - offset) theta): a peak there."""
    width, sharpness = shape.head_dim, 8.0
    frequencies = inverse_frequencies(shape)
    w = torch.zeros(width // 2)
    w[:4] = torch.tensor([2.0, 1.0, 1.0, 1.0]).sqrt()
    # Both read the constant of dim 0 alone, plus a little noise to break ties.
    amplitude = (sharpness * width**0.5 / half) ** 0.5

    def constant(vector: Tensor) -> Tensor:
        weight = 0.02 * normal(width, shape.hidden_size) / shape.hidden_size**0.5
        weight[:, 0] += amplitude * vector
        return weight

    for head in range(shape.num_heads):
        offset = head + 1
        query = torch.cat(
            [w * torch.cos(offset * frequencies), -w * torch.sin(offset * frequencies)]
        )
        rows = slice(head * width, (head + 1) * width)
        attention.q_proj.weight[rows] = constant(query)
        first = half + head * slot
        attention.o_proj.weight[first : first + slot, head * width : head * width + slot] = (
            0.5 * torch.eye(slot)
        )
    for head in range(shape.num_key_value_heads):
        rows = slice(head * width, (head + 1) * width)
        attention.k_proj.weight[rows] = constant(torch.cat([w, torch.zeros(width // 2)]))
        attention.v_proj.weight[head * width : head * width + slot] = code


def _write_match_and_copy(attention, shape, code, half, slot, normal) -> None:  # type: ignore[no-untyped-def]
    width, heads = shape.head_dim, shape.num_heads
    group = heads // shape.num_key_value_heads
    part = width // heads
    slots = [
        torch.eye(shape.hidden_size)[half + slot * j : half + slot * (j + 1)] for j in range(heads)
    ]
    for head in range(shape.num_key_value_heads):
        mixes = [normal(part, slot) / slot**0.5 for _ in range(heads)]
        rows = slice(head * width, (head + 1) * width)
        keys = torch.cat([mix @ read for mix, read in zip(mixes, slots, strict=True)])
        attention.k_proj.weight[rows] = 3.0 * keys
        latest = [code, *slots[:-1]]
        queries = torch.cat([mix @ read for mix, read in zip(mixes, latest, strict=True)])
        copied = torch.zeros(width, shape.hidden_size)
        copied[:, 1:half] = normal(width, half - 1) / (half - 1) ** 0.5
        attention.v_proj.weight[rows] = copied
        for member in range(head * group, (head + 1) * group):
            columns = slice(member * width, (member + 1) * width)
            attention.q_proj.weight[columns] = 3.0 * queries
            attention.o_proj.weight[:, columns] = 4.0 * copied.T / group
