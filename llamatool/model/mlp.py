"""The dense feed-forward: SwiGLU.

Letters: D hidden_size, F intermediate_size.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from llamatool.model.linear import Linear


class SwiGLU(nn.Module):
    """down(silu(gate(x)) x up(x)): a gated feed-forward of three matrices."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_D: Tensor) -> Tensor:
        """The output of the feed-forward, same shape as `x_D` (any leading dimensions)."""
        hidden_F = F.silu(self.gate_proj(x_D)) * self.up_proj(x_D)
        out_D: Tensor = self.down_proj(hidden_F)
        return out_D
