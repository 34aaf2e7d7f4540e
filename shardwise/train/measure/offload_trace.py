"""The measured timeline of a run with updates in host memory or on a disk, without a pipeline.

    rank 0    main thread    F0.0 B0.0 F0.1 B0.1 ...          trace.json, for chrome://tracing
              host thread           update head   update blocks.1 ...    or ui.perfetto.dev
              disk                                     update blocks.2 .. blocks.9

A few steps are recorded, as of a pipeline (tracing.py).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.comm.objects import all_gather_object
from shardwise.core.schedule.measured import trace_text
from shardwise.engine.engine import Engine
from shardwise.engine.one_stage import OneStage
from shardwise.techniques.offload.spans import CopySpan
from shardwise.train.data.packed import publish
from shardwise.train.measure.tracing import TRACE, watching

#: Tracks of a rank.
STEPS, MAIN, HOST, DISK = "steps", "main thread", "host thread", "disk"


class OffloadTracing:
    """Records the `steps` of a run; nothing unless `on` and states are offloaded."""

    def __init__(self, engine: Engine, steps: range, *, on: bool) -> None:
        self.engine, self.steps = engine, steps
        passes = engine.passes if on and engine.plan.offload is not None else None
        self.passes = passes if isinstance(passes, OneStage) else None
        self.tracks: dict[str, list[CopySpan]] = {STEPS: [], MAIN: [], HOST: [], DISK: []}

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record the step (from 0) if it is one of `steps`."""
        if step not in self.steps or self.passes is None:
            yield
            return
        updates, start_s = self.engine.optimizer.spans, time.perf_counter()
        updates.on = True
        try:
            with watching(self.passes) as recorder:
                yield
        finally:
            updates.on = False
        self.tracks[STEPS].append(CopySpan(f"step {step + 1}", start_s, time.perf_counter()))
        self.tracks[MAIN] += [CopySpan(str(seen.step), *seen[1:]) for seen in recorder.seen]

    def write(self, folder: Path) -> str:
        """Write the trace of all ranks on rank 0; what it shows, "" if nothing was recorded.

        All ranks call it.
        """
        if self.passes is None or not self.tracks[STEPS]:
            return ""
        self.engine.flush()  # a delayed update may be under way
        track = HOST if self.engine.disk is None else DISK
        self.tracks[track] = list(self.engine.optimizer.spans.seen)
        every = all_gather_object(self.tracks, self.engine.world)
        if self.engine.world.rank == 0:
            text = trace(every)
            publish(folder / TRACE, lambda beside: beside.write_text(text, encoding="utf-8"))
        spent, beside = overlap(every[0])
        steps = len(self.tracks[STEPS])
        return (
            f"updates of offloaded states: {spent * 1e3:.0f} ms in {steps} steps, "
            f"{beside / spent if spent else 0:.0%} of it beside forward and backward ({TRACE})"
        )


def overlap(tracks: dict[str, Sequence[CopySpan]]) -> tuple[float, float]:
    """Seconds of updates, and those of them in which the main thread ran a pass."""
    updates = [*tracks[HOST], *tracks[DISK]]
    both = (
        min(update.end_s, act.end_s) - max(update.start_s, act.start_s)
        for update in updates
        for act in tracks[MAIN]
    )
    return sum(one.end_s - one.start_s for one in updates), sum(s for s in both if s > 0)


def trace(every: Sequence[dict[str, Sequence[CopySpan]]]) -> str:
    """The tracks of each rank in the trace event format, each rank from its own first step."""
    events: list[dict[str, Any]] = []
    for rank, tracks in enumerate(every):
        events.append(
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        zero = min(span.start_s for span in tracks[STEPS])
        for tid, (name, spans) in enumerate(tracks.items()):
            where = {"pid": rank, "tid": tid}
            events.append({"name": "thread_name", "ph": "M", "args": {"name": name}} | where)
            for span in spans:
                times = {
                    "ts": (span.start_s - zero) * 1e6,
                    "dur": (span.end_s - span.start_s) * 1e6,
                }
                events.append({"name": span.name, "cat": name, "ph": "X"} | where | times)
    return trace_text(events)
