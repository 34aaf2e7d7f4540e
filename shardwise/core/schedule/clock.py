"""The clock: computes the time of each step of a schedule from given costs.

Messages overlap with computation: a tensor arrives one `hop` after another rank produced it, and a
rank waits only for a tensor it needs that has not arrived. The bubble is the fraction of all ranks'
time spent waiting, including the wait of a finished rank for the end of the step.
"""

from dataclasses import dataclass
from typing import NamedTuple

from shardwise.core.schedule.action import Action, Op, Token
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.schedule import Schedule
from shardwise.core.schedule.simulate import simulate

Cost = float | tuple[float, ...]  # one for all stages, or one per stage


@dataclass(frozen=True)
class ActionCosts:
    """The time of each kind of action, in any unit: one number, or one per stage.

    B defaults to I + W. U, GATHER, REDUCE and hop default to no time.
    """

    F: Cost = 1.0
    I: Cost = 1.0
    W: Cost = 1.0
    B: Cost | None = None
    U: Cost = 0.0
    GATHER: Cost = 0.0
    REDUCE: Cost = 0.0
    hop: float = 0.0

    def of(self, op: Op, stage: int) -> float:
        """The time of one action."""
        cost: Cost | None = 0.0 if op == "FREE" else getattr(self, op)
        if cost is None:
            return self.of("I", stage) + self.of("W", stage)
        return cost[stage] if isinstance(cost, tuple) else cost


class ActionSpan(NamedTuple):
    """An action and its time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """`spans[rank]` are the actions of a rank with their times; transfers are left out."""

    schedule: Schedule
    spans: tuple[tuple[ActionSpan, ...], ...]

    @property
    def makespan(self) -> float:
        """The time from the start of the first action to the end of the last."""
        return max((row[-1].end for row in self.spans if row), default=0.0)

    @property
    def idle(self) -> tuple[float, ...]:
        """The time that each rank waits."""
        busy = (sum(span.end - span.start for span in row) for row in self.spans)
        return tuple(self.makespan - time for time in busy)

    @property
    def bubble(self) -> float:
        """The idle fraction of the time of all ranks."""
        return sum(self.idle) / (self.makespan * len(self.spans)) if self.makespan else 0.0


def clock(schedule: Schedule, costs: ActionCosts | None = None) -> Timeline:
    """The times of all actions. Raises InputError if the schedule deadlocks."""
    costs = costs or ActionCosts()
    whole = lower(schedule)
    now = [0.0] * whole.ranks
    sent: dict[Token, float] = {}
    spans: list[list[ActionSpan]] = [[] for _ in whole.rows]
    for rank, step in simulate(whole):
        if isinstance(step, Action):
            start = now[rank]
            now[rank] += costs.of(step.op, step.stage)
            spans[rank].append(ActionSpan(step, start, now[rank]))
        elif step.op == "SEND":
            sent[step.token] = now[rank]
        else:
            now[rank] = max(now[rank], sent[step.token] + costs.hop)
    return Timeline(whole, tuple(tuple(row) for row in spans))
