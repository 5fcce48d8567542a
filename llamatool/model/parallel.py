"""Which rank holds what: the plan of a tensor-parallel model, made from its layer plan.

One table, {name of a module: style}, which PyTorch's `parallelize_module` applies:

  q, k, v, gate, up     Columns     each rank computes some heads, or some of the inner width
  o, down               Rows        and multiplies by the columns that meet them; then the sum
  k, v with few heads   KeyValues   ranks that share a key/value head each hold it
  experts               Experts     as gate, up and down, inside of every expert
  embedding             Vocabulary  each rank has some rows; then the sum
  lm_head               Vocabulary  each rank has some logits; then they are joined
  image tower           as a layer: q, k, v, fc1 Columns; o, fc2 Rows; its adapter too
  norms, router, projector          whole on every rank

So a layer costs two sums of a token's vector, after attention and after the feed-forward. An image
tower whose heads do not divide is whole on every rank, too (sizing/ranks.py counts all this). The
styles keep plain tensors of this rank's part, not DTensors, whose dispatch costs more than a small
product does (benchmarks/parallel.py measures both).

Source: Megatron-LM (arXiv 1909.08053) for the order of columns and rows; fairscale, which Meta's
checkpoints are split by, for the rows of the vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from llamatool.config.layers import LayerSpec, split_layers, splits_tower
from llamatool.model.attention import Attention
from llamatool.model.decoder import Decoder
from llamatool.model.linear import Embedding, Linear
from llamatool.model.moe import Experts, MixtureOfExperts
from llamatool.model.ranks import Cut, Ranks
from llamatool.model.tower import TowerAttention, TowerBlock
from llamatool.model.vision_llama4 import AdapterMLP

Plan = Mapping[str, ParallelStyle]
_Module = TypeVar("_Module", bound=nn.Module)


def parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    """Makes `model`, which has no weights yet, this rank's part of itself, in place.

    Afterwards its parameters, its caches and its layer plan are those of one rank, and
    `Weights.fill` reads that part alone.

    Args: model: on the meta device.
    Raises: UsageError if the ranks of `mesh` cannot share it; nothing is changed then.
    """
    ranks = Ranks.of(mesh)
    mine = split_layers(model.plan, ranks.size)
    parallelize_module(model, mesh, dict(parallel_plan(model, ranks.size)))
    specs = {str(spec.index): spec for spec in mine}
    for index, block in model.layers.items():
        attention = getattr(block, "self_attn", None)
        if isinstance(attention, Attention):
            attention.spec = specs[index]
    model.plan = mine
    model.ranks = ranks


def parallel_plan(model: Decoder, num_ranks: int) -> Plan:
    """The style of every module that is divided, by its name."""
    plan: dict[str, ParallelStyle] = {"embed_tokens": Vocabulary()}
    if model.lm_head is not None:
        plan["lm_head"] = Vocabulary()
    for spec in model.plan:
        if str(spec.index) in model.layers:
            plan |= {f"layers.{spec.index}.{name}": style for name, style in _layer(spec)}
    vision = model.config.vision
    if model.has_tower and vision is not None and splits_tower(vision, num_ranks):
        for path, module in model.vision_model.named_modules():
            plan |= {f"vision_model.{path}.{name}": style for name, style in _tower(module)}
    return plan


def _layer(spec: LayerSpec) -> Sequence[tuple[str, ParallelStyle]]:
    attention = "cross_attn" if spec.attention == "cross" else "self_attn"
    styles: list[tuple[str, ParallelStyle]] = [
        (f"{attention}.q_proj", Columns()),
        (f"{attention}.k_proj", KeyValues(spec.num_key_value_heads)),
        (f"{attention}.v_proj", KeyValues(spec.num_key_value_heads)),
        (f"{attention}.o_proj", Rows()),
    ]
    if spec.moe is None:
        return [
            *styles,
            ("mlp.gate_proj", Columns()),
            ("mlp.up_proj", Columns()),
            ("mlp.down_proj", Rows()),
        ]
    return [
        *styles,
        ("mlp.shared_expert.gate_proj", Columns()),
        ("mlp.shared_expert.up_proj", Columns()),
        ("mlp.shared_expert.down_proj", Rows(sums=False)),
        ("mlp.experts", ExpertWidths()),
        ("mlp", ExpertSum()),
    ]


def _tower(module: nn.Module) -> Sequence[tuple[str, ParallelStyle]]:
    """The styles inside of a module of an image tower, if it is one that is divided."""
    mlp: list[tuple[str, ParallelStyle]] = [("fc1", Columns()), ("fc2", Rows())]
    if isinstance(module, AdapterMLP):
        return mlp
    if not isinstance(module, TowerBlock):
        return []
    return [
        ("self_attn", TowerHeads()),
        ("self_attn.q_proj", Columns()),
        ("self_attn.k_proj", Columns()),
        ("self_attn.v_proj", Columns()),
        ("self_attn.o_proj", Rows()),
        *((f"mlp.{name}", style) for name, style in mlp),
    ]


class Columns(ParallelStyle):
    """Some of a linear layer's outputs: these rows of its weight, and nothing to exchange."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _expect(module, Linear)
        _cut_outputs(linear, Ranks.of(device_mesh).share(linear.out_features))
        return linear


