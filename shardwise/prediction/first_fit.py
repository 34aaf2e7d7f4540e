"""Fragmentation of memory: a first-fit allocator that runs a recorded trace of a step.

    | a | free |   b   |  free  | c |     free     |      1 - largest free / all free = 0.5

The allocator takes the lowest free range that is large enough. It never moves a tensor. A request
fails if no range is large enough, even if the sum of the free ranges is.
"""

from bisect import insort
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from shardwise.core.memory_table import GATHERED, KEPT

#: Categories of tensors that live from one unit to another. "temporary" ones live shorter.
LONG: Final = (GATHERED, "gradients", KEPT)
#: A capacity that fails is made larger by this part.
STEP: Final = 0.002


class Change(NamedTuple):
    """The storage of this number is allocated, or freed; of 0 bytes: an event of the step."""

    storage: int
    stored_bytes: int
    allocated: bool = True


class AllocationTrace(NamedTuple):
    """The changes of a step in their order, and the category of each storage by its number."""

    changes: Sequence[Change]
    category: dict[int, str]

    def passing(self, categories: Collection[str]) -> set[int]:
        """The storages of these categories that the step frees."""
        freed = {c.storage for c in self.changes if not c.allocated}
        return {storage for storage in freed if self.category[storage] in categories}


class FirstFitResult(NamedTuple):
    """A first-fit allocator that has run a trace.

    peak_bytes      the most that is live at once: no allocator needs less
    needed_bytes    the capacity with which no request fails
    fragmentation   with that capacity, at the event of the step where it is highest
    """

    peak_bytes: int
    needed_bytes: int
    fragmentation: float


class FirstFit:
    """A memory of `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self.ranges = [(0, 0, -1), (capacity, capacity, -1)]  # begin, stop, storage; sorted
        self.of: dict[int, tuple[int, int, int]] = {}

    def allocate(self, storage: int, stored_bytes: int) -> bool:
        """Take the lowest range that is large enough; False if there is none."""
        for (_, begin, _), (stop, _, _) in pairwise(self.ranges):
            if stop - begin >= stored_bytes:
                self.of[storage] = begin, begin + stored_bytes, storage
                insort(self.ranges, self.of[storage])
                return True
        return False

    def free(self, storage: int) -> None:
        """Give its range back."""
        self.ranges.remove(self.of.pop(storage))

    @property
    def fragmentation(self) -> float:
        """1 minus the largest request that would succeed over free bytes; 0 if nothing is free."""
        free = [stop - begin for (_, begin, _), (stop, _, _) in pairwise(self.ranges)]
        return 1 - max(free) / sum(free) if any(free) else 0.0


def run(changes: Sequence[Change], capacity: int) -> float | None:
    """The highest fragmentation at an event of a run of the trace; None if a request fails."""
    memory, highest = FirstFit(capacity), 0.0
    for change in changes:
        if not change.stored_bytes:
            highest = max(highest, memory.fragmentation)
        elif not change.allocated:
            memory.free(change.storage)
        elif not memory.allocate(change.storage, change.stored_bytes):
            return None
    return highest


def peak_bytes(changes: Sequence[Change]) -> int:
    """The most bytes that are live at once."""
    live = peak = 0
    for change in changes:
        live += change.stored_bytes if change.allocated else -change.stored_bytes
        peak = max(peak, live)
    return peak


def placed(trace: AllocationTrace, arena: Collection[str] = ()) -> FirstFitResult:
    """Place a trace by first fit.

    Storages of the categories `arena` that the step frees are in one arena in front of the others.
    Its size is their largest live total: their offsets are assumed to be planned before the step.
    """
    inside = trace.passing(arena)
    own = [c for c in trace.changes if c.storage in inside]
    others = [c for c in trace.changes if c.storage not in inside]
    reserved, capacity = peak_bytes(own), peak_bytes(others)
    while (highest := run(others, capacity)) is None:
        capacity += int(capacity * STEP) + 64
    return FirstFitResult(peak_bytes(trace.changes), reserved + capacity, highest)
