"""What sharing a model costs and brings: ranks against one process, plain tensors against DTensor.

Run it as `python benchmarks/parallel.py [--quick]`. Two processes of one thread each talk over
gloo; figures are wall-clock seconds of the slower one, taken in turn within one run. They mean
something only on an idle machine with a core for each process.
"""

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from llamatool.config.huggingface import parse_huggingface
from llamatool.config.layers import split_layers
from llamatool.model.decoder import Decoder
from llamatool.model.parallel import parallelize

# 118 M parameters: so large that the products, not the messages, take the time.
SHAPE = {
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
PROMPT = 512
STEPS = 20


def main() -> None:
    quick = "--quick" in sys.argv
    if "RANK" in os.environ:
        measure(rounds=2 if quick else 7)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    sys.exit(max(rank.wait() for rank in ranks))


def measure(rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    models = {"one process": whole(), "plain tensors": plain(mesh), "DTensor": with_dtensor(mesh)}
    ids = torch.randint(32000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    expected = models["one process"](ids)
    for name, model in models.items():
        difference = float((model(ids) - expected).abs().max())
        if dist.get_rank() == 0:
            print(f"{name}: largest difference of the logits {difference:.1e}")
    tasks: dict[str, Callable[[Decoder], float]] = {"prefill of 512": prefill, "a token": decode}
    for task, work in tasks.items():
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(rounds):
            for name, model in models.items():
                is_idle = name == "one process" and dist.get_rank() != 0
                times[name].append(slower(0.0 if is_idle else work(model)))
        if dist.get_rank() == 0:
            best = {name: statistics.median(values) for name, values in times.items()}
            for name, seconds in best.items():
                ratio = best["one process"] / seconds
                print(f"{task}, {name}: {1e3 * seconds:.1f} ms, {ratio:.2f} x one process")
    dist.destroy_process_group()


def prefill(model: Decoder) -> float:
    ids = torch.randint(32000, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(PROMPT)
    start = time.perf_counter()
    model.prefill(ids, cache)
    return time.perf_counter() - start


def decode(model: Decoder) -> float:
    cache = model.new_cache(65 + STEPS)
    model.prefill(torch.zeros(1, 64, dtype=torch.long), cache)
    token = torch.zeros(1, 1, dtype=torch.long)
    model(token, cache=cache)  # ranks that come late are not counted
    start = time.perf_counter()
    for _ in range(STEPS):
        model(token, cache=cache)
    return (time.perf_counter() - start) / STEPS


def slower(seconds: float) -> float:
    """The time of the rank that took longer."""
    both = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return float(both)


def whole() -> Decoder:
    model = built()
    model.load_state_dict(weights(model), assign=True)
    return model.requires_grad_(False)


def plain(mesh: DeviceMesh) -> Decoder:
    """As `load_model` builds it, without a file."""
    model = built()
    state = weights(model)
    parallelize(model, mesh)
    for name, _ in list(model.named_parameters()):
        path, _, last = name.rpartition(".")
        cut = getattr(model.get_submodule(path), "cuts", {}).get(last)
        if cut is not None:
            parts = [state[name].narrow(cut.axis, a, b - a) for a, b in cut.ranges]
            state[name] = torch.cat(parts, cut.axis)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False)


def with_dtensor(mesh: DeviceMesh) -> Decoder:
    """The same split by PyTorch's own styles, which keep DTensors."""
    model = built()
    model.load_state_dict(weights(model), assign=True)
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index in model.layers:
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"):
            plan[f"layers.{index}.{name}_proj"] = ColwiseParallel()
        for name in ("self_attn.o", "mlp.down"):
            plan[f"layers.{index}.{name}_proj"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    weight = model.layers["0"].self_attn.q_proj.weight
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(0),)
    model.plan = split_layers(model.plan, 2)  # for the caches
    return model.requires_grad_(False)


def built() -> Decoder:
    with torch.device("meta"):
        return Decoder(parse_huggingface(SHAPE, where="a benchmark"))


def weights(model: Decoder) -> dict[str, torch.Tensor]:
    """The same on every rank and every call."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(parameter.shape, generator=generator) * 0.02
        for name, parameter in model.state_dict().items()
    }


if __name__ == "__main__":
    main()
