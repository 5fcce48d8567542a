"""The mixture of experts: each token goes to its top-k experts, and to one that all share.

Letters: N tokens (batch and time flattened), D hidden_size, F width of one expert, X experts,
k experts per token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamatool.config.layers import MoeSpec
from llamatool.model.mlp import SwiGLU


class MixtureOfExperts(nn.Module):
    """shared(x) + the sum over a token's k experts of expert(sigmoid(router logit) x x).

    The score multiplies the expert's *input*, and there is no softmax and no renormalisation.
    Both references push every token through every expert, with the input multiplied by
    sigmoid(-inf) = 0 where it was not routed. An expert of zero is zero, so computing only what
    is routed gives the same sum with X/k times fewer multiplications.

    Source: Llama4TextMoe in transformers; MoE in llama-models.
    """

    def __init__(self, spec: MoeSpec, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_experts_per_tok = spec.num_experts_per_tok
        self.router = nn.Linear(hidden_size, spec.num_experts, bias=False)
        self.experts = Experts(spec.num_experts, hidden_size, intermediate_size)
        self.shared_expert = SwiGLU(hidden_size, spec.shared_intermediate_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The output of the layer's feed-forward, same shape as `x_BTD`."""
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        logits_Nk, experts_Nk = self.router(x_ND).topk(self.num_experts_per_tok, dim=-1)
        scores_Nk = torch.sigmoid(logits_Nk.float()).to(x_ND.dtype)
        out_ND: Tensor = self.shared_expert(x_ND)
        # Sorted by expert, each expert's tokens are one slice: one host read for all of them.
        order = experts_Nk.flatten().argsort(stable=True)
        counts = experts_Nk.flatten().bincount(minlength=self.experts.num_experts).tolist()
        tokens = order // self.num_experts_per_tok
        routed_in = x_ND[tokens] * scores_Nk.flatten()[order, None]
        start = 0
        for expert, count in enumerate(counts):
            if count:
                stop = start + count
                routed_out = self.experts(expert, routed_in[start:stop])
                out_ND.index_add_(0, tokens[start:stop], routed_out)
                start = stop
        return out_ND.view(x_BTD.shape)


class Experts(nn.Module):
    """The weights of all experts, gate and up side by side, used as x @ W (not transposed)."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        gate_up_XD2F = torch.empty(num_experts, hidden_size, 2 * intermediate_size)
        down_XFD = torch.empty(num_experts, intermediate_size, hidden_size)
        self.gate_up_proj = nn.Parameter(gate_up_XD2F, requires_grad=False)
        self.down_proj = nn.Parameter(down_XFD, requires_grad=False)

    def forward(self, expert: int, x_ND: Tensor) -> Tensor:
        """One expert's output for its tokens."""
        gate_NF, up_NF = (x_ND @ self.gate_up_proj[expert]).chunk(2, dim=-1)
        out_ND: Tensor = (F.silu(gate_NF) * up_NF) @ self.down_proj[expert]
        return out_ND
