"""The same decoder, rearranged for speed: fewer and better-laid-out products.

`speed_up` replaces the linear layers of a loaded model in place, one at a time, so that memory
holds the weights once:

  q, k, v        one product instead of three
  gate, up       one instead of two
  on a CPU       weights in the blocked layout of oneDNN, which reads them at about twice the speed
                 of a row-major matrix (benchmarks/generate.py measures it)

`DecodeStep` then reads one token with as few operations as the arithmetic allows: for a small
model, calling operations takes as long as reading the weights. Neither changes what is computed;
sums are added up in another order.

Letters: B batch, N new tokens, D hidden_size, F intermediate_size, V vocab_size, H query heads,
K key/value heads, E head_dim, P = E / 2.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamatool.errors import UnsupportedError
from llamatool.model.attention import Attention, attend, scale_by_position
from llamatool.model.cache import KVCache, LayerCache
from llamatool.model.decoder import Block, Decoder, device_of
from llamatool.model.linear import Linear, summed
from llamatool.model.mlp import SwiGLU
from llamatool.model.norm import rms_norm
from llamatool.model.quantize import Int8Linear
from llamatool.model.ranks import Ranks
from llamatool.model.rope import Rotation, rotate

PACK_ROWS = 16  # rows of input that the blocked layout is chosen for; good for 1 to 2048


def speed_up(model: Decoder, *, pack: bool = True) -> None:
    """Fuses the products of `model` in place and, on a CPU, packs their weights.

    Args: pack: without it, weights stay matrices, which a compiler can look into.

    On a rank of several, its own parts are fused. Leaves alone what it does not know: experts,
    and layers that someone has hooks on. Calling it twice changes nothing.
    """
    for block in model.layers.values():
        if not isinstance(block, Block):  # cross-attention to images
            continue
        attention, mlp = block.self_attn, block.mlp
        if isinstance(attention, Attention):
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            if _are_plain((*parts, attention.o_proj)):
                block.self_attn = FusedAttention(attention, pack=pack)  # type: ignore[assignment]
        if type(mlp) is SwiGLU and _are_plain((mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
            block.mlp = FusedSwiGLU(mlp, pack=pack)
    if model.lm_head is None:
        table_VD = model.embed_tokens.weight[: model.config.vocab_size]
        if pack and can_pack(table_VD):  # a second copy of the table, for the logits alone
            model.lm_head = PackedLinear(table_VD)
    elif _are_plain((model.lm_head,)):
        model.lm_head = fused((model.lm_head,), pack=pack)


def extra_bytes(model: Decoder) -> int:
    """Bytes of memory that `speed_up` needs beyond the weights as they are now.

    A packed weight takes the place of the one it is made of, but not where that is a mapped file,
    which the system gives back by itself; so this counts every weight as new.
    """
    return sum(parameter.nbytes for parameter in model.parameters() if can_pack(parameter))


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a blocked layout for such weights here."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class PackedLinear(nn.Module):
    """A linear layer whose weight only oneDNN can read."""

    ranks: Ranks | None = None  # as in Linear

    def __init__(self, weight_FD: Tensor, bias_F: Tensor | None = None) -> None:
        super().__init__()
        self.weight_bytes = weight_FD.nbytes
        # Not a buffer: an opaque tensor has no storage that could be counted or saved.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_FD.detach(), PACK_ROWS)
        self.bias = None if bias_F is None else bias_F.detach()

    def forward(self, x_ND: Tensor) -> Tensor:
        """The product with the weight, plus bias."""
        bias_F = self.bias if self.ranks is None else None
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x_ND, self.packed, bias_F, "none", [], "")
        return out if self.ranks is None else summed(out, self.bias, self.ranks)


def fused(linears: Sequence[nn.Module], *, pack: bool = True) -> nn.Module:
    """One layer whose output is that of all `linears` side by side."""
    layer = _fused(linears, pack=pack)
    layer.ranks = linears[0].ranks  # of several, none is summed over ranks
    return layer


def _fused(linears: Sequence[nn.Module], *, pack: bool) -> nn.Module:
    biases = [layer.bias for layer in linears]
    bias_F = None if biases[0] is None else torch.cat(biases)  # type: ignore[arg-type]
    if all(isinstance(layer, Int8Linear) for layer in linears):
        return Int8Linear.joined(linears)  # type: ignore[arg-type]
    weight_FD = _joined([layer.weight for layer in linears])  # type: ignore[misc]
    if pack and can_pack(weight_FD):
        return PackedLinear(weight_FD, bias_F)
    rows, columns = weight_FD.shape
    with torch.device("meta"):
        layer = Linear(columns, rows, bias=bias_F is not None)
    layer.weight = nn.Parameter(weight_FD, requires_grad=False)
    if bias_F is not None:
        layer.bias = nn.Parameter(bias_F, requires_grad=False)
    return layer


class FusedAttention(nn.Module):
    """`Attention` with one product for q, k and v."""

    def __init__(self, attention: Attention, *, pack: bool = True) -> None:
        super().__init__()
        spec = attention.spec
        self.spec = spec
        self.eps = attention.eps
        self.qkv_proj = fused((attention.q_proj, attention.k_proj, attention.v_proj), pack=pack)
        self.o_proj = fused((attention.o_proj,), pack=pack)
        self.num_rotated = spec.num_attention_heads + spec.num_key_value_heads
        if spec.qk_norm == "weighted":
            self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        # From here on `attention` is dropped with its weights.

    def forward(
        self, x_BND: Tensor, rotation: Rotation, cache: LayerCache, start: int, num_queries: int
    ) -> Tensor:
        """As `Attention.forward`. Queries are computed for all tokens, also where few are asked."""
        N = x_BND.shape[1]
        heads_BANE = self._heads(self.qkv_proj(x_BND))
        q_BHNE, k_BKNE, v_BKNE = self._placed(heads_BANE, rotation)
        q_BHNE = q_BHNE[:, :, N - num_queries :]
        if self.spec.temperature is not None and num_queries:
            q_BHNE = scale_by_position(q_BHNE, start + N - num_queries, self.spec.temperature)
        parts = []
        for segment in cache.extend(start, k_BKNE, v_BKNE):
            first = max(segment.first, N - num_queries)
            stop = segment.first + segment.num_tokens
            if first < stop:
                own = q_BHNE[:, :, first - (N - num_queries) : stop - (N - num_queries)]
                parts.append(attend(own, segment.k_BKSE, segment.v_BKSE, segment.window))
        if not parts:
            return x_BND[:, :0]
        out_BHNE = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        out_BND: Tensor = self.o_proj(out_BHNE.transpose(1, 2).flatten(2))
        return out_BND

    def _heads(self, x_BNW: Tensor) -> Tensor:
        return x_BNW.view(*x_BNW.shape[:-1], -1, self.spec.head_dim).transpose(1, 2)

    def _placed(self, heads_BANE: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normed and rotated; q and k are rotated together."""
        num_queries, num_rotated = self.spec.num_attention_heads, self.num_rotated
        qk_BANE, v_BKNE = heads_BANE[:, :num_rotated], heads_BANE[:, num_rotated:]
        if self.spec.qk_norm == "weighted":
            q_BHNE = self.q_norm(qk_BANE[:, :num_queries])
            qk_BANE = torch.cat((q_BHNE, self.k_norm(qk_BANE[:, num_queries:])), dim=1)
        if self.spec.uses_rope:
            qk_BANE = rotate(qk_BANE, rotation)
        if self.spec.qk_norm == "unit":
            qk_BANE = rms_norm(qk_BANE, None, self.eps)
        return qk_BANE[:, :num_queries], qk_BANE[:, num_queries:], v_BKNE


