"""The sizes of the slots of an arena (comm/tiers/arena.py)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

#: Slots begin at multiples of this, as an allocator's tensors do.
ALIGNMENT: Final = 512

#: Sums of gradients under way at once, where each holds memory of its own.
IN_FLIGHT: Final = 2

#: How many slots there are of each size in bytes.
Slots = Mapping[int, int]


def aligned(nbytes: int) -> int:
    """So many bytes, rounded up to where the next slot may begin."""
    return nbytes + -nbytes % ALIGNMENT


def arena_bytes(slots: Slots) -> int:
    """The bytes of an arena."""
    return sum(aligned(size) * count for size, count in slots.items())


def most_at_once(moments: Iterable[Counter[int]]) -> Slots:
    """As many slots of each size as tensors of that size lie in the arena at once."""
    found: Counter[int] = Counter()
    for moment in moments:
        found |= moment
    return dict(found)


def gradient_slots(units: Sequence[Sequence[int]], in_flight: int) -> Slots:
    """The slots for gradients that are reduced and freed unit by unit.

    `units` has the bytes of each gradient of each unit, in the order of the forward pass. While one
    unit's gradients are computed, those of `in_flight` units after it are being reduced.
    """
    sizes = [Counter(unit) for unit in units if unit]
    windows = (sizes[k : k + in_flight + 1] for k in range(len(sizes)))
    return most_at_once(sum(window, Counter[int]()) for window in windows)
