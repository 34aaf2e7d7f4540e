"""The measured timeline of a run: a few steps, on every rank.

    trace.json      all recorded steps of all pipelines, for chrome://tracing or ui.perfetto.dev:
                    a track for each rank of a pipeline, and one for the steps above them
    timeline.svg    one step, and below it, to the same scale, the clock's timeline of the same
                    schedule with the mean times of its actions; without a recording, the schedule

A few steps are recorded, after the first steps, which allocate memory and exchange shapes.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardwise.comm.objects import all_gather_object
from shardwise.core.mesh import PIPELINE
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_schedule import schedule_of
from shardwise.core.schedule.clock import clock
from shardwise.core.schedule.draw import as_svg
from shardwise.core.schedule.measured import Measured, as_trace, trace_text
from shardwise.core.schedule.schedule import Schedule
from shardwise.engine.engine import Engine
from shardwise.engine.one_stage import OneStage
from shardwise.techniques.pipeline.pipelined import Pipelined
from shardwise.techniques.pipeline.runtime import ActionRecorder
from shardwise.train.report.section import Drawing, ReportTable, Section

WARM = 3  # steps before the first recorded step, if the run is long enough
MOST = 5  # recorded steps
MOST_ACTIONS = 4096  # of a schedule that is drawn

TRACE = "trace.json"
PICTURE = "timeline.svg"


@dataclass(frozen=True)
class Recording:
    """The recording: `pipelines[k]` has the steps of pipeline k, `numbers` their numbers.

    `ranks[k]` are the world ranks of pipeline k, in its order.
    """

    numbers: tuple[int, ...]
    pipelines: tuple[tuple[Measured, ...], ...]
    ranks: tuple[tuple[int, ...], ...]

    @property
    def typical(self) -> Measured:
        """The step of the first pipeline with the median time."""
        by_time = sorted(self.pipelines[0], key=lambda seen: seen.timeline.makespan)
        return by_time[len(by_time) // 2]

    @property
    def bubbles(self) -> str:
        """The measured and the predicted bubble of the typical step."""
        measured, predicted = self.typical.timeline.bubble, self.typical.predicted.bubble
        return f"{measured:.1%} measured, {predicted:.1%} predicted from its actions' mean times"

    def table(self) -> ReportTable:
        """A table of all recorded steps."""
        head = ["pipeline", "step", "time, ms", "measured bubble", "predicted"]
        rows: list[list[str]] = []
        for k, steps in enumerate(self.pipelines):
            for number, seen in zip(self.numbers, steps, strict=True):
                timeline = seen.timeline
                bubbles = [f"{timeline.bubble:.1%}", f"{seen.predicted.bubble:.1%}"]
                rows.append([str(k), str(number), f"{timeline.makespan * 1e3:.1f}", *bubbles])
        return ReportTable(head, rows)


@contextmanager
def watching(passes: OneStage | Pipelined) -> Iterator[ActionRecorder]:
    """Record the steps of a run inside the `with`."""
    recorder = passes.watch = ActionRecorder(passes.device)
    try:
        yield recorder
    finally:
        passes.watch = None


class Tracing:
    """Records a run that has finished `done` of its `steps`; nothing unless `on`."""

    def __init__(self, engine: Engine, done: int, steps: int, *, on: bool) -> None:
        first = max(done, min(done + WARM, steps - MOST))
        self.engine = engine
        self.steps = range(first, min(first + MOST, steps)) if on else range(0)
        self.numbers: list[int] = []
        self.seen: list[Measured] = []  # on ranks with the first stage

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record the step (from 0) if it is one of `steps`.  All ranks must call it."""
        passes = self.engine.passes
        if step not in self.steps or not isinstance(passes, Pipelined):
            yield
            return
        with watching(passes) as recorder:
            yield
        schedule, axis = passes.staging.schedule, passes.staging.axis
        # the last run of the schedule in this step
        recorder.seen = recorder.seen[-len(schedule.rows[axis.rank]) :]
        found = recorder.gather(schedule, axis)
        self.seen += [found] if found is not None else []
        self.numbers.append(step + 1)

    def gather_recording(self) -> Recording | None:
        """The recording of all pipelines; None if empty.  All ranks must call it."""
        if not self.numbers:
            return None
        world = self.engine.world
        pipelines = tuple(tuple(seen) for seen in all_gather_object(self.seen, world) if seen)
        return Recording(tuple(self.numbers), pipelines, tuple(world.mesh.lines(PIPELINE)))


