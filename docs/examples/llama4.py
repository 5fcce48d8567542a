"""What a query of Llama 4 Scout sees, and how far it is scaled."""

from llamatool.config.catalog import find
from llamatool.config.layers import plan_layers
from llamatool.config.rope import temperature_scale

layers = plan_layers(find("llama-4-scout").config)
for layer in (layers[0], layers[3]):
    print(f"layer {layer.index}: {layer.attention}, window {layer.window}, rope {layer.uses_rope}")
full = [layer.index for layer in layers if layer.attention == "full"]
print("full layers:", full)

chunk = layers[0].window
temperature = layers[3].temperature
print(f"{'position':>9}  {'keys, chunked':>13}  {'keys, full':>10}  q scaled by")
for position in (8190, 8191, 8192, 100_000, 1_048_575):
    scale = temperature_scale(temperature, position)
    print(f"{position:9,}  {position % chunk + 1:13,}  {position + 1:10,}  {scale:11.4f}")
