"""The memory of one step of a run, moment by moment: measured, and predicted if possible.

It is the second step of this program: the first one also allocates lasting memory.  With states on
a disk no step is measured: its update has many times the operations, each of which is looked at.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardwise.core.errors import InputError
from shardwise.engine.engine import Engine
from shardwise.engine.timeline import measuring
from shardwise.prediction.timeline import Event
from shardwise.train.memory_picture import Series, peaks_in_markdown
from shardwise.train.model import predicted_step
from shardwise.train.prepare import PreparedRun

PICTURE = "step.png"


class StepMemory:
    """Measures a step of a run that has done `done` of its `steps`."""

    def __init__(self, engine: Engine, done: int, steps: int) -> None:
        self.engine, self.step = engine, min(done + 1, steps - 1)
        if engine.optimizer.disk is not None:
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
        self.activations = {"activations": meter.peak["activations"]}

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


def lines(series: Sequence[Series]) -> Sequence[str]:
    """The section of the report, as lines of Markdown; empty without a measurement."""
    if not series:
        return ()
    said = (
        "The memory of the rank at each moment of a step. `gathered` are units that are unsharded "
        "while they are used; `kept` are tensors that autograd saved for the backward pass; "
        "`temporary` is everything else, and is not predicted."
    )
    picture = f"![step](plots/{PICTURE})"
    return ["## A step", "", picture, "", said, "", *peaks_in_markdown(series), ""]
