"""How often a rank gathers each sharded unit in one run of its row of a schedule.

    F0.0    embed, block 0, block 1, norm     each freed when the next is used; norm stays gathered
    B0.0    (norm), block 1, block 0          norm is still gathered; block 0 stays gathered
    F0.1    embed, block 0, block 1, norm     block 0 is freed when embed is used

If a unit is called several times, it is freed after each use in forward, and after its last in
backward.  The unit used last stays gathered until another one is used, so the next action may reuse
it.  Units that a stage reads outside of its layers (a root unit, tied parameters) stay gathered
while the rank is in that stage. W reads no weights, unless I did nothing, as in the first stage.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from shardwise.core.schedule.action import COMPUTE_OPS, Action


class UnitPath(NamedTuple):
    """The units of one stage, in the order in which its layers use them.

    around     units that stay gathered while the rank is in the stage
    forward    the units of each F, one for each call
    backward   the units of each B, one for each call, in reverse; None: not read (an embedding)
    graded     whether the stage's input requires a gradient, which I computes
    """

    around: tuple[Hashable, ...]
    forward: tuple[Hashable, ...]
    backward: tuple[Hashable | None, ...]
    graded: bool


class Gather(NamedTuple):
    """A unit, gathered in the "forward" or in the "backward" phase."""

    unit: Hashable
    phase: str


def unit_gathers(row: Iterable[Action], paths: Mapping[int, UnitPath]) -> Counter[Gather]:
    """The number of gathers of each unit in a run of `row`; `paths` are those of its stages."""
    found: Counter[Gather] = Counter()
    whole: set[Hashable] = set()
    for op, stage, _ in (action for action in row if action.op in COMPUTE_OPS):
        path, phase = paths[stage], "forward" if op == "F" else "backward"
        whole &= {*path.around, *path.forward}
        found.update(Gather(unit, phase) for unit in path.around if unit not in whole)
        whole |= set(path.around)
        if op != "F" and reads(op, path.graded):
            whole &= {*path.around, *path.backward[:1]}
        for unit, used_again in _uses(path, op):
            if unit is not None and unit not in whole:
                found[Gather(unit, phase)] += 1
            whole = {*path.around, *(whole & used_again), *(() if unit is None else (unit,))}
    return found


def _uses(path: UnitPath, op: str) -> Iterable[tuple[Hashable | None, set[Hashable | None]]]:
    """The units that an action uses, each with those that stay gathered for a later use in it."""
    if op == "F":
        return [(unit, set()) for unit in path.forward]
    back = path.backward if reads(op, path.graded) else ()
    return [(unit, {*back[at + 1 :]}) for at, unit in enumerate(back)]


def whole_bytes(path: UnitPath, stored_bytes: Mapping[Hashable, int], ahead: int = 1) -> int:
    """The most bytes that the gathered units of a stage take at once.

    These are the unit in use, the next `ahead` ones, which are being gathered, and those around; in
    backward also those that are used again.
    """
    back = path.backward
    windows = [{*path.forward[at : at + ahead + 1]} for at in range(len(path.forward))]
    windows += [
        {*back[at : at + ahead + 1], *({*back[:at]} & {*back[at:]})} for at in range(len(back))
    ]
    most = max((sum(stored_bytes[u] for u in w if u is not None) for w in windows), default=0)
    return sum(stored_bytes[unit] for unit in path.around) + most


def reads(op: str, graded: bool) -> bool:
    """Whether an action computes with the weights themselves."""
    return {"I": graded, "W": not graded}.get(op, True)
