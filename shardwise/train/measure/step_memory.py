"""The memory of one step of a run, moment by moment: measured, and predicted if possible.

It is the second step of this program: the first one also allocates lasting memory.  With states on
a disk no step is measured: its update has many times the operations, each of which is looked at.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.core.errors import InputError
from shardwise.core.memory_table import ACTIVATIONS, TEMPORARY
from shardwise.engine.engine import Engine
from shardwise.observe.measured_timeline import measuring
from shardwise.prediction.memory_timeline import Event
from shardwise.train.measure.memory_picture import Series, peak_rows
from shardwise.train.model import predicted_step
from shardwise.train.prepare import PreparedRun
from shardwise.train.report.section import Check, ReportTable, Section, StepPicture
from shardwise.train.run_folder import PLOTS

PICTURE = "step.png"


class StepMemory:
    """Measures a step of a run that has done `done` of its `steps`."""

    def __init__(self, engine: Engine, done: int, steps: int) -> None:
        self.engine, self.step = engine, min(done + 1, steps - 1)
        if engine.disk is not None:
            self.step = -1
        self.events: Sequence[Event] = ()
        self.batch: Any = None
        self.activations: dict[str, int] = {}  # at the peak of the step

    @contextmanager
    def measuring(self, step: int, batch: Any) -> Iterator[None]:
        """Measure inside the `with`, if `step`, counted from 0, is the one to measure."""
        if step != self.step:
            yield
            return
        with measuring(self.engine, batch) as meter:
            yield
        self.events, self.batch = meter.events, batch
        self.activations = {ACTIVATIONS: meter.peak[ACTIVATIONS]}

    def series(self, prepared: PreparedRun) -> Sequence[Series]:
        """The step of this rank, measured and, if possible, predicted."""
        if not self.events:
            return ()
        title = f"step {self.step + 1}, rank {self.engine.world.rank}"
        found = [Series(f"{title}, measured", self.events)]
        try:
            predicted = predicted_step(prepared, self.engine, self.batch)
        except InputError:  # the timeline of this plan is not predicted
            return found
        return [Series(f"{title}, predicted", predicted), *found]


def check(series: Sequence[Series]) -> Check:
    """Whether each event has the predicted bytes of each category that is predicted.

    If not, how far apart the peaks are: kernels may keep less than the model's own operations.
    """
    name = "memory in a step"
    if len(series) < 2:
        return Check(name, None, "not predicted" if series else "not measured")
    predicted, measured = ([_predictable(event) for event in one.events] for one in series)
    if measured == predicted:
        return Check(name, True)
    most, expected = (max(sum(of[-1].values()) for of in one) for one in (measured, predicted))
    share = most / expected - 1
    return Check(name, None, f"peak {abs(share):.1%} {'above' if share > 0 else 'below'} predicted")


def _predictable(event: Event) -> tuple[str, str, int, dict[str, int]]:
    kept = {name: n for name, n in event.by_category.items() if name != TEMPORARY}
    return event.kind, event.unit, event.microbatch, kept


def section(series: Sequence[Series], config: Path) -> Section:
    """The section of the report; without a measurement, how to get one for the configuration."""
    if not series:
        how = f"`shardwise predict --config {config} --measure --timeline step.svg`"
        return Section("A step", sentences=[f"No step of this run was measured. {how} does that."])
    said = (
        "The memory of the rank at each moment of a step. `gathered` are units that are unsharded "
        "while they are used; `kept` are tensors that autograd saved for the backward pass; "
        "`temporary` is everything else, and is not predicted."
    )
    alone = "The events of a step are not predicted under this plan, so there is no comparison."
    head, *rows = peak_rows(series)
    return Section(
        "A step",
        StepPicture(series),
        f"{PLOTS}/{PICTURE}",
        [said, *[alone] * (len(series) == 1)],
        ReportTable(head, rows),
    )
