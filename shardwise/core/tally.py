"""Bytes by axis, kind and phase: the lines of a ledger, counted or predicted."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import add, sub
from typing import Final, NamedTuple

#: The axis of copies between the tiers of one rank (tiers.py).
TIER: Final = "tier"


class Key(NamedTuple):
    """The key of a line of the ledger."""

    axis: str
    kind: str
    phase: str


@dataclass(frozen=True)
class Tally:
    """The totals of one line; `peers` is the number of receiving ranks, added up over the calls."""

    calls: int = 0
    elements: int = 0
    sent_bytes: int = 0
    peers: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "Tally") -> "Tally":
        return Tally(*map(sub, vars(self).values(), vars(other).values()))


def sent_bytes(lines: Mapping[Key, Tally]) -> dict[Key, int]:
    return {key: tally.sent_bytes for key, tally in lines.items() if tally.sent_bytes}


def by_kind(sent: Mapping[Key, int]) -> dict[str, int]:
    """The bytes by axis and kind, such as "dp all_gather", summed over phases, without zeros."""
    total: dict[str, int] = {}
    for (axis, kind, _), count in sent.items():
        total[f"{axis} {kind}"] = total.get(f"{axis} {kind}", 0) + count
    return {name: count for name, count in sorted(total.items()) if count}
