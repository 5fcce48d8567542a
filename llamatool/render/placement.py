"""Which device or rank holds what of a model: one line for each that differs."""

from llamatool.sizing.placement import DeviceShare, Placement
from llamatool.sizing.ranks import RankMemory
from llamatool.units import format_bytes


def memory_lines(held: RankMemory | Placement) -> list[str]:
    """What is said before loading: `placement_lines`, or one line for all ranks, which are alike.

    Example: `4 ranks: each holds 32.86 GiB of weights and 40.00 MiB of KV cache for 512 tokens`.
    """
    if isinstance(held, Placement):
        return placement_lines(held)
    return [
        f"{held.num_ranks} ranks: each holds {format_bytes(held.weight_bytes)} of weights and"
        f" {format_bytes(held.kv_bytes)} of KV cache for {held.num_tokens:,} tokens"
    ]


def placement_lines(placement: Placement) -> list[str]:
    """A line for each device, and for the CPU beside GPUs what its layers cost.

    Example: `cuda:1: layers 42 to 79 and output table; 62.52 GiB of weights and 1.19 GiB of KV
    cache for 8,192 tokens, of 71.50 GiB`.
    """
    lines = [_line(share, placement.num_tokens) for share in placement.shares]
    if (cost := placement.cpu_cost) is not None:
        lines[-1] += f"; {cost}"
    return lines


def _line(share: DeviceShare, num_tokens: int) -> str:
    held = f"{format_bytes(share.weight_bytes)} of weights"
    if share.kv_bytes:
        held += f" and {format_bytes(share.kv_bytes)} of KV cache for {num_tokens:,} tokens"
    room = share.device.usable_bytes
    limit = "" if room is None else f", of {format_bytes(room)}"
    return f"{share.device.name}: {_parts(share)}; {held}{limit}"


def _parts(share: DeviceShare) -> str:
    parts = ["embedding"] if share.has_embedding else []
    if len(share.layers) == 1:
        parts.append(f"layer {share.layers[0]}")
    elif share.layers:
        parts.append(f"layers {share.layers[0]} to {share.layers[-1]}")
    if share.has_head:
        parts.append("output table")
    return " and ".join(", ".join(parts).rsplit(", ", 1))
