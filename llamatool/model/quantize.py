"""Weights of one byte: int8 with one scale for each output row, activations as they are.

Decoding reads every weight once for each token, so half the bytes are about half the time. Only
the linear layers are packed; norms and the input embedding stay, and a tied table serves as both:
its packed copy makes the logits.

Letters: N rows, D input features, F output features.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamatool.errors import UnsupportedError
from llamatool.model.linear import summed
from llamatool.model.ranks import Ranks

if TYPE_CHECKING:
    from llamatool.model.decoder import Decoder


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8 x one scale for each output row."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    ranks: Ranks | None = None  # as in Linear

    def __init__(self, weight_FD: Tensor, bias_F: Tensor | None = None) -> None:
        """Packs `weight_FD`; what it held is not needed any more."""
        super().__init__()
        packed_FD, scale_F = pack_int8(weight_FD)
        self.register_buffer("weight", packed_FD)
        self.register_buffer("scale", scale_F.to(weight_FD.dtype))
        self.register_buffer("bias", bias_F)

    @classmethod
    def joined(cls, layers: "Sequence[Int8Linear]") -> "Int8Linear":
        """One layer whose output is that of all `layers` side by side."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.register_buffer("weight", torch.cat([layer.weight for layer in layers]))
        made.register_buffer("scale", torch.cat([layer.scale for layer in layers]))
        biases = [layer.bias for layer in layers if layer.bias is not None]
        made.register_buffer("bias", torch.cat(biases) if biases else None)
        return made

    def forward(self, x_ND: Tensor) -> Tensor:
        """The product with the weight, plus bias, in the dtype of `x_ND`."""
        flat_ND = x_ND.reshape(-1, x_ND.shape[-1])
        is_few = len(flat_ND) <= MAX_PACKED_ROWS
        if flat_ND.device.type == "cpu" and is_few and flat_ND.shape[1] % KERNEL_FEATURES == 0:
            # The kernel that torch ships: one pass over the bytes, sums in fp32. Only its
            # bfloat16 form is vectorised; the fp32 one takes nine times as long.
            low_ND, low_F = flat_ND.to(torch.bfloat16), self.scale.to(torch.bfloat16)
            out_NF = torch._weight_int8pack_mm(low_ND, self.weight, low_F).to(x_ND.dtype)
        else:
            # Many rows are bound by arithmetic: one unpacked copy costs little beside them.
            out_NF = F.linear(flat_ND, self.weight.to(x_ND.dtype)) * self.scale
        if self.ranks is not None:
            out_NF = summed(out_NF, self.bias, self.ranks)
        elif self.bias is not None:
            out_NF = out_NF + self.bias
        return out_NF.view(*x_ND.shape[:-1], out_NF.shape[-1])  # of no rows, too


MAX_PACKED_ROWS = 8
# The kernel reads this many input features at a time (16, on some processors), and beyond the end
# of a row where they do not divide it.
KERNEL_FEATURES = 32


def pack_int8(weight_FD: Tensor) -> tuple[Tensor, Tensor]:
    """`weight_FD` in int8 and the scale of each row in fp32, so that weight = int8 x scale.

    Symmetric, to the nearest; the largest magnitude of a row becomes 127, so the error of an
    element is at most half a scale. A row of zeros has scale 1.
    Example: a row (0.5, -1.27) -> (50, -127) and 0.01.
    """
    weight_FD = weight_FD.float()
    scale_F = weight_FD.abs().amax(dim=1) / 127
    scale_F = torch.where(scale_F > 0, scale_F, torch.ones_like(scale_F))
    packed_FD = (weight_FD / scale_F[:, None]).round().clamp(-127, 127).to(torch.int8)
    return packed_FD, scale_F


def quantize_int8(model: "Decoder") -> None:
    """Packs the linear layers of `model`, one at a time, in place.

    Raises: UnsupportedError for a mixture of experts, whose three-dimensional weights have no
    such kernel.
    """
    if any(spec.moe is not None for spec in model.plan):
        raise UnsupportedError("int8 weights are not there for a mixture of experts")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                bias = child.bias.detach() if child.bias is not None else None
                packed = Int8Linear(child.weight.detach(), bias)
                packed.ranks = getattr(child, "ranks", None)
                setattr(module, name, packed)
    if model.lm_head is None:
        table_VD = model.embed_tokens.weight.detach()[: model.config.vocab_size]
        model.lm_head = Int8Linear(table_VD)
