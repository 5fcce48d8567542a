"""What the two image towers share: a block that looks at all patches at once, without a mask.

Letters: B images or tiles, S patches, W hidden_size of the tower, I its intermediate_size,
H heads, E = W / H.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamatool.config.model import VisionConfig
from llamatool.model.attention import attend_all
from llamatool.model.linear import Linear

EDGE_EPS = 1e-5  # of the LayerNorms before and after the blocks, whatever `norm_eps` says

Turn = Callable[[Tensor], Tensor]  # rotates queries or keys, [B, H, S, E]


class TowerBlock(nn.Module):
    """x + attention(norm(x)), then that + feed-forward(norm(that)); with gates, tanh(gate) x each.

    LayerNorm, GELU and biases, where the decoder has RMSNorm, SwiGLU and none.
    """

    def __init__(self, vision: VisionConfig, *, eps: float, bias: bool, gated: bool) -> None:
        super().__init__()
        width = vision.hidden_size
        self.input_layernorm = nn.LayerNorm(width, eps)
        self.self_attn = TowerAttention(width, vision.num_attention_heads, bias)
        self.post_attention_layernorm = nn.LayerNorm(width, eps)
        self.mlp = TowerMLP(width, vision.intermediate_size)
        if gated:
            self.gate_attn = nn.Parameter(torch.empty(1))
            self.gate_ffn = nn.Parameter(torch.empty(1))
        self.gated = gated

    def forward(
        self, x_BSW: Tensor, *, padding_S: Tensor | None = None, turn: Turn | None = None
    ) -> Tensor:
        """The block's output, same shape as `x_BSW`; the arguments as in TowerAttention."""
        read_BSW = self.self_attn(self.input_layernorm(x_BSW), padding_S=padding_S, turn=turn)
        x_BSW = x_BSW + (self.gate_attn.tanh() * read_BSW if self.gated else read_BSW)
        fed_BSW: Tensor = self.mlp(self.post_attention_layernorm(x_BSW))
        return x_BSW + (self.gate_ffn.tanh() * fed_BSW if self.gated else fed_BSW)


class TowerAttention(nn.Module):
    """Attention of all patches to all patches."""

    def __init__(self, width: int, num_heads: int, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads  # of what is here: on a rank, of its part
        self.q_proj = Linear(width, width, bias=bias)
        self.k_proj = Linear(width, width, bias=bias)
        self.v_proj = Linear(width, width, bias=bias)
        self.o_proj = Linear(width, width, bias=bias)

    def forward(
        self, x_BSW: Tensor, *, padding_S: Tensor | None = None, turn: Turn | None = None
    ) -> Tensor:
        """What every patch reads from the others.

        Args: padding_S: true where a position is padding. As in both references of Llama 3.2
        Vision, padding does not see padding, but a real patch sees all, padding too.
        """
        q_BHSE = self._heads(self.q_proj(x_BSW))
        k_BHSE = self._heads(self.k_proj(x_BSW))
        v_BHSE = self._heads(self.v_proj(x_BSW))
        if turn is not None:
            q_BHSE, k_BHSE = turn(q_BHSE), turn(k_BHSE)
        if padding_S is None or not bool(padding_S.any()):
            out_BHSE = attend_all(q_BHSE, k_BHSE, v_BHSE)
        else:
            # Two products without a mask instead of one with a mask of S x S elements.
            real_S = ~padding_S
            out_BHSE = torch.empty_like(q_BHSE)
            out_BHSE[:, :, real_S] = attend_all(q_BHSE[:, :, real_S], k_BHSE, v_BHSE)
            out_BHSE[:, :, padding_S] = attend_all(
                q_BHSE[:, :, padding_S], k_BHSE[:, :, real_S], v_BHSE[:, :, real_S]
            )
        out_BSW: Tensor = self.o_proj(out_BHSE.transpose(1, 2).flatten(2))
        return out_BSW

    def _heads(self, x_BSW: Tensor) -> Tensor:
        return x_BSW.view(*x_BSW.shape[:-1], self.num_heads, -1).transpose(1, 2)


class TowerMLP(nn.Module):
    """fc2(gelu(fc1(x)))."""

    def __init__(self, width: int, intermediate_size: int) -> None:
        super().__init__()
        self.fc1 = Linear(width, intermediate_size)
        self.fc2 = Linear(intermediate_size, width)

    def forward(self, x_BSW: Tensor) -> Tensor:
        """The output of the feed-forward, same shape as `x_BSW`."""
        out_BSW: Tensor = self.fc2(F.gelu(self.fc1(x_BSW)))
        return out_BSW