class FusedSwiGLU(nn.Module):
    """`SwiGLU` with one product for gate and up."""

    def __init__(self, mlp: SwiGLU, *, pack: bool = True) -> None:
        super().__init__()
        self.gate_up_proj = fused((mlp.gate_proj, mlp.up_proj), pack=pack)
        self.down_proj = fused((mlp.down_proj,), pack=pack)

    def forward(self, x_D: Tensor) -> Tensor:
        """As `SwiGLU.forward`."""
        gate_F, up_F = self.gate_up_proj(x_D).chunk(2, dim=-1)
        out_D: Tensor = self.down_proj(F.silu(gate_F) * up_F)
        return out_D


class DecodeStep:
    """Reads one token of each row, in a model that `speed_up` has been through.

    Calls functions, not modules, and rotates with tables made once for all layers. Parts that it
    does not know go through their own forward.
    """

    def __init__(self, model: Decoder) -> None:
        """A step for `model`.

        Raises: UnsupportedError for a model with cross-attention to images.
        """
        self.model = model
        self.device = model.device
        self.layers = []
        for index, block in model.layers.items():
            if not isinstance(block, Block):
                raise UnsupportedError("images are read through the decoder itself")
            self.layers.append((int(index), device_of(block), *_layer_functions(block)))

    @torch.inference_mode()
    def __call__(self, token_B: Tensor, cache: KVCache) -> Tensor:
        """Logits in fp32, [B, V], after `token_B`, whose keys and values go into `cache`.

        The ids are not checked: they are the model's own choice.
        """
        model = self.model
        cache.require_room(len(token_B), 1)
        position = cache.length
        cache.rope_length = max(cache.rope_length, position + 1)
        x_BD = model.embed_tokens(token_B.to(self.device))
        here, tables = None, None
        for index, device, attention, mlp in self.layers:
            if tables is None or device != here:
                x_BD, here = x_BD.to(device), device
                rotation = model.rope.rotation(
                    position, 1, length=cache.rope_length, dtype=x_BD.dtype, device=device
                )
                tables = _Tables(rotation)
            x_BD = x_BD + attention(x_BD, tables, cache.layers[index], position)
            x_BD = x_BD + mlp(x_BD)
        cache.advance(1)
        return model.logits(x_BD)


