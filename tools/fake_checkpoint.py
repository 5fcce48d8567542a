"""Writes a Llama checkpoint with random weights in Meta's layout, for tests and benchmarks.

    python tools/fake_checkpoint.py OUT              2.02 GB, as Llama 3 with two shards
    python tools/fake_checkpoint.py OUT --gen 2 --dim 256 --layers 2 --mp 4

Generations 1 and 2 split the input table by columns, hold `rope.freqs` and say `vocab_size` -1;
generation 3 splits it by rows. Needs torch; the same options and seed give the same tensors.
"""

import argparse
import json
from pathlib import Path

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")  # split on the second axis


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    shapes = full_shapes(options)
    common: dict[str, torch.Tensor] = {}
    for rank in range(options.mp):
        generator = torch.Generator().manual_seed(options.seed + rank)
        shard = {}
        for name, shape in shapes.items():
            part = list(shape)
            axis = split_axis(name, options.gen)
            if axis is not None:
                part[axis] //= options.mp
            if name in common:
                shard[name] = common[name]
                continue
            shard[name] = _random(part, options.dtype, generator)
            if axis is None:
                common[name] = shard[name]
        torch.save(shard, options.out / f"consolidated.{rank:02d}.pth")
    (options.out / "params.json").write_text(json.dumps(params(options)))


def full_shapes(options: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor before it is split."""
    dim, width = options.dim, feed_forward(options)
    head_dim = dim // options.heads
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (options.vocab, dim)}
    for i in range(options.layers):
        shapes |= {
            f"layers.{i}.attention.wq.weight": (dim, dim),
            f"layers.{i}.attention.wk.weight": (options.kv_heads * head_dim, dim),
            f"layers.{i}.attention.wv.weight": (options.kv_heads * head_dim, dim),
            f"layers.{i}.attention.wo.weight": (dim, dim),
            f"layers.{i}.feed_forward.w1.weight": (width, dim),
            f"layers.{i}.feed_forward.w2.weight": (dim, width),
            f"layers.{i}.feed_forward.w3.weight": (width, dim),
            f"layers.{i}.attention_norm.weight": (dim,),
            f"layers.{i}.ffn_norm.weight": (dim,),
        }
    shapes |= {"norm.weight": (dim,), "output.weight": (options.vocab, dim)}
    if options.gen < 3:
        shapes["rope.freqs"] = (head_dim // 2,)
    return shapes


def split_axis(name: str, generation: int) -> int | None:
    """The axis that the ranks share out; None for what every rank has whole."""
    if name.endswith("norm.weight") or name == "rope.freqs":
        return None
    if name == "tok_embeddings.weight":
        return 1 if generation < 3 else 0
    return 1 if name.endswith(COLUMNS) else 0


def feed_forward(options: argparse.Namespace) -> int:
    """Meta's width of the feed-forward layer."""
    hidden = int(options.multiplier * int(8 * options.dim / 3))
    return options.multiple_of * -(-hidden // options.multiple_of)


def params(options: argparse.Namespace) -> dict[str, object]:
    """The content of params.json."""
    content: dict[str, object] = {
        "dim": options.dim,
        "n_layers": options.layers,
        "n_heads": options.heads,
        "n_kv_heads": options.kv_heads,
        "multiple_of": options.multiple_of,
        "ffn_dim_multiplier": options.multiplier,
        "norm_eps": 1e-5,
        "vocab_size": -1 if options.gen < 3 else options.vocab,
    }
    return content | ({"rope_theta": 500000.0} if options.gen >= 3 else {})


def _random(shape: list[int], dtype: str, generator: torch.Generator) -> torch.Tensor:
    if dtype == "fp32":
        return torch.empty(shape).normal_(0, 0.02, generator=generator)
    # Any pattern of bits will do for moving bytes, and drawing integers is several times faster;
    # the exponent is kept small so that the values are ordinary numbers.
    bits = torch.randint(0, 1 << 15, shape, dtype=torch.int16, generator=generator)
    return (bits & 0x3FFF).view(DTYPES[dtype])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--gen", type=int, choices=(1, 2, 3), default=3)
    for name, default in (
        *(("dim", 2048), ("layers", 8), ("heads", 32), ("kv-heads", 8), ("vocab", 128256)),
        *(("multiple-of", 1024), ("mp", 2), ("seed", 0)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--multiplier", type=float, default=1.5)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    return parser.parse_args()


if __name__ == "__main__":
    main()
