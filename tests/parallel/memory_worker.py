"""A rank that tells what it allocates: its parameters, its cache, and what loading took.

python -m tests.parallel.memory_worker JOBS OUT, with the environment of `torchrun`.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llamatool.model import storage
from llamatool.model.decoder import Decoder
from llamatool.model.images import Tiles
from llamatool.model.load import load_model
from llamatool.model.tower import TowerAttention
from tests.model.test_memory import Ledger, id_of
from tests.model.vision_models import random_tiles

Job = dict[str, Any]


def main() -> None:
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = {job["name"]: work(job, mesh) for job in jobs}
    torch.save(results, f"{sys.argv[2]}.{os.environ['RANK']}")
    dist.destroy_process_group()


def work(job: Job, mesh: DeviceMesh | None) -> dict[str, Any]:
    """What a rank finds out, or with no mesh one process: sizes always, the rest as asked."""
    images = [tiles_of(image) for image in job.get("images", [])]
    with Ledger() as ledger, Unpacked(ledger) as unpacked:
        model = load_model(
            job["path"], dtype=job["dtype"], device="cpu", mesh=mesh, max_images=len(images)
        )
    parameters = dict(model.named_parameters())
    own = {id_of(p): p.untyped_storage().nbytes() for p in parameters.values()}
    batch_size = job.get("batch_size", 1)
    cache = model.new_cache(job["num_tokens"], batch_size=batch_size, images=images)
    found: dict[str, Any] = {
        "weight_bytes": sum(parameter.nbytes for parameter in parameters.values()),
        "kv_bytes": cache.num_bytes,
        "loading": {
            "peak_bytes": ledger.peak_bytes,
            "copied_bytes": sum(own[key] for key in own.keys() & ledger.live.keys()),
            "num_unpacked": unpacked.num_elements,
            # Views of the files: how many elements, which first, and in how many bytes of file.
            "mapped": {
                name: (p.numel(), p.storage_offset(), p.untyped_storage().nbytes())
                for name, p in parameters.items()
                if id_of(p) not in ledger.live
            },
        },
        "matrices": {name: p.numel() for name, p in parameters.items() if p.ndim > 1},
    }
    if images:
        found["features"] = [model.features(image) for image in images]
        if job.get("logits", True):
            found["logits"] = image_logits(model, images, job["num_tokens"])
        found["heads"] = tower_heads(model.vision_model)
    return found


class Unpacked:
    """Counts what is unpacked from a block format, and enters it into the ledger meanwhile."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.num_elements = 0
        self._plain = storage._dequantise

    def __enter__(self) -> "Unpacked":
        storage._dequantise = self._count
        return self

    def __exit__(self, *error: object) -> None:
        storage._dequantise = self._plain

    def _count(self, packed: Any, info: Any) -> Any:
        values = self._plain(packed, info)
        self.num_elements += values.size
        live_bytes = sum(self.ledger.live.values()) + values.nbytes
        self.ledger.peak_bytes = max(self.ledger.peak_bytes, live_bytes)
        return values


def tiles_of(image: dict[str, Any]) -> Tiles:
    rows, columns = image["grid"]
    return random_tiles((rows, columns), image["side"], extra=image["extra"])


def image_logits(model: Decoder, images: Sequence[Tiles], num_tokens: int) -> Tensor:
    """Logits of a prompt with the images in it, at every position."""
    assert model.config.vision is not None
    ids = torch.arange(num_tokens)[None] % 80
    place = 3
    for image in images:
        count = 1 if model.has_cross_layers else model.vision_model.num_tokens(image)
        ids[0, place : place + count] = model.config.vision.image_token_id
        place += count + 5
    assert place <= num_tokens
    cache = model.new_cache(num_tokens, images=images)
    return model.prefill(ids, cache, images=images, logits_to_keep=num_tokens)


def tower_heads(tower: nn.Module) -> set[int]:
    """Heads of the tower's blocks that are here."""
    return {module.num_heads for module in tower.modules() if isinstance(module, TowerAttention)}


if __name__ == "__main__":
    main()
