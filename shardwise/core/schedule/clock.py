"""The clock: the times of a schedule's actions, by a simulation that finds deadlocks.

Messages overlap with computation: a tensor arrives one `hop` after another rank produced it, and a
rank waits only for a tensor it needs that has not arrived.  Sends do not block; a receive waits for
the next message of its channel.  The bubble is the fraction of all ranks' time spent waiting,
including the wait of a finished rank for the end of the step.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.core.errors import bad
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.schedule import (
    Action,
    Op,
    Schedule,
    Step,
    Token,
    Transfer,
    makes,
    needs,
    takes,
)

Cost = float | tuple[float, ...]  # one for all stages, or one per stage


@dataclass(frozen=True)
class ActionCosts:
    """The time of each kind of action, in any unit: one number, or one per stage; B is I + W."""

    F: Cost = 1.0
    I: Cost = 1.0
    W: Cost = 1.0
    B: Cost | None = None
    U: Cost = 0.0
    REDUCE: Cost = 0.0
    hop: float = 0.0

    def of(self, op: Op, stage: int) -> float:
        cost: Cost | None = getattr(self, op)
        if cost is None:
            return self.of("I", stage) + self.of("W", stage)
        return cost[stage] if isinstance(cost, tuple) else cost


class ActionSpan(NamedTuple):
    """An action with its times."""

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
        return max((row[-1].end for row in self.spans if row), default=0.0)

    @property
    def idle(self) -> tuple[float, ...]:
        busy = (sum(span.end - span.start for span in row) for row in self.spans)
        return tuple(self.makespan - time for time in busy)

    @property
    def bubble(self) -> float:
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


# --- simulation -----------------------------------------------------------------------------------


def simulate(schedule: Schedule) -> Iterator[tuple[int, Step]]:
    """Yield a lowered schedule's steps with their ranks, in an order that respects all waits."""
    state = _Progress(schedule)
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        while (step := state.next(rank)) is not None and state.can(rank, step):
            state.do(rank, step)
            if isinstance(step, Transfer) and step.op == "SEND":
                ready.append(step.peer)
            yield rank, step
    waits = [(rank, step) for rank in range(schedule.ranks) if (step := state.next(rank))]
    if waits:
        said = ", ".join(f"rank {rank} at {step}" for rank, step in waits)
        allowed = "rows in which no two actions wait for each other"
        raise bad(f"a schedule that deadlocks: {said}", allowed, "each action before its use")


class _Progress:
    """The position of each rank in its row, its tokens, and the messages in flight."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.at = [0] * schedule.ranks
        self.here: list[set[Token]] = [set() for _ in schedule.rows]
        self.wire: dict[tuple[int, int], deque[Token]] = {}

    def next(self, rank: int) -> Step | None:
        row = self.schedule.rows[rank]
        return row[self.at[rank]] if self.at[rank] < len(row) else None

    def can(self, rank: int, step: Step) -> bool:
        if isinstance(step, Transfer) and step.op == "RECV":
            inbox = self.wire.get((step.peer, rank))
            return bool(inbox) and inbox[0] == step.token
        return self.here[rank].issuperset(needs(step, self.schedule))

    def do(self, rank: int, step: Step) -> None:
        """Apply a step to the rank's tokens and to the messages in flight."""
        self.at[rank] += 1
        if isinstance(step, Transfer) and step.op == "SEND":
            self.wire.setdefault((rank, step.peer), deque()).append(step.token)
        elif isinstance(step, Transfer):
            self.wire[step.peer, rank].popleft()
        self.here[rank].difference_update(takes(step, self.schedule))
        self.here[rank].update(makes(step, self.schedule))
