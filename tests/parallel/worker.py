"""One rank of a tensor-parallel group: does the jobs of a file, and keeps what it computed.

python -m tests.parallel.worker JOBS OUT, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
"""

# ruff: noqa: N803, N806

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llamatool.model.decoder import Decoder
from llamatool.model.fast import DecodeStep, speed_up
from llamatool.model.load import load_model
from llamatool.model.quantize import quantize_int8
from llamatool.model.ranks import Ranks

NEW_TOKENS = 6


def main() -> None:
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    check_slices(Ranks.of(mesh))
    results = {job["name"]: work(job, mesh) for job in jobs}
    torch.save(results, f"{sys.argv[2]}.{os.environ['RANK']}")
    dist.destroy_process_group()


def check_slices(ranks: Ranks) -> None:
    """Tensors whose elements lie apart are exchanged right, too."""
    x = torch.arange(12.0).reshape(3, 4)[:, :2]
    assert torch.equal(ranks.sum(x), x * ranks.size)
    mine = (torch.arange(12.0) + ranks.rank).reshape(3, 4)[:, :2]
    assert torch.equal(ranks.first(mine), x)


def work(job: dict[str, Any], mesh: DeviceMesh | None) -> dict[str, Any]:
    """What a rank finds out about a model; with no mesh, what one process does."""
    model = load_model(job["path"], dtype="float32", device="cpu", mesh=mesh)
    if job.get("int8"):
        quantize_int8(model)
    ids_BT = torch.tensor(job["ids"])
    found = {"logits": model(ids_BT, logits_to_keep=None), "plain": greedy(model, ids_BT)}
    speed_up(model)
    return {**found, "fused": greedy(model, ids_BT, DecodeStep(model))}


def greedy(
    model: Decoder, ids_BT: torch.Tensor, step: DecodeStep | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and ids of some greedy tokens, the prompt read in pieces of an odd size."""
    cache = model.new_cache(ids_BT.shape[1] + NEW_TOKENS, batch_size=len(ids_BT))
    rows = [model.prefill(ids_BT, cache, piece=7)[:, -1]]
    for _ in range(NEW_TOKENS - 1):
        token_B = rows[-1].argmax(-1)
        logits_BV = step(token_B, cache) if step else model(token_B[:, None], cache=cache)[:, -1]
        rows.append(logits_BV)
    logits_BNV = torch.stack(rows, dim=1)
    return logits_BNV, logits_BNV.argmax(-1)


if __name__ == "__main__":
    main()
