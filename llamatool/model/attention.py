"""Self-attention: queries, keys and values, their positions, and who may see whom.

Letters: B batch, T query tokens, N new tokens (T = N but in a last layer that answers for some
positions only), S key tokens in sight, D hidden_size, H query heads, K key/value heads,
G = H / K query heads per key/value head, E head_dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamatool.config.layers import LayerSpec
from llamatool.config.model import TemperatureConfig
from llamatool.model.cache import LayerCache, Segment
from llamatool.model.linear import Linear
from llamatool.model.norm import RMSNorm, rms_norm
from llamatool.model.rope import Rotation, rotate

# Elements of the largest mask that is ever made: 2048 queries see 2048 keys in one piece.
MASK_ELEMENTS = 2**22
# Keys and queries that torch's attention on a CPU takes at a time. Where a window begins inside
# of a block of keys, the block is read whole and masked: sums are then of the same groups as over
# all keys at once, which shows in bfloat16.
KEY_BLOCK = 512
QUERY_BLOCK = 64


class Attention(nn.Module):
    """One layer's self-attention, as its LayerSpec says it is."""

    def __init__(self, spec: LayerSpec, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.spec = spec
        self.eps = eps
        heads, kv_heads, head_dim = (
            spec.num_attention_heads,
            spec.num_key_value_heads,
            spec.head_dim,
        )
        bias, out_bias = spec.attention_bias, spec.attention_output_bias
        self.q_proj = Linear(hidden_size, heads * head_dim, bias=bias)
        self.k_proj = Linear(hidden_size, kv_heads * head_dim, bias=bias)
        self.v_proj = Linear(hidden_size, kv_heads * head_dim, bias=bias)
        self.o_proj = Linear(heads * head_dim, hidden_size, bias=out_bias)
        if spec.qk_norm == "weighted":
            self.q_norm = RMSNorm(head_dim, eps)
            self.k_norm = RMSNorm(head_dim, eps)

    def forward(
        self, x_BND: Tensor, rotation: Rotation, cache: LayerCache, start: int, num_queries: int
    ) -> Tensor:
        """What the last `num_queries` of the new tokens read from all tokens: [B, T, D].

        The keys and values of all new tokens go into the cache.

        Args: start: position of the first new token.
        """
        k_BKNE = self._heads(self.k_proj(x_BND))
        v_BKNE = self._heads(self.v_proj(x_BND))
        k_BKNE = self._place(k_BKNE, rotation, "k")
        q_BHTE = None
        if num_queries:
            first = x_BND.shape[1] - num_queries
            q_BHTE = self._heads(self.q_proj(x_BND[:, first:]))
            q_BHTE = self._place(q_BHTE, _last(rotation, num_queries), "q")
            if self.spec.temperature is not None:
                q_BHTE = scale_by_position(q_BHTE, start + first, self.spec.temperature)
        parts = [
            part
            for segment in cache.extend(start, k_BKNE, v_BKNE)
            if (part := _read(q_BHTE, segment, x_BND.shape[1])) is not None
        ]
        if not parts:
            return x_BND[:, :0]
        out_BHTE = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        out_BTD: Tensor = self.o_proj(out_BHTE.transpose(1, 2).flatten(2))
        return out_BTD

    def _heads(self, x_BTW: Tensor) -> Tensor:
        # -1 and not H: a rank of a tensor-parallel group holds only some of the heads.
        return x_BTW.view(*x_BTW.shape[:-1], -1, self.spec.head_dim).transpose(1, 2)

    def _place(self, x_BHTE: Tensor, rotation: Rotation, name: str) -> Tensor:
        """Norm and rotation: a weighted norm comes before the rotation, a plain one after it."""
        if self.spec.qk_norm == "weighted":
            norm: RMSNorm = self.q_norm if name == "q" else self.k_norm
            x_BHTE = norm(x_BHTE)
        if self.spec.uses_rope:
            x_BHTE = rotate(x_BHTE, rotation)
        if self.spec.qk_norm == "unit":
            x_BHTE = rms_norm(x_BHTE, None, self.eps)
        return x_BHTE


def scale_by_position(q_BHTE: Tensor, start: int, temperature: TemperatureConfig) -> Tensor:
    """Queries times 1 + attn_scale ln(1 + floor((position + 1) / floor_scale)).

    In layers without RoPE, this sharpens attention as the context grows. In fp32, then back.
    Example: attn_scale 0.1, floor_scale 8192 -> 1 up to position 8190, 1.0693 from 8191 on.
    Source: Llama4TextAttention in transformers.
    """
    stop = start + q_BHTE.shape[2]
    positions_T = torch.arange(start, stop, device=q_BHTE.device, dtype=torch.float32)
    steps_T = torch.floor((positions_T + 1) / temperature.floor_scale)
    scale_T = torch.log1p(steps_T) * temperature.attn_scale + 1.0
    return (q_BHTE * scale_T[:, None]).to(q_BHTE.dtype)


def attend(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, window: int | None = None) -> Tensor:
    """Softmax(q k / sqrt(E)) v, causal: the last query sees all keys, each before it one less.

    With a window, a query sees only the last `window` of those keys. Where a mask is needed it
    is made for so many queries at a time that it never exceeds MASK_ELEMENTS (or one row).
    """
    T, S = q_BHTE.shape[2], k_BKSE.shape[2]
    if window is not None and window >= S:
        window = None
    if window is None:
        if T == 1:
            return _attend_one(q_BHTE, k_BKSE, v_BKSE)
        if T == S:
            return _attend_many(q_BHTE, k_BKSE, v_BKSE, None, is_causal=True)
    rows = _rows_at_once(S, window)
    parts = []
    for first in range(0, T, rows):
        stop = min(first + rows, T)
        seen = S - T + stop  # keys that the last query of these rows sees
        oldest = 0 if window is None else max(0, S - T + first - window + 1)
        oldest -= oldest % KEY_BLOCK
        mask_TS = _causal_mask(stop - first, seen - oldest, window, q_BHTE.device)
        q, k, v = q_BHTE[:, :, first:stop], k_BKSE[:, :, oldest:seen], v_BKSE[:, :, oldest:seen]
        parts.append(_attend_many(q, k, v, mask_TS, is_causal=False))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def attend_all(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
    """Softmax(q k / sqrt(E)) v, in which every query sees every key."""
    if q_BHTE.shape[2] == 1:
        return _attend_one(q_BHTE, k_BKSE, v_BKSE)
    return _attend_many(q_BHTE, k_BKSE, v_BKSE, None, is_causal=False)


def _last(rotation: Rotation, num_tokens: int) -> Rotation:
    cos_TP, sin_TP, interleaved = rotation
    return Rotation(cos_TP[-num_tokens:], sin_TP[-num_tokens:], interleaved)


def _read(q_BHTE: Tensor | None, segment: Segment, num_new: int) -> Tensor | None:
    """The attention of the segment's tokens that have a query; None if none has."""
    if q_BHTE is None:
        return None
    offset = num_new - q_BHTE.shape[2]  # new tokens before the first query
    first = max(segment.first, offset)
    stop = segment.first + segment.num_tokens
    if first >= stop:
        return None
    q_BHTE = q_BHTE[:, :, first - offset : stop - offset]
    return attend(q_BHTE, segment.k_BKSE, segment.v_BKSE, segment.window)


def _rows_at_once(S: int, window: int | None) -> int:
    """Queries that one mask is made for: whole blocks, unless the mask is too large for one."""
    most = MASK_ELEMENTS // S
    if window is not None:
        rows = min(-(-window // QUERY_BLOCK) * QUERY_BLOCK, KEY_BLOCK)
        most = min(rows, MASK_ELEMENTS // min(S, rows + window + KEY_BLOCK))
    return most - most % QUERY_BLOCK or max(most, 1)


def _causal_mask(T: int, S: int, window: int | None, device: torch.device) -> Tensor:
    # From comparisons: triu of a matrix of -inf is nan on MPS.
    query_T1 = torch.arange(S - T, S, device=device)[:, None]
    key_S = torch.arange(S, device=device)
    mask_TS = key_S <= query_T1
    return mask_TS if window is None else mask_TS & (key_S > query_T1 - window)


def _attend_one(q_BH1E: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
    """One query per head: the G heads that share a key head become G queries of it.

    So keys and values are read once, not G times (on a CPU, in bfloat16, 12 times as fast).
    """
    B, H, _, E = q_BH1E.shape
    q_BKGE = q_BH1E.reshape(B, k_BKSE.shape[1], -1, E)
    out_BKGE = F.scaled_dot_product_attention(q_BKGE, k_BKSE, v_BKSE)
    return out_BKGE.reshape(B, H, 1, E)


def _attend_many(
    q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask_TS: Tensor | None, *, is_causal: bool
) -> Tensor:
    """Key heads are shared by a stride of zero: nothing is repeated in memory, on any backend."""
    B, H, T, E = q_BHTE.shape
    K, S = k_BKSE.shape[1:3]
    shape = (B, K, H // K, S, E)
    if H != K:
        q_BHTE = q_BHTE.reshape(B * K, H // K, T, E)
        k_BKSE = k_BKSE[:, :, None].expand(shape).flatten(0, 1)
        v_BKSE = v_BKSE[:, :, None].expand(shape).flatten(0, 1)
    out = F.scaled_dot_product_attention(
        q_BHTE, k_BKSE, v_BKSE, attn_mask=mask_TS, is_causal=is_causal
    )
    return out.reshape(B, H, T, E)
