"""Places for the further needles of a prompt: evenly over what the asked-for needle leaves free.

Between two needles stands nothing or at least `gap` tokens, because no shorter stretch could be
filled with whole sentences; further needles always keep that distance from everything.
"""

from collections.abc import Iterable, Sequence

from llamatool.records import record

PHASES = 1_000  # steps of the random shift of the whole row


@record
class Stretch:
    """Tokens `start` to `stop - 1` of a prompt's text, without a needle."""

    start: int
    stop: int


def free_stretches(
    slots: Sequence[int], first: int, end: int, width: int, borders: Iterable[int] = ()
) -> list[Stretch]:
    """What slots of `width` tokens leave free of tokens `first` to `end - 1`, in order.

    Args: borders: positions that no needle may lie across; a stretch ends there.
    Example: slots of 10 tokens at 0 and 50 of 100 -> 10 to 49 and 60 to 99.
    """
    cuts = [(slot, slot + width) for slot in slots] + [(border, border) for border in borders]
    found, position = [], first
    for start, stop in sorted(cuts):
        if start > position:
            found.append(Stretch(position, min(start, end)))
        position = max(position, stop)
    if end > position:
        found.append(Stretch(position, end))
    return found


def room(stretches: Iterable[Stretch], width: int, gap: int) -> int:
    """How many needles of `width` tokens the stretches hold, `gap` tokens around each.

    Example: 100 tokens, width 10, gap 5 -> 6 (6 needles and 7 gaps are 95 tokens).
    """
    return sum(_room_of(stretch, width, gap) for stretch in stretches)


def spread(
    stretches: Sequence[Stretch], how_many: int, phase: int, width: int, gap: int
) -> list[int]:
    """Starts of `how_many` needles, evenly over the stretches; at most `room` of them.

    Args: phase: 0 to 999, where between its borders each needle's share of the text it stands.
    Example: 2 of them with phase 500 in 1,000 free tokens, width 10, gap 5 -> 250 and 745.
    """
    # A stretch counts by the needles that it has room for: points at a distance of at least one
    # can then never be too many for it. Whole numbers, so that no rounding moves one out of it.
    rooms = [_room_of(stretch, width, gap) for stretch in stretches]
    unit = PHASES * how_many
    points = [(PHASES * number + phase) * sum(rooms) for number in range(how_many)]
    found: list[int] = []
    passed = 0
    for stretch, places in zip(stretches, rooms, strict=True):
        inside = [p - passed for p in points if passed <= p < passed + places * unit]
        span = stretch.stop - stretch.start - width - 2 * gap
        wanted = [stretch.start + gap + p * span // (places * unit) for p in inside]
        found += _apart(wanted, stretch, width, gap)
        passed += places * unit
    return found


def _room_of(stretch: Stretch, width: int, gap: int) -> int:
    return max(0, (stretch.stop - stretch.start - gap) // (width + gap))


def _apart(wanted: Sequence[int], stretch: Stretch, width: int, gap: int) -> list[int]:
    """Places near the wanted ones that keep their distance."""
    starts = list(wanted)
    for number in range(1, len(starts)):
        starts[number] = max(starts[number], starts[number - 1] + width + gap)
    latest = stretch.stop - width - gap
    for number in range(len(starts) - 1, -1, -1):
        starts[number] = min(starts[number], latest)
        latest = starts[number] - width - gap
    return starts
