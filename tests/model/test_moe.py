"""Routed experts: the dense evaluation of the references, with a fraction of the work."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from llamatool.config.layers import MoeSpec
from llamatool.model.moe import MixtureOfExperts

HIDDEN, WIDTH = 32, 48


def build(num_experts: int, num_experts_per_tok: int) -> MixtureOfExperts:
    torch.manual_seed(0)
    spec = MoeSpec(num_experts, num_experts_per_tok, WIDTH)
    moe = MixtureOfExperts(spec, HIDDEN, WIDTH).requires_grad_(False)
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.2)
    return moe


def dense(moe: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """Every token through every expert, its input times sigmoid(-inf) = 0 where not routed."""
    logits = moe.router(x)
    top = logits.topk(moe.num_experts_per_tok, dim=-1)
    scores = torch.full_like(logits, float("-inf")).scatter(-1, top.indices, top.values).sigmoid()
    out = moe.shared_expert(x)
    for expert in range(moe.experts.num_experts):
        gate, up = ((x * scores[..., expert, None]) @ moe.experts.gate_up_proj[expert]).chunk(2, -1)
        out = out + (nn.functional.silu(gate) * up) @ moe.experts.down_proj[expert]
    return out


@pytest.mark.parametrize(("num_experts", "k"), [(4, 1), (16, 1), (16, 2), (8, 8), (1, 1)])
@pytest.mark.parametrize("num_tokens", [1, 2, 37])
def test_routing_equals_dense(num_experts: int, k: int, num_tokens: int) -> None:
    moe = build(num_experts, k)
    x = torch.randn(2, num_tokens, HIDDEN)
    assert (moe(x) - dense(moe, x)).abs().max() <= 1e-5


@pytest.mark.parametrize(("num_experts", "k"), [(4, 1), (16, 1), (16, 2), (128, 1)])
def test_expert_multiply_adds_are_fewer_by_experts_over_k(num_experts: int, k: int) -> None:
    """Counted, not timed."""
    moe = build(num_experts, k)
    x = torch.randn(1, 64, HIDDEN)
    with FlopCounterMode(display=False) as routed:
        moe(x)
    with FlopCounterMode(display=False) as everywhere:
        dense(moe, x)
    with FlopCounterMode(display=False) as elsewhere:
        moe.router(x), moe.shared_expert(x)
    other = elsewhere.get_total_flops()
    assert everywhere.get_total_flops() - other == 64 * num_experts * 2 * 3 * HIDDEN * WIDTH
    assert routed.get_total_flops() - other == 64 * k * 2 * 3 * HIDDEN * WIDTH


def test_the_score_scales_the_input_not_the_output() -> None:
    """The two differ, because silu is not linear."""
    moe = build(4, 1)
    x = torch.randn(1, 5, HIDDEN)
    logits = moe.router(x)
    score, expert = logits.max(-1)
    after = moe.shared_expert(x)
    for t in range(5):
        after[0, t] += score[0, t].sigmoid() * moe.experts(int(expert[0, t]), x[0, t : t + 1])[0]
    assert (moe(x) - after).abs().max() > 1e-2


def test_scores_do_not_sum_to_one() -> None:
    """A sigmoid of each logit: no softmax and no renormalisation, even for one expert."""
    moe = build(1, 1)
    x = torch.randn(1, 3, HIDDEN)
    whole = moe.shared_expert(x) + moe.experts(0, x[0])
    assert (moe(x) - whole).abs().max() > 1e-2


def test_dense_layers_have_no_router() -> None:
    from tests.model.tiny_models import BY_NAME

    _, model = BY_NAME["maverick"].build()
    has_router = {
        int(name.split(".")[1]) for name, _ in model.named_parameters() if "router" in name
    }
    assert has_router == {1, 3}
    widths = [model.layers[i].mlp.up_proj.out_features for i in ("0", "2", "4")]
    assert widths == [96, 96, 96]