class _Tables:
    """The rotation of one position, in the half layout as two whole rows."""

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation
        cos_1P, sin_1P, self.interleaved = rotation
        self.half = cos_1P.shape[-1]
        if not self.interleaved:
            self.cos_E = torch.cat((cos_1P, cos_1P), dim=-1)
            self.sin_E = torch.cat((-sin_1P, sin_1P), dim=-1)

    def rotate(self, x_BAE: Tensor) -> Tensor:
        """Every head turned; the same sums as rope.rotate."""
        if self.interleaved:
            return rotate(x_BAE.unsqueeze(2), self.rotation).squeeze(2)
        return x_BAE * self.cos_E + x_BAE.roll(self.half, -1) * self.sin_E


_AttentionStep = Callable[[Tensor, _Tables, LayerCache, int], Tensor]


def _layer_functions(block: Block) -> tuple[_AttentionStep, Callable[[Tensor], Tensor]]:
    """Attention and feed-forward of one token, each with the norm before it."""
    attention: nn.Module = block.self_attn
    eps = block.input_layernorm.eps
    norm_D, norm2_D = block.input_layernorm.weight, block.post_attention_layernorm.weight
    mlp = block.mlp

    step: _AttentionStep
    if isinstance(attention, FusedAttention):
        step = _fused_attention_step(attention, norm_D, eps)
    else:
        plain = attention

        def through_module(
            x_BD: Tensor, tables: _Tables, cache: LayerCache, position: int
        ) -> Tensor:
            h_B1D = rms_norm(x_BD, norm_D, eps).unsqueeze(1)
            read_B1D: Tensor = plain(h_B1D, tables.rotation, cache, position, 1)
            return read_B1D.squeeze(1)

        step = through_module

    if isinstance(mlp, FusedSwiGLU):
        gate_up, down = mlp.gate_up_proj.forward, mlp.down_proj.forward

        def feed(x_BD: Tensor) -> Tensor:
            gate_BF, up_BF = gate_up(rms_norm(x_BD, norm2_D, eps)).chunk(2, dim=-1)
            out_BD: Tensor = down(F.silu(gate_BF) * up_BF)
            return out_BD
    else:

        def feed(x_BD: Tensor) -> Tensor:
            out_B1D: Tensor = mlp(rms_norm(x_BD, norm2_D, eps).unsqueeze(1))
            return out_B1D.squeeze(1)

    return step, feed


def _fused_attention_step(attention: FusedAttention, norm_D: Tensor, eps: float) -> _AttentionStep:
    spec = attention.spec
    qkv, out_proj = attention.qkv_proj.forward, attention.o_proj.forward
    H, num_rotated, E = spec.num_attention_heads, attention.num_rotated, spec.head_dim

    def step(x_BD: Tensor, tables: _Tables, cache: LayerCache, position: int) -> Tensor:
        heads_BAE = qkv(rms_norm(x_BD, norm_D, eps)).view(len(x_BD), -1, E)
        qk_BAE, v_BKE = heads_BAE[:, :num_rotated], heads_BAE[:, num_rotated:]
        if spec.qk_norm == "weighted":
            q_BHE = attention.q_norm(qk_BAE[:, :H])
            qk_BAE = torch.cat((q_BHE, attention.k_norm(qk_BAE[:, H:])), dim=1)
        if spec.uses_rope:
            qk_BAE = tables.rotate(qk_BAE)
        if spec.qk_norm == "unit":
            qk_BAE = rms_norm(qk_BAE, None, attention.eps)
        q_BH1E = qk_BAE[:, :H].unsqueeze(2)
        if spec.temperature is not None:
            q_BH1E = scale_by_position(q_BH1E, position, spec.temperature)
        out = x_BD
        for segment in cache.extend(position, qk_BAE[:, H:].unsqueeze(2), v_BKE.unsqueeze(2)):
            out = attend(q_BH1E, segment.k_BKSE, segment.v_BKSE, segment.window)
        out_BD: Tensor = out_proj(out.reshape(len(x_BD), H * E))
        return out_BD

    return step


def _joined(weights: Sequence[Tensor]) -> Tensor:
    return weights[0].detach() if len(weights) == 1 else torch.cat([w.detach() for w in weights])


def _are_plain(layers: Sequence[nn.Module]) -> bool:
    """Whether these are linear layers of ours alone, all of one kind."""
    if not any(all(isinstance(x, kind) for x in layers) for kind in (Linear, Int8Linear)):
        return False
    return not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
