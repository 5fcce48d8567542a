"""The mixture of experts: each token goes to its top-k experts, and to one that all share.

Letters: M tokens (batch and time flattened), D hidden_size, F width of one expert, X experts,
k experts per token, R = M k.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamatool.config.layers import MoeSpec
from llamatool.model.linear import WHOLE, Linear
from llamatool.model.mlp import SwiGLU
from llamatool.model.ranks import Cut, Ranks


class MixtureOfExperts(nn.Module):
    """shared(x) + the sum over a token's k experts of expert(sigmoid(router logit) x x).

    The score multiplies the expert's *input*, and there is no softmax and no renormalisation.
    Both references push every token through every expert, with the input multiplied by
    sigmoid(-inf) = 0 where it was not routed. An expert of zero is zero, so computing only what
    is routed gives the same sum with X/k times fewer multiplications.

    Source: Llama4TextMoe in transformers; MoE in llama-models.
    """

    ranks: Ranks | None = None  # set where each rank has a part of every expert

    def __init__(self, spec: MoeSpec, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_experts_per_tok = spec.num_experts_per_tok
        self.router = Linear(hidden_size, spec.num_experts, bias=False)
        self.experts = Experts(spec.num_experts, hidden_size, intermediate_size)
        self.shared_expert = SwiGLU(hidden_size, spec.shared_intermediate_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The output of the layer's feed-forward, same shape as `x_BTD`."""
        x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
        logits_Mk, experts_Mk = self.router(x_MD).topk(self.num_experts_per_tok, dim=-1)
        scores_Mk = torch.sigmoid(logits_Mk.float()).to(x_MD.dtype)
        out_MD: Tensor = self.shared_expert(x_MD)
        # Sorted by expert, each expert's tokens are one slice: one host read for all of them.
        order = experts_Mk.flatten().argsort(stable=True)
        counts = experts_Mk.flatten().bincount(minlength=self.experts.num_experts).tolist()
        tokens = order // self.num_experts_per_tok
        routed_in = x_MD[tokens] * scores_Mk.flatten()[order, None]
        routed_RD = torch.empty_like(routed_in)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                stop = start + count
                routed_RD[order[start:stop]] = self.experts(expert, routed_in[start:stop])
                start = stop
        # The experts of a token are added up first, and rounded once, as in transformers.
        out_MD += routed_RD.view(*experts_Mk.shape, x_MD.shape[-1]).sum(dim=1)
        if self.ranks is not None:
            out_MD = self.ranks.sum(out_MD)
        return out_MD.view(x_BTD.shape)


class Experts(nn.Module):
    """The weights of all experts, gate and up side by side, used as x @ W (not transposed)."""

    cuts: Mapping[str, Cut] = WHOLE

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        gate_up_XD2F = torch.empty(num_experts, hidden_size, 2 * intermediate_size)
        down_XFD = torch.empty(num_experts, intermediate_size, hidden_size)
        self.gate_up_proj = nn.Parameter(gate_up_XD2F, requires_grad=False)
        self.down_proj = nn.Parameter(down_XFD, requires_grad=False)

    def forward(self, expert: int, x_MD: Tensor) -> Tensor:
        """One expert's output for its tokens."""
        gate_MF, up_MF = (x_MD @ self.gate_up_proj[expert]).chunk(2, dim=-1)
        out_MD: Tensor = (F.silu(gate_MF) * up_MF) @ self.down_proj[expert]
        return out_MD
