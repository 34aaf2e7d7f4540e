"""this file is a schedule as it went: the times that were measured of every step, on every rank.

From them come the drawing, the trace for a viewer (chrome://tracing, ui.perfetto.dev), and the mean
costs with which the clock predicts what the same schedule should take: the difference is what the
clock knows nothing of, such as steps that are not always equally long, and two ranks on one core.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from shardwise.core.schedule.action import Action, Op, Step, Token
from shardwise.core.schedule.clock import Costs, Span, Timeline, clock
from shardwise.core.schedule.schedule import Schedule


class Seen(NamedTuple):
    """A step and its time, in seconds; of a receive, the time it was waited for."""

    step: Step
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Measured:
    """`rows[rank]` are the steps of a lowered schedule with their times, all on one clock."""

    schedule: Schedule
    rows: tuple[tuple[Seen, ...], ...]

    @property
    def timeline(self) -> Timeline:
        """The actions with their times, from the first one's start; its bubble is the measured."""
        rows = [[seen for seen in row if isinstance(seen.step, Action)] for row in self.rows]
        zero = min((row[0].start_s for row in rows if row), default=0.0)
        return Timeline(self.schedule, tuple(tuple(_spans(row, zero)) for row in rows))

    @property
    def predicted(self) -> Timeline:
        """What the clock makes of the same schedule with the mean costs."""
        return clock(self.schedule, self.costs)

    @property
    def costs(self) -> Costs:
        """The mean time of every action, by stage, and of a message, in seconds.

        What a stage did not do costs what follows from what it did: B is I and W, and each of these
        half of B.  Otherwise nothing.
        """
        times: dict[tuple[Op, int], list[float]] = defaultdict(list)
        for row in self.rows:
            for step, start_s, end_s in row:
                if isinstance(step, Action):
                    times[step.op, step.stage].append(end_s - start_s)
        means = {key: fmean(found) for key, found in times.items()}

        def of(op: Op, otherwise: tuple[float, ...] | None = None) -> tuple[float, ...]:
            stages = range(len(self.schedule.home))
            return tuple(means.get((op, s), otherwise[s] if otherwise else 0.0) for s in stages)

        half = tuple(b / 2 for b in of("B"))
        parts = {op: of(op, half) for op in ("I", "W")}
        both = tuple(map(sum, zip(*parts.values(), strict=True)))
        whole = {op: of(op) for op in ("F", "U", "GATHER", "REDUCE")}
        return Costs(**whole, **parts, B=of("B", both), hop=self.hop)

    @property
    def hop(self) -> float:
        """The mean time of a message from its sending to its arrival, in seconds.

        Of those for which the receiver was waiting when they were sent: when the others arrived is
        not known.  0 where there are none.
        """
        sent: dict[Token, float] = {}
        received: dict[Token, Seen] = {}
        for seen in (seen for row in self.rows for seen in row):
            if seen.step.op == "SEND":
                sent[seen.step.token] = seen.start_s
            elif seen.step.op == "RECV":
                received[seen.step.token] = seen
        took = [
            seen.end_s - sent[token]
            for token, seen in received.items()
            if seen.start_s <= sent[token] <= seen.end_s
        ]
        return fmean(took) if took else 0.0


def as_trace(measured: Measured) -> str:
    """The trace as JSON, in the trace event format: a track for each rank, an arrow a message.

    Times in it are in microseconds, from the first step's start.
    """
    zero = min((row[0].start_s for row in measured.rows if row), default=0.0)
    events: list[dict[str, Any]] = [_named("process_name", 0, "pipeline")]
    numbers: dict[Token, int] = {}
    for rank, row in enumerate(measured.rows):
        events.append(_named("thread_name", rank, f"rank {rank}"))
        for step, start_s, end_s in row:
            start_us, end_us = (start_s - zero) * 1e6, (end_s - zero) * 1e6
            common = {"name": str(step), "cat": step.op, "pid": 0, "tid": rank}
            events.append(common | {"ph": "X", "ts": start_us, "dur": end_us - start_us})
            if not isinstance(step, Action):
                number = numbers.setdefault(step.token, len(numbers))
                arrow = common | {"name": str(step.token), "cat": "message", "id": number}
                ends = {"SEND": ("s", start_us), "RECV": ("f", end_us)}
                events.append(arrow | dict(zip(("ph", "ts"), ends[step.op], strict=True)))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _named(what: str, rank: int, name: str) -> dict[str, Any]:
    """The event that names a track."""
    return {"name": what, "ph": "M", "pid": 0, "tid": rank, "args": {"name": name}}


def _spans(row: list[Seen], zero: float) -> list[Span]:
    return [
        Span(seen.step, seen.start_s - zero, seen.end_s - zero)
        for seen in row
        if isinstance(seen.step, Action)
    ]
