"""The profile of a run: what a few steps did on each rank, by torch.profiler; and the schedule.

    profile/rank-0.json      kernels, messages and the actions of a pipeline, for ui.perfetto.dev
    profile/rank-0.pickle    on CUDA, every allocation, for pytorch.org/memory_viz
    timeline.svg             the schedule of a pipeline

The first steps, which allocate memory and exchange shapes, are left out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import profiler

from shardwise.comm.world import World
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_schedule import schedule_of
from shardwise.core.schedule.clock import clock
from shardwise.core.schedule.draw import as_svg
from shardwise.train.report.section import Drawing, Section

WARM, STEPS = 3, 5  # steps before the first of the profile, if the run is long enough; of it
MOST_ACTIONS = 4096  # of a schedule that is drawn

PICTURE, FOLDER = "timeline.svg", "profile"
#: Allocations that a memory snapshot has at most.
_ALLOCATIONS: Final = 100_000


@contextmanager
def profiling(world: World, folder: Path, steps: int, *, on: bool) -> Iterator[Callable[[], Any]]:
    """A function to call after each of so many steps; nothing is recorded unless `on`."""
    if not on:
        yield lambda: None
        return
    warm = max(0, min(WARM, steps - STEPS))
    path, cuda = folder / FOLDER / f"rank-{world.rank}.json", world.device.type == "cuda"
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(found: Any) -> None:
        found.export_chrome_trace(str(path))
        if cuda:
            torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
            torch.cuda.memory._record_memory_history(enabled=None)

    if cuda:
        torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
    waits, warmup = max(0, warm - 1), min(1, warm)
    when = profiler.schedule(wait=waits, warmup=warmup, active=min(STEPS, steps), repeat=1)
    with profiler.profile(schedule=when, on_trace_ready=write) as found:
        yield found.step


def section(plan: Plan) -> Section | None:
    """The section of the report: the schedule; None without a pipeline."""
    schedule = schedule_of(plan)
    if schedule is None:
        return None
    timeline = clock(schedule)
    said = (
        f"The schedule `{plan.pipeline}` if F, I and W take the same time: its bubble is "
        f"{timeline.bubble:.1%}. `--set run.profile=true` records what the ranks do."
    )
    if sum(map(len, timeline.spans)) > MOST_ACTIONS:
        return Section("Timeline", sentences=[said])
    title = f"{plan.pipeline} on {schedule.ranks} ranks"
    return Section("Timeline", Drawing(as_svg(timeline, title)), PICTURE, [said])
