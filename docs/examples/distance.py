"""RoPE: turned by their positions, a query and a key score by their distance alone."""

import torch

from llamatool.config.model import RopeConfig
from llamatool.config.rope import inverse_frequencies
from llamatool.model.rope import Rotation, rotate

torch.manual_seed(0)
q, k = torch.randn(2, 1, 1, 1, 128)
frequencies = torch.tensor(inverse_frequencies(RopeConfig(theta=500000.0), 128))


def turned(x, position, dtype):
    angles = torch.tensor([[position]], dtype=dtype) * frequencies.to(dtype)
    return rotate(x.to(dtype), Rotation(angles.cos(), angles.sin(), interleaved=False))


def score(query_at, key_at, dtype=torch.float64):
    return (turned(q, query_at, dtype) * turned(k, key_at, dtype)).sum().item()


for key_at in (0, 100, 10_000, 1_000_000):
    print(f"key at {key_at:9,}, query 7 further: {score(key_at + 7, key_at):.6f}")
print(f"key at         0, query 8 further: {score(8, 0):.6f}")
for key_at, bound in ((100, 1e-4), (10_000, 1e-2), (1_000_000, 0.5)):
    assert abs(score(key_at + 7, key_at, torch.float32) - score(7, 0)) < bound
    print(f"in float32, key at {key_at:9,}: the same within {bound}")
