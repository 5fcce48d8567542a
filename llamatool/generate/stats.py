"""What a run cost: time, bandwidth, memory."""

import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from llamatool.generate.engine import Timing
from llamatool.records import record

if TYPE_CHECKING:
    import torch

    from llamatool.generate.text_model import Generation, TextModel
    from llamatool.model.decoder import Decoder

_ONLY_IMAGES = re.compile(
    r"vision_model\.|multi_modal_projector\.|.*\.cross_attn\.[kv]_(proj|norm)\."
)
PROBE_BYTES = 2**28  # more than any processor's cache holds


@record
class Stats:
    """Of one answer. Rates are None where too few tokens were written to tell."""

    load_seconds: float
    timing: Timing
    kv_bytes: int
    peak_memory_bytes: int | None  # of the process, or of the GPU; None where it is not told
    read_bytes_per_token: int  # weights and the half-filled cache, as decoding reads them
    bandwidth_bytes_per_second: float | None = None  # measured here; None: not measured

    @property
    def bandwidth_limit_share(self) -> float | None:
        """Share of the speed at which memory could deliver the weights and the cache.

        Decoding one row at a time reads every weight once for each token, so tokens per second
        cannot exceed bandwidth / bytes per token.
        """
        rate = self.timing.decode_tokens_per_second
        if rate is None or not self.bandwidth_bytes_per_second:
            return None
        return rate * self.read_bytes_per_token / self.bandwidth_bytes_per_second


def measure(model: "TextModel", generation: "Generation", *, probe: bool = False) -> Stats:
    """What `generation` cost.

    Args: probe: also measures the bandwidth of the memory, which takes a moment.
    """
    decoder = model.decoder
    return Stats(
        load_seconds=model.load_seconds,
        timing=generation.timing,
        kv_bytes=generation.kv_bytes,
        peak_memory_bytes=_sum(map(peak_memory_bytes, decoder.devices)),
        read_bytes_per_token=weight_bytes_per_token(decoder) + generation.kv_bytes // 2,
        # Of several devices, each has a bandwidth of its own.
        bandwidth_bytes_per_second=bandwidth(decoder.device)
        if probe and len(decoder.devices) == 1
        else None,
    )


def weight_bytes_per_token(decoder: "Decoder") -> int:
    """Bytes of weights that decoding one token reads.

    All but the input table, of which one row is read, unless it also makes the logits; of the
    routed experts only those that a token goes to; nothing of what reads images.
    Example: Llama 3.1 8B in bfloat16 -> 15009849344 of its 16060522496 bytes.
    """
    shares = {
        f"layers.{spec.index}.mlp.experts.": spec.moe.num_experts_per_tok / spec.moe.num_experts
        for spec in decoder.plan
        if spec.moe is not None
    }
    sizes = {
        name: tensor.nbytes
        for name, tensor in (*decoder.named_parameters(), *decoder.named_buffers())
    }
    for name, module in decoder.named_modules():
        # A weight in a layout of its own is no tensor that could be counted.
        if isinstance(packed_bytes := getattr(module, "weight_bytes", None), int):
            sizes[f"{name}.packed"] = packed_bytes
    sizes = {name: size for name, size in sizes.items() if not _ONLY_IMAGES.match(name)}
    if decoder.lm_head is not None:
        del sizes["embed_tokens.weight"]
    total = 0
    for name, num_bytes in sizes.items():
        share = next((s for prefix, s in shares.items() if name.startswith(prefix)), 1)
        total += int(num_bytes * share)
    return total


def bandwidth(device: "torch.device") -> float:
    """Bytes per second that `device` reads from its memory: the best of a few passes."""
    import time

    import torch

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    block = torch.ones(PROBE_BYTES // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(5):
        start = now()
        block.sum()
        best = min(best, now() - start)
    return PROBE_BYTES / best


def peak_memory_bytes(device: "torch.device") -> int | None:
    """The most memory held so far: on a GPU what torch allocated there, else of the process.

    Pages of mapped weights count for the process, although the system may take them back.
    """
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _sum(sizes: Iterable[int | None]) -> int | None:
    """All together; None if one is unknown."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total
