"""One rank of a tensor-parallel group: does the jobs of a file, and keeps what it computed.

python -m tests.parallel.worker JOBS OUT, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llamatool.model.decoder import Decoder
from llamatool.model.load import load_model


def main() -> None:
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = {job["name"]: work(job, mesh) for job in jobs}
    torch.save(results, f"{sys.argv[2]}.{os.environ['RANK']}")
    dist.destroy_process_group()


def work(job: dict[str, Any], mesh: DeviceMesh | None) -> dict[str, Any]:
    """What a rank finds out about a model; with no mesh, what one process does."""
    model = load_model(job["path"], dtype="float32", device="cpu", mesh=mesh)
    ids_BT = torch.tensor(job["ids"])
    cache = model.new_cache(ids_BT.shape[1] + 4, batch_size=len(ids_BT))
    parameters = dict(model.named_parameters())
    return {
        "logits": model(ids_BT, logits_to_keep=None),
        **steps(model, ids_BT),
        "weight_bytes": sum(parameter.nbytes for parameter in parameters.values()),
        "cache_bytes": cache.num_bytes,
        "shapes": {name: tuple(parameter.shape) for name, parameter in parameters.items()},
    }


def steps(model: Decoder, ids_BT: torch.Tensor) -> dict[str, Any]:
    """The prompt in pieces, then five greedy tokens: once plainly, once by the fused step."""
    from llamatool.model.fast import DecodeStep, speed_up

    found = {}
    for way in ("plain", "fused"):
        if way == "fused":
            speed_up(model)
        step = DecodeStep(model) if way == "fused" else None
        cache = model.new_cache(ids_BT.shape[1] + 5, batch_size=len(ids_BT))
        logits_BV = model.prefill(ids_BT, cache, piece=7)[:, -1]
        rows = [logits_BV]
        for _ in range(4):
            token_B = rows[-1].argmax(-1)
            rows.append(
                step(token_B, cache) if step else model(token_B[:, None], cache=cache)[:, -1]
            )
        found[way] = torch.stack(rows)
    return found


if __name__ == "__main__":
    main()
