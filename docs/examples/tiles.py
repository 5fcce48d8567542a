"""What a picture costs in each way of seeing: tiles, positions, bytes of cache."""

from llamatool.config.catalog import find
from llamatool.config.layers import plan_layers
from llamatool.model.images import choose_grid
from llamatool.sizing.kv_cache import kv_cache

beside = find("llama-3.2-11b-vision-instruct").config
among = find("llama-4-scout-17b-16e-instruct").config
per_image = kv_cache(plan_layers(beside), vision=beside.vision).bytes_per_image
per_token = kv_cache(plan_layers(among)).in_window_bytes_per_token


def row(width, height):
    rows, columns = choose_grid(height, width, beside.vision.image_size, 4)
    tiles = rows * columns
    yield f"{rows} x {columns}"
    yield f"{tiles * beside.vision.num_patches:,}"
    yield f"{tiles * per_image // 4:,}"
    rows, columns = choose_grid(height, width, among.vision.image_size, 16)
    tiles = rows * columns
    tokens = 3 + 144 + (145 * tiles if tiles > 1 else 0)
    yield f"{rows} x {columns}"
    yield f"{tokens:,}"
    yield f"{tokens * per_token:,}"


print("             Llama 3.2 11B Vision            Llama 4 Scout")
print("pixels       tiles  positions        bytes   tiles  tokens        bytes")
for width, height in [(300, 300), (640, 480), (1000, 600), (1920, 1080), (1200, 3000)]:
    cells = row(width, height)
    line = "{:>5} {:>10} {:>12}   {:>5} {:>7} {:>12}".format(*cells)
    print(f"{width:4} x {height:4}  {line}")
