"""Measured schedules: the measured time of every step on every rank.

They give the drawing, a trace for viewers (chrome://tracing, ui.perfetto.dev), and the mean costs
from which the clock predicts the schedule's time. The difference between the two is what the clock
does not model: steps of varying length, two ranks on one core.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from shardwise.core.schedule.action import Action, Op, Step, Token
from shardwise.core.schedule.clock import ActionCosts, ActionSpan, Timeline, clock
from shardwise.core.schedule.schedule import Schedule


class TimedStep(NamedTuple):
    """A step and its time in seconds; for a receive, the time spent waiting."""

    step: Step
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Measured:
    """`rows[rank]` are the steps of a lowered schedule with times on a common clock."""

    schedule: Schedule
    rows: tuple[tuple[TimedStep, ...], ...]

    @property
    def timeline(self) -> Timeline:
        """The actions with their times, counted from the start of the first."""
        rows = [[seen for seen in row if isinstance(seen.step, Action)] for row in self.rows]
        zero = min((row[0].start_s for row in rows if row), default=0.0)
        return Timeline(self.schedule, tuple(tuple(_spans(row, zero)) for row in rows))

    @property
    def predicted(self) -> Timeline:
        """The clock's timeline of the same schedule with the mean costs."""
        return clock(self.schedule, self.costs)

    @property
    def costs(self) -> ActionCosts:
        """The mean time of every kind of action by stage, and of a message, in seconds.

        Where an action was not measured, B is I + W, I and W are half of B, and others are 0.
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
        return ActionCosts(**whole, **parts, B=of("B", both), hop=self.hop)

    @property
    def hop(self) -> float:
        """The mean time from a message's send to its arrival, in seconds; 0 if unknown.

        Counts only messages that the receiver was already waiting for, since the arrival time of
        others is not known.
        """
        sent: dict[Token, float] = {}
        received: dict[Token, TimedStep] = {}
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
    """The trace as JSON in the trace event format: a track per rank, an arrow per message.

    Times are in microseconds from the start of the first step.
    """
    zero = min((row[0].start_s for row in measured.rows if row), default=0.0)
    events = [named_event("process_name", 0, "pipeline")]
    numbers: dict[Token, int] = {}
    for rank, row in enumerate(measured.rows):
        events.append(named_event("thread_name", rank, f"rank {rank}"))
        for step, start_s, end_s in row:
            start_us, end_us = (start_s - zero) * 1e6, (end_s - zero) * 1e6
            common = {"name": str(step), "cat": step.op, "pid": 0, "tid": rank}
            events.append(span_event(str(step), step.op, rank, (start_s - zero, end_s - zero)))
            if not isinstance(step, Action):
                number = numbers.setdefault(step.token, len(numbers))
                arrow = common | {"name": str(step.token), "cat": "message", "id": number}
                ends = {"SEND": ("s", start_us), "RECV": ("f", end_us)}
                events.append(arrow | dict(zip(("ph", "ts"), ends[step.op], strict=True)))
    return trace_text(events)


def trace_text(events: list[dict[str, Any]]) -> str:
    """The file of events."""
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def span_event(name: str, kind: str, track: int, between_s: tuple[float, float]) -> dict[str, Any]:
    """The event of what runs on a track between two times."""
    start_us, end_us = (1e6 * each for each in between_s)
    common = {"name": name, "cat": kind, "pid": 0, "tid": track}
    return common | {"ph": "X", "ts": start_us, "dur": end_us - start_us}


def named_event(what: str, track: int, name: str) -> dict[str, Any]:
    """The event that names a track, or with "process_name" all of them."""
    return {"name": what, "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}


def _spans(row: list[TimedStep], zero: float) -> list[ActionSpan]:
    return [
        ActionSpan(seen.step, seen.start_s - zero, seen.end_s - zero)
        for seen in row
        if isinstance(seen.step, Action)
    ]
