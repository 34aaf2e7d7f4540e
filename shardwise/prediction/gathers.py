"""How often a step gathers each unit, from the order in which its modules are called.

    calls      embed ( )   blocks.0 ( )   blocks.1 ( )   norm ( )   head ( )
    gathered   embed       blocks.0       blocks.1       norm head
    freed            embed          blocks.0       blocks.1

Forward: a unit is gathered when one of its modules is called while the unit is freed. It is freed
when the next unit is gathered after its last module has returned, so the unit used last is still
gathered when backward begins. A unit that encloses others stays gathered.

Backward: a unit is gathered once, when the first gradient reaches its output. This sends nothing
for units that are still gathered (the last one, and those that enclose others) and for embeddings,
whose backward does not read the weights. (FSDP, arXiv 2304.11277, section 3.)
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.core.model_spec import ModelPass, UnitModules


@dataclass
class _Pass:
    """The state of a forward pass: which units are unsharded, and the units gathered so far."""

    units: Sequence[UnitModules]
    unsharded: set[int] = field(default_factory=set[int])
    depth: dict[int, int] = field(default_factory=dict[int, int])
    latest: int | None = None
    path: list[int] = field(default_factory=list[int])
    calls: list[int] = field(default_factory=list[int])

    def begin(self, unit: int) -> None:
        """A module of the unit is called."""
        if unit not in self.unsharded:
            self._free_latest(unit)
            self.unsharded.add(unit)
            self.path.append(unit)
        self.calls.append(unit)
        self.depth[unit] = self.depth.get(unit, 0) + 1

    def end(self, unit: int, module: str) -> None:
        """A module of the unit has returned."""
        self.depth[unit] -= 1
        own = self.units[unit]
        if not self.depth[unit] and module == own.modules[-1] and not own.encloses:
            self._free_latest(unit)
            self.latest = unit

    def _free_latest(self, now: int) -> None:
        before, self.latest = self.latest, None
        if before is not None and before != now:
            self.unsharded.discard(before)


class Order(NamedTuple):
    """The units by their gathers and by their calls, and those whose output has a gradient."""

    path: tuple[int, ...]
    calls: tuple[int, ...]
    reached: frozenset[int]


def order_of(units: Sequence[UnitModules], run: ModelPass, members: Collection[int]) -> Order:
    """The order in which a forward pass gathers `members`, by their places in `units`."""
    at = {name: number for number in members for name in units[number].modules}
    now, reached = _Pass(units), set[int]()
    for call in run.calls:
        unit = None if call.recomputed else at.get(call.module)
        if unit is None:
            continue
        if call.begins:
            now.begin(unit)
        else:
            now.end(unit, call.module)
            if any(run.values[value].trained for value in call.values):
                reached.add(unit)
    return Order(tuple(now.path), tuple(now.calls), frozenset(reached))


def gathers(
    units: Sequence[UnitModules], run: ModelPass, members: Collection[int]
) -> list[tuple[int, int]]:
    """For each unit, the number of gathers in forward and in backward of one microbatch.

    `members` are gathered only while they are used, the others are never sharded.
    """
    path, _, reached = order_of(units, run, members)
    last = path[-1] if path else None
    again = [
        number in reached and number != last and not (unit.encloses or unit.looks_up)
        for number, unit in enumerate(units)
    ]
    return [(path.count(number), int(twice)) for number, twice in enumerate(again)]
