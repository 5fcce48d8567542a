"""What is said on standard error before weights are read: which part of memory will hold what."""

import sys
from typing import TYPE_CHECKING

from llamatool.cli.ranks import announce_ranks
from llamatool.errors import one_line

if TYPE_CHECKING:
    from llamatool.sizing.placement import Placement
    from llamatool.sizing.ranks import RankMemory


def announce_memory(held: "RankMemory | Placement") -> None:
    """Says what each rank or each device will hold."""
    from llamatool.render.placement import placement_lines
    from llamatool.sizing.placement import Placement

    if not isinstance(held, Placement):
        announce_ranks(held)
        return
    for line in placement_lines(held):
        sys.stderr.write(one_line(line) + "\n")
    sys.stderr.flush()
