"""The memory of one step of a run, moment by moment: measured, and predicted where it can be.

It is the second step that this program makes: the first also makes what lasts.
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
from shardwise.train.prepare import Prepared

PICTURE = "step.png"


class StepMemory:
    """Measures a step of a run that has done `done` of its `steps`."""

    def __init__(self, engine: Engine, done: int, steps: int) -> None:
        self.engine, self.step = engine, min(done + 1, steps - 1)
        self.events: Sequence[Event] = ()
        self.batch: Any = None
        self.activations: dict[str, int] = {}  # at the peak of the step

    @contextmanager
    def measuring(self, step: int, batch: Any) -> Iterator[None]:
        """Measure what is done within, if `step`, from 0, is the one."""
        if step != self.step:
            yield
            return
        with measuring(self.engine, batch) as meter:
            yield
        self.events, self.batch = meter.events, batch
        self.activations = {"activations": meter.peak["activations"]}

    def series(self, prepared: Prepared) -> Sequence[Series]:
        """The step of this rank, measured and, where that is possible, predicted."""
        if not self.events:
            return ()
        title = f"step {self.step + 1}, rank {self.engine.world.rank}"
        found = [Series(f"{title}, measured", self.events)]
        try:
            predicted = predicted_step(prepared, self.engine, self.batch)
        except InputError:  # of this plan the moments are not predicted
            return found
        return [Series(f"{title}, predicted", predicted), *found]


def lines(series: Sequence[Series]) -> Sequence[str]:
    """The report's part on it, as lines of Markdown; none where nothing was measured."""
    if not series:
        return ()
    said = (
        "What the rank stores at each moment of a step. Gathered are units that are whole for the "
        "time of their use; kept is what autograd has saved for the backward pass; temporary is "
        "everything else, and is not predicted."
    )
    picture = f"![step](plots/{PICTURE})"
    return ["## A step", "", picture, "", said, "", *peaks_in_markdown(series), ""]
