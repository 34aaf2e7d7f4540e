"""Predicted seconds of communication: latency x messages + bytes / bandwidth, by axis and kind.

The lines are those that `shardwise doctor --save` fitted for each axis and collective (Hockney's
model).  The sum is an upper bound: part of the communication overlaps with computation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Link(NamedTuple):
    """The fitted line of a collective; `bytes_per_s` None: the time does not grow with bytes."""

    latency_s: float
    bytes_per_s: float | None

    def seconds(self, messages: int, sent_bytes: int) -> float:
        """The time of `messages` messages with `sent_bytes` bytes together."""
        rate = self.bytes_per_s
        return messages * self.latency_s + (sent_bytes / rate if rate else 0.0)


@dataclass(frozen=True)
class Cluster:
    """The links by axis and collective, such as ("dp", "all_gather")."""

    links: Mapping[tuple[str, str], Link]

    def link(self, axis: str, kind: str) -> Link | None:
        """The link of a collective on the axis, else on any axis; None if it was not measured."""
        others = (link for (_, own), link in self.links.items() if own == kind)
        return self.links.get((axis, kind)) or next(others, None)

    def seconds(self, sent: Iterable[tuple[str, int, int]]) -> dict[str, float]:
        """Seconds by "axis kind", for its messages and bytes; without what was not measured."""
        found: dict[str, float] = {}
        for name, messages, sent_bytes in sent:
            axis, _, kind = name.partition(" ")
            link = self.link(axis, kind)
            if link is not None:
                found[name] = link.seconds(messages, sent_bytes)
        return found