class KeyValues(ParallelStyle):
    """The outputs of some whole key/value heads; of one, which ranks share, if there are few."""

    def __init__(self, num_key_value_heads: int) -> None:
        super().__init__()
        self.num_key_value_heads = num_key_value_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear, ranks = _expect(module, Linear), Ranks.of(device_mesh)
        heads = self.num_key_value_heads
        first = ranks.rank * heads // ranks.size
        stop = first + max(1, heads // ranks.size)
        width = linear.out_features // heads
        _cut_outputs(linear, (first * width, stop * width))
        return linear


class Rows(ParallelStyle):
    """Some of a linear layer's inputs: these columns of its weight; the outputs are summed."""

    def __init__(self, *, sums: bool = True) -> None:
        """Args: sums: False where a sum comes later, of this and of something else."""
        super().__init__()
        self.sums = sums

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear, ranks = _expect(module, Linear), Ranks.of(device_mesh)
        assert self.sums or linear.bias is None, "a bias would be added on every rank"
        first, stop = ranks.share(linear.in_features)
        linear.cuts = {"weight": Cut(1, ((first, stop),))}
        linear.in_features = stop - first
        linear.weight = _empty(linear.out_features, linear.in_features)
        linear.ranks = ranks if self.sums else None
        return linear


class Vocabulary(ParallelStyle):
    """Some rows of a table of the vocabulary, at the input or at the output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = Ranks.of(device_mesh)
        if isinstance(module, Embedding):
            first, stop = ranks.share(module.num_embeddings)
            module.cuts = {"weight": Cut(0, ((first, stop),))}
            module.weight = _empty(stop - first, module.embedding_dim)
            module.first_row, module.ranks = first, ranks
        else:  # the decoder joins the logits
            linear = _expect(module, Linear)
            _cut_outputs(linear, ranks.share(linear.out_features))
        return module


class ExpertWidths(ParallelStyle):
    """Some of the inner width of every expert, of gate and up alike."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts, ranks = _expect(module, Experts), Ranks.of(device_mesh)
        num_experts, width, hidden_size = experts.down_proj.shape
        first, stop = ranks.share(width)
        experts.cuts = {
            "gate_up_proj": Cut(2, ((first, stop), (width + first, width + stop))),
            "down_proj": Cut(1, ((first, stop),)),
        }
        experts.gate_up_proj = _empty(num_experts, hidden_size, 2 * (stop - first))
        experts.down_proj = _empty(num_experts, stop - first, hidden_size)
        return experts


class ExpertSum(ParallelStyle):
    """One sum over the ranks of all that a mixture of experts adds up."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        moe = _expect(module, MixtureOfExperts)
        moe.ranks = Ranks.of(device_mesh)
        return moe


class TowerHeads(ParallelStyle):
    """Some heads of an image tower's attention; its four matrices have styles of their own."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        attention = _expect(module, TowerAttention)
        attention.num_heads //= device_mesh.size()
        return attention


def _cut_outputs(linear: Linear, rows: tuple[int, int]) -> None:
    first, stop = rows
    linear.cuts = {"weight": Cut(0, (rows,)), "bias": Cut(0, (rows,))}
    linear.out_features = stop - first
    linear.weight = _empty(linear.out_features, linear.in_features)
    if linear.bias is not None:
        linear.bias = _empty(linear.out_features)


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


def _expect(module: nn.Module, kind: type[_Module]) -> _Module:
    assert isinstance(module, kind), f"{type(module).__name__} is no {kind.__name__}"
    return module
