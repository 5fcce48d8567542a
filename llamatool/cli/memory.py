"""What is said on standard error before weights are read: which part of memory will hold what."""

import sys
from typing import TYPE_CHECKING

from llamatool.cli.ranks import is_shared
from llamatool.errors import one_line

if TYPE_CHECKING:
    from llamatool.sizing.placement import Placement
    from llamatool.sizing.ranks import RankMemory


def check_device_map(device_map: str | None, device: str) -> None:
    """Refuses --device-map beside what it contradicts, before anything is fetched or read.

    Raises: UsageError.
    """
    if device_map is not None:
        from llamatool.sizing.placement import require_free_choice

        require_free_choice(device_map, device, is_shared=is_shared())


def announce_memory(held: "RankMemory | Placement") -> None:
    """Says what each rank or each device will hold."""
    from llamatool.render.placement import memory_lines

    for line in memory_lines(held):
        sys.stderr.write(one_line(line) + "\n")
    sys.stderr.flush()
