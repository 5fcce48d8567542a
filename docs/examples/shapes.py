"""The shapes in one layer of Llama 3.1 8B, twelve tokens, without its weights."""

import torch

from llamatool.config.catalog import find
from llamatool.model.decoder import Decoder

config = find("llama-3.1-8b").config
with torch.device("meta"):  # shapes without values: nothing is allocated
    model = Decoder(config)
    ids = torch.zeros(1, 12, dtype=torch.long)


def show(name):
    def hook(module, inputs, output):
        print(f"{name:34} {list(inputs[0].shape)} -> {list(output.shape)}")

    return hook


model.embed_tokens.register_forward_hook(show("embed_tokens"))
for name, part in model.layers["0"].named_modules():
    if name:
        part.register_forward_hook(show(f"layers.0.{name}"))
model.norm.register_forward_hook(show("norm"))
model.lm_head.register_forward_hook(show("lm_head"))

cache = model.new_cache(max_tokens=12)
logits = model(ids, cache=cache)
layer = cache.layers[0]
print(f"{'keys of layer 0':34} {list(layer.k_BKSE.shape)}")
print(f"{'logits':34} {list(logits.shape)}")
