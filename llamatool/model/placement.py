"""Weights on several devices of one process: every part read straight to where it will be used.

Where that is has been decided before (sizing/placement.py); the decoder then finds the device of
a layer by its weights, and moves a token's vector where two neighbours are not on the same one.
"""

import torch

from llamatool.model.decoder import Decoder
from llamatool.model.linear import Linear
from llamatool.model.ranks import Cut
from llamatool.model.weights import Weights, assign
from llamatool.sizing.placement import Placement


def fill_spread(model: Decoder, weights: Weights, dtype: torch.dtype, placement: Placement) -> None:
    """Gives every parameter of `model` its tensor, on the device that `placement` names.

    A tied table that is needed on two devices becomes an output table of its own on the second.
    """
    first = torch.device(placement.embedding_device)
    last = torch.device(placement.head_device)
    places = placement.layer_devices
    for index, block in model.layers.items():
        device = torch.device(places[int(index)])
        weights.fill(block, f"layers.{index}.", dtype, device)
    for name, child in model.named_children():
        if name != "layers":
            device = last if name in ("norm", "lm_head") else first
            weights.fill(child, f"{name}.", dtype, device)
    if placement.copies_table:
        num_rows = model.config.vocab_size
        with torch.device("meta"):
            model.lm_head = Linear(model.config.hidden_size, num_rows, bias=False)
        rows = Cut(0, ((0, num_rows),))
        table_VD = weights.read("embed_tokens.weight", dtype, last, cut=rows)
        assign(model, "lm_head.weight", table_VD)
