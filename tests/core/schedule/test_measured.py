"""A schedule as it went: its costs, its bubble and its trace, against sums done by hand."""

import json

import pytest

from shardwise.core.schedule.action import Step
from shardwise.core.schedule.draw import as_text
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.measured import Measured, TimedStep, as_trace
from tests.core.schedule.as_text import read

SCHEDULE = lower(read("rank 0 F0.0 F0.1 B0.0 B0.1\nrank 1 F1.0 B1.0 F1.1 I1.1 W1.1"))

#: When each step of the rows begins and ends, on a clock that shows 100 at the start.
TIMES = (
    "0-2 2-2.25 2.25-6 6-6.25 6.25-8.5 8.5-12 12-12.5 12.5-15 15-16",
    "0-2.5 2.5-4 4-8 8-8.25 8.25-8.5 8.5-9.5 9.5-11 11-11.25 11.25-12 12-12",
)


def seen(row: tuple[Step, ...], times: str) -> tuple[TimedStep, ...]:
    pairs = (pair.split("-") for pair in times.split())
    return tuple(
        TimedStep(step, 100 + float(a), 100 + float(b))
        for step, (a, b) in zip(row, pairs, strict=True)
    )


def whole() -> Measured:
    return Measured(SCHEDULE, tuple(map(seen, SCHEDULE.rows, TIMES)))


def test_costs_are_means_by_stage():
    """F, B, I, W of both stages; stage 0's I and W, which it does not do, are half of its B."""
    costs = whole().costs
    assert costs.F == (2.875, 1.25)
    assert costs.B == (3, 4)
    assert (costs.I, costs.W) == ((1.5, 1.5), (1.5, 0.75))
    assert (costs.REDUCE, costs.U, costs.GATHER) == ((1, 0), (0, 0), (0, 0))


def test_a_hop_is_of_messages_that_were_waited_for():
    """Two of four: act0.0 from 2 to 2.5, grad1.0 from 8 to 8.5; the others were there already."""
    assert whole().hop == 0.5
    rows = tuple(tuple(one for one in row if one.step.op != "RECV") for row in whole().rows)
    assert Measured(SCHEDULE, rows).hop == 0


def test_the_measured_timeline_begins_at_nought():
    """16 from the first start to the last end; of twice that 12.75 and 8.75 are busy."""
    timeline = whole().timeline
    assert timeline.makespan == 16
    assert timeline.spans[0][0][1:] == (0, 2)
    assert timeline.idle == (16 - 12.75, 16 - 8.75)
    assert timeline.bubble == 10.5 / 32
    assert as_text(timeline).startswith("rank 0  F0 -- -- F1 -- -- -- -- .. .. .. B0")


def test_the_prediction_is_the_clock_with_the_means():
    """F F B B and F B F I W with these costs and hops, worked out on paper."""
    predicted = whole().predicted
    starts = [[span.start for span in row] for row in predicted.spans]
    assert starts[1][:3] == [3.375, 4.625, 8.625]
    assert starts[0][:3] == [0, 2.875, 9.125]
    assert predicted.makespan == 16.125


def test_the_trace_is_of_the_format_of_trace_events():
    """A track a rank, a slice a step in microseconds, an arrow a message."""
    events = json.loads(as_trace(whole()))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(map(len, SCHEDULE.rows))
    first, second = slices[0], slices[1]
    assert (first["name"], first["cat"], first["tid"], first["pid"]) == ("F0.0", "F", 0, 0)
    assert (first["ts"], first["dur"]) == (0, 2e6)
    assert (second["name"], second["ts"], second["dur"]) == ("SEND:act0.0>1", 2e6, 0.25e6)
    named = {(e["name"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert named["thread_name", 1] == "rank 1"
    ends = {e["id"]: (e["ts"], e["tid"]) for e in events if e["ph"] == "f"}
    starts = {e["id"]: (e["ts"], e["tid"]) for e in events if e["ph"] == "s"}
    assert len(starts) == 4
    assert starts.keys() == ends.keys()
    assert all(ends[k][0] > starts[k][0] and ends[k][1] != starts[k][1] for k in starts)


@pytest.mark.parametrize("op", ["F", "B"])
def test_nothing_measured_is_nothing(op: str):
    """Rows without steps have no costs, no bubble, and a trace of tracks alone."""
    empty = Measured(SCHEDULE, ((), ()))
    assert empty.costs.of(op, 0) == 0  # pyright: ignore[reportArgumentType]
    assert empty.timeline.bubble == 0
    assert all(e["ph"] == "M" for e in json.loads(as_trace(empty))["traceEvents"])