def picture(recording: Recording) -> str:
    """The typical step, measured, above its prediction, as SVG."""
    typical = recording.typical
    number = recording.numbers[recording.pipelines[0].index(typical)]
    measured, predicted = typical.timeline, typical.predicted
    title, below = (
        f"{what}: {timeline.makespan * 1e3:.1f} ms, bubble {timeline.bubble:.1%}"
        for what, timeline in ((f"step {number}, measured", measured), ("predicted", predicted))
    )
    return as_svg(measured, title, (predicted, below), unit=("ms", 1e3))


def trace(recording: Recording) -> str:
    """All steps of all pipelines as one trace: a process per pipeline, each with its own clock.

    Every event except the names has its step in `args`.
    """
    events: list[dict[str, Any]] = []
    for k, steps in enumerate(recording.pipelines):
        tracks = _names(steps[0].schedule, recording.ranks[k])
        tracks[0] |= {"args": {"name": f"pipeline {k}"}}
        for n, (number, seen) in enumerate(zip(recording.numbers, steps, strict=True)):
            later_us = (_start_s(seen) - _start_s(steps[0])) * 1e6
            found = [_shift_event(event, later_us, f"{k}.{n}") for event in _events(seen)]
            whole = _step_event(found, number, len(recording.ranks[k]))
            tracks += [event | {"args": {"step": number}} for event in (whole, *found)]
        events += [event | {"pid": k} for event in tracks]
    return trace_text(events)


def _names(schedule: Schedule, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """The events that name a process and its tracks, by stage and world rank."""
    tracks = [_stages(schedule.stages(place), rank) for place, rank in enumerate(ranks)]
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "tid": 0}]
    for tid, name in enumerate([*tracks, "steps"]):
        events.append({"name": "thread_name", "ph": "M", "tid": tid, "args": {"name": name}})
    order = {"name": "thread_sort_index", "ph": "M", "tid": len(tracks), "args": {"sort_index": -1}}
    return [*events, order]


def _stages(stages: Sequence[int], rank: int) -> str:
    plural = "s" * (len(stages) > 1)
    return f"stage{plural} {', '.join(map(str, stages))}, rank {rank}"


def _step_event(events: Sequence[dict[str, Any]], number: int, track: int) -> dict[str, Any]:
    """The event of a whole step, on a track of its own."""
    start = min(event["ts"] for event in events)
    end = max(event["ts"] + event.get("dur", 0.0) for event in events)
    times = {"ts": start, "dur": end - start}
    return {"name": f"step {number}", "cat": "step", "ph": "X", "tid": track} | times


def _events(seen: Measured) -> list[dict[str, Any]]:
    """The events of a step: actions, transfers, arrows."""
    return [event for event in json.loads(as_trace(seen))["traceEvents"] if event["ph"] != "M"]


def _shift_event(event: dict[str, Any], later_us: float, step: str) -> dict[str, Any]:
    """The event moved by `later_us`; an arrow gets an id that is unique in the trace."""
    arrow = {"id": f"{step}.{event['id']}"} if "id" in event else {}
    return event | arrow | {"ts": event["ts"] + later_us}


def _start_s(seen: Measured) -> float:
    return min(row[0].start_s for row in seen.rows if row)


def section(recording: Recording | None, plan: Plan) -> Section | None:
    """The section of the report: the recording, or the schedule; None without a pipeline."""
    if recording is not None:
        said = (
            "The bubble is the fraction of time in which the ranks of a pipeline wait. The "
            "predicted bubble is that of the schedule with the mean times of the step's actions "
            f"and messages. `{TRACE}` has all recorded steps, for chrome://tracing or "
            "ui.perfetto.dev."
        )
        drawing, rows = Drawing(picture(recording)), recording.table()
        return Section("Timeline", drawing, PICTURE, [said], rows)
    schedule = schedule_of(plan)
    if schedule is None:
        return None
    timeline = clock(schedule)
    said = (
        f"The schedule `{plan.pipeline}` if F, I and W take the same time: its bubble is "
        f"{timeline.bubble:.1%}. `--set run.trace=true` records the times of a run."
    )
    if sum(map(len, timeline.spans)) > MOST_ACTIONS:
        return Section("Timeline", sentences=[said])
    title = f"{plan.pipeline} on {schedule.ranks} ranks"
    return Section("Timeline", Drawing(as_svg(timeline, title)), PICTURE, [said])
