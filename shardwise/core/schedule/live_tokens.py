"""The memory of a schedule: the tokens alive on each rank at once, counted or in bytes."""

from collections.abc import Callable
from heapq import heappop, heappush

from shardwise.core.schedule.action import COMPUTE_OPS, Token
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.relation import makes, takes
from shardwise.core.schedule.schedule import Schedule


def activations(token: Token) -> float:
    """Count one activation for each microbatch and stage whose backward pass is not complete."""
    return float(token.kind in ("tape", "rest"))


def peaks(schedule: Schedule, size: Callable[[Token], float] = activations) -> tuple[float, ...]:
    """The peak on each rank of the total `size` of live tokens: activations, or bytes."""
    whole = lower(schedule)
    found: list[float] = []
    for row in whole.rows:
        alive = peak = 0.0
        for step in row:
            alive -= sum(map(size, takes(step, whole)))
            alive += sum(map(size, makes(step, whole)))
            peak = max(peak, alive)
        found.append(peak)
    return tuple(found)


def most_alive(schedule: Schedule, rank: int) -> list[dict[int, int]]:
    """The number of live activations of each stage of `rank`, at the rank's maximal moments.

    The peak in bytes is at one of them, for any bytes per activation of each stage.
    """
    whole = lower(schedule)
    alive = dict.fromkeys(whole.stages(rank), 0)
    found: list[dict[int, int]] = []
    for step in whole.rows[rank]:
        for token in filter(activations, takes(step, whole)):
            alive[token.stage] -= 1
        for token in filter(activations, makes(step, whole)):
            alive[token.stage] += 1
        if not any(all(n <= other[stage] for stage, n in alive.items()) for other in found):
            found = [o for o in found if any(n > alive[stage] for stage, n in o.items())]
            found.append(dict(alive))
    return found


def versions(schedule: Schedule) -> tuple[int, ...]:
    """The largest number of weight versions that each stage holds at once.

    A version is kept while it is the newest or a later action still uses it.
    """
    return tuple(_versions(schedule, stage) for stage in range(len(schedule.home)))


def _versions(schedule: Schedule, stage: int) -> int:
    if not schedule.update:
        return 1
    row = list(enumerate(schedule.actions(schedule.home[stage])))
    mine = [(k, action) for k, action in row if action.stage == stage]
    born = {0: -1} | {a.microbatch // schedule.update + 1: k for k, a in mine if a.op == "U"}
    used = {schedule.version(*a[1:]): k for k, a in mine if a.op in COMPUTE_OPS}  # the last use
    most = 1
    older: list[int] = []  # a heap of the last uses of older versions
    for newest, k in born.items():
        while older and older[0] <= k:
            heappop(older)
        most = max(most, 1 + len(older))
        heappush(older, used.get(newest, -1))
    return most
