"""Records which storages a step allocates and frees, for a simulation of an allocator.

After each operation the recorder compares the live storages with the previous ones. A storage whose
size changes, as that of a unit, counts as freed and allocated again.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from shardwise.core.memory_table import PREDICTED, TEMPORARY
from shardwise.prediction.first_fit import LONG, AllocationTrace, Change

#: If a storage has had several categories, the first one in this list counts.
PRECEDENCE: Final = (*(name for name in PREDICTED if name not in LONG), *LONG, TEMPORARY)
#: A moment of the step at which fragmentation is measured.
EVENT: Final = Change(-1, 0)


class LiveStorage(NamedTuple):
    """The meter's entry of a live storage, its category and its bytes."""

    entry: Any
    category: str
    stored_bytes: int


class MemoryRecorder:
    """The changes of a step."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.live: dict[Any, Change] = {}
        self.had: list[set[str]] = []  # by the number of the storage, its categories

    def look(self, alive: Sequence[LiveStorage]) -> None:
        """Record what was allocated and freed since the last call."""
        now = {one.entry: one for one in alive if one.stored_bytes}
        for entry, before in list(self.live.items()):
            if entry not in now or now[entry].stored_bytes != before.stored_bytes:
                self.changes.append(self.live.pop(entry)._replace(allocated=False))
        for entry, one in now.items():
            if entry not in self.live:
                self.live[entry] = Change(len(self.had), one.stored_bytes)
                self.had.append(set())
                self.changes.append(self.live[entry])
            self.had[self.live[entry].storage].add(one.category)

    @property
    def trace(self) -> AllocationTrace:
        """The record."""
        of = [next(name for name in PRECEDENCE if name in names) for names in self.had]
        return AllocationTrace(self.changes, dict(enumerate(of)))
