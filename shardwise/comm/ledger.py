"""this file is the ledger: what every move sent, by axis, kind and phase.

    axis     the mesh axis the move went along ("dp", "tp", ...)
    kind     what was done (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send)
    phase    when it was done (start, forward, backward, update, check): the engine says

A rank counts what *it* hands to other ranks.  Nothing is sampled or estimated: the door writes a
line for each call, from the tensor it was given.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple


class Key(NamedTuple):
    """One line of the ledger."""

    axis: str
    kind: str
    phase: str


@dataclass(frozen=True)
class Tally:
    """How much went through one line: calls, elements and bytes this rank sent."""

    calls: int = 0
    elements: int = 0
    sent_bytes: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.calls + other.calls,
            self.elements + other.elements,
            self.sent_bytes + other.sent_bytes,
        )

    def __sub__(self, other: "Tally") -> "Tally":
        return Tally(
            self.calls - other.calls,
            self.elements - other.elements,
            self.sent_bytes - other.sent_bytes,
        )


def _nothing() -> list[int]:  # by name, so that a ledger can be pickled
    return [0, 0, 0]


class Ledger:
    """The running totals of one rank."""

    def __init__(self) -> None:
        #: calls, elements, bytes; a Tally made for each write would take longer than the write
        self._totals: defaultdict[tuple[str, str, str], list[int]] = defaultdict(_nothing)
        self.now = "start"

    @property
    def lines(self) -> dict[Key, Tally]:
        """The totals so far, as a new dict each time."""
        return {Key(*key): Tally(*totals) for key, totals in self._totals.items()}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Write everything that is sent inside this block under phase `name`."""
        before, self.now = self.now, name
        try:
            yield
        finally:
            self.now = before

    def write(self, axis: str, kind: str, elements: int, element_bytes: int) -> None:
        """Add one call that sent `elements` elements of `element_bytes` bytes each."""
        totals = self._totals[axis, kind, self.now]
        totals[0] += 1
        totals[1] += elements
        totals[2] += elements * element_bytes

    def copy(self) -> dict[Key, Tally]:
        """The totals so far, to be given to `since` later."""
        return self.lines

    def since(self, before: dict[Key, Tally]) -> dict[Key, Tally]:
        """What was written after `before = ledger.copy()`, without lines that did not change."""
        gone = {key: tally - before.get(key, Tally()) for key, tally in self.lines.items()}
        return {key: tally for key, tally in gone.items() if tally != Tally()}

    def sent_bytes(self) -> int:
        """All bytes this rank has sent."""
        return sum(tally.sent_bytes for tally in self.lines.values())
