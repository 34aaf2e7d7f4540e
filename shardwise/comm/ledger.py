"""The ledger of one rank: what it sent to other ranks, by axis, kind and phase.

    axis     the mesh axis ("dp", "tp", ...), or "tier": between the rank's device and its host
    kind     the collective (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send),
             or the copy (device_to_host, host_to_device)
    phase    when it began (open, start, forward, backward, update, check), set by the engine

A transport writes it, at the last point before a tensor goes to torch.distributed or into memory
that a peer reads, from that tensor.

Messages between two ranks are counted one by one.  If one call executes a whole collective (NCCL,
gloo, or threads that read each other's tensors), its messages are not visible.  A rank then sends
by definition what the ring bound says (core/layouts/layout.py); in an all_to_all the counts of the
other ranks, and in a broadcast the root alone, to each other rank.  If the sizes of the blocks
differ by one element, the count of a rank is the average over the ranks, to the nearest element.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from torch import Tensor

from shardwise.core.tally import TIER, Key, Tally

#: How many of the last calls a ledger can name.
RECENT: Final = 5


class Line:
    """The running totals of one line, whose errors name its axis and kind: cheaper than Tallies."""

    __slots__ = ("axis", "calls", "elements", "kind", "peers", "sent_bytes")

    def __init__(self, axis: str = "", kind: str = "") -> None:
        self.axis, self.kind = axis, kind
        self.calls = self.elements = self.sent_bytes = self.peers = 0

    def add(self, x: Tensor, numel: int, peers: int = 1) -> None:
        """Count elements like those of `x`, sent to `peers` peers. Only this writes the ledger."""
        if numel:
            self.elements += numel
            self.sent_bytes += numel * x.element_size()
            self.peers += peers

    @property
    def tally(self) -> Tally:
        return Tally(self.calls, self.elements, self.sent_bytes, self.peers)


class Ledger:
    """The running totals of one rank."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str, str], Line] = {}
        self.now = "start"
        self._recent = deque[tuple[str, str, str]](maxlen=RECENT)
        self.begun_at = 0.0  # the time of the last call (monotonic)

    @property
    def lines(self) -> dict[Key, Tally]:
        return {Key(*key): line.tally for key, line in self._lines.items()}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count everything that begins inside this block under phase `name`."""
        before, self.now = self.now, name
        try:
            yield
        finally:
            self.now = before

    def begin(self, axis: str, kind: str) -> Line:
        """Count one more call of this kind in the current phase; the line for its messages."""
        key = axis, kind, self.now
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(axis, kind)
        line.calls += 1
        self._recent.append(key)
        self.begun_at = time.monotonic()
        return line

    def recent(self) -> str:
        return ", ".join(f"{kind} {axis} ({phase})" for axis, kind, phase in tuple(self._recent))

    def since(
        self, before: Mapping[Key, Tally], apart: Mapping[Key, Tally] | None = None
    ) -> dict[Key, Tally]:
        """The totals since `before = ledger.lines`, without `apart` and unchanged lines."""
        apart, none = apart or {}, Tally()
        gone = {
            key: tally - before.get(key, none) - apart.get(key, none)
            for key, tally in self.lines.items()
        }
        return {key: tally for key, tally in gone.items() if tally != Tally()}

    def sent_bytes(self) -> int:
        return rank_bytes(self.lines)


def rank_bytes(lines: dict[Key, Tally]) -> int:
    return sum(tally.sent_bytes for key, tally in lines.items() if key.axis != TIER)


# --- volumes of collectives -----------------------------------------------------------------------


def volume(
    kind: str, numel: int, ranks: int, rank: int, root: int = 0, counts: Sequence[int] = ()
) -> tuple[int, int]:
    """Elements that `rank` sends of `numel`, or of `counts` to each rank, and to how many ranks."""
    others = ranks - 1
    match kind:
        case "all_reduce":
            return round(2 * (numel / ranks) * others), others
        case "broadcast":
            return (numel * others, others) if rank == root else (0, 0)
        case "all_gather":
            return numel * others, others
        case "reduce_scatter":
            return numel // ranks * others, others
        case "all_to_all":
            away = [count for r, count in enumerate(counts) if r != rank and count]
            return sum(away), len(away)
        case _:
            raise ValueError(f"{kind} is not a collective")
