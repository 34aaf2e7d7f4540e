"""A dry run beside an engine: what each step and evaluation sends, and what rests between them.

    engine         step 0     evaluate     step 1     skipped     step 2
    dry run        step 0     evaluate     step 1                 step 2

The dry run is asked first. It takes the numbers that decide what a step does from the engine: how
many steps were taken, how many of them were not skipped, and whether an update is pending.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from shardwise.core.layouts.uneven import Counts
from shardwise.core.plan.plan import Plan
from shardwise.core.tally import Key, sent_bytes
from shardwise.core.zero import PREDICTED, Event
from shardwise.engine import memory
from shardwise.engine.engine import Engine
from shardwise.engine.options import EngineOptions
from shardwise.engine.predict import predict_with
from shardwise.engine.step_end import Progress
from shardwise.observe.dry_engine import DryRun, DryRuns
from shardwise.observe.meter import measuring
from shardwise.prediction.prediction import Prediction

T = TypeVar("T")


class DryTwin:
    """The dry run of an engine with these arguments, for a complete plan; `model` is not changed.

    `note` says that it computes values, because the model's forward reads some. Every method raises
    InputError like `DryRuns` and `Engine.step`.
    """

    def __init__(self, model: nn.Module, plan: Plan, options: EngineOptions, rank: int) -> None:
        self.dry = DryRuns(model, plan, options, rank)

    @property
    def note(self) -> str:
        return self.dry.note

    def step(
        self, beside: Engine | Progress | None, batch: Any, counts: Sequence[Counts] = ()
    ) -> dict[Key, int]:
        """The bytes of a step on this rank's `batch`; of the one that `beside` takes next.
        `counts` are the rows of all data ranks in each microbatch; they have as many if not given.
        """
        return self._sent(beside, batch, counts, lambda engine: engine.step(batch))

    def events(self, beside: Engine, batch: Any) -> tuple[dict[Key, int], Sequence[Event]]:
        """The same, and the memory at each event of the step; none if it computes values."""

        def act(engine: Engine) -> tuple[dict[Key, int], Sequence[Event]]:
            with measuring(engine, batch, peaks=False) as seen:
                sent = self.step(beside, batch)
            return sent, () if self.note else seen.events

        return self.within(batch, act)

    def evaluate(
        self, batch: Any, counts: Sequence[Counts] = (), beside: Engine | None = None
    ) -> dict[Key, int]:
        """The bytes of an evaluation; of the one that `beside` makes next."""
        return self._sent(beside, batch, counts, lambda engine: engine.evaluate(batch))

    def _sent(
        self,
        beside: Engine | Progress | None,
        batch: Any,
        counts: Sequence[Counts],
        call: Callable[[Engine], object],
    ) -> dict[Key, int]:
        def act(engine: Engine) -> dict[Key, int]:
            """Call it from where `beside` is."""
            if beside is not None:
                now = beside if isinstance(beside, Progress) else Progress.of(beside)
                now.give_to(engine)
            before = engine.ledger.lines
            engine.world.counts[:] = counts
            call(engine)
            engine.wait()
            return sent_bytes(engine.ledger.since(before))

        return self.within(batch, act)

    def memory(self) -> dict[str, int]:
        assert self.dry.run is not None
        return memory.resting(self.dry.run.engine)

    def within(self, batch: Any, act: Callable[[Engine], T]) -> T:
        def acted(run: DryRun) -> T:
            with run.running() as engine:
                return act(engine)

        return self.dry.within(batch, acted)


# --- the memory of a step, moment by moment, without an engine ------------------------------------


def predict_events(
    model: nn.Module,
    plan: Plan | str,
    batch: Any,
    options: EngineOptions | None = None,
    rank: int = 0,
) -> tuple[Prediction, tuple[Event, ...]]:
    """The result of `sw.predict`, and the memory of `rank` at each event of a step after the first.
    Temporary bytes are left out: they depend on the kernels and messages of a device.  Raises
    InputError like `sw.predict`.
    """
    options = options or EngineOptions()
    found = predict_with(model, plan, batch, options, rank)
    events = dry_events(model, found.plan, batch, options, rank)
    return found, tuple(
        event._replace(by_category={name: event.by_category[name] for name in PREDICTED})
        for event in events
    )


def dry_events(
    model: nn.Module, plan: Plan, batch: Any, options: EngineOptions, rank: int
) -> tuple[Event, ...]:
    """The events of the third step of a dry run. Raises InputError like `DryRuns`."""

    def act(run: DryRun) -> tuple[Event, ...]:
        """Run three steps."""
        with run.running() as engine:
            for _ in range(2):  # the first step learns the order of units
                engine.step(batch)
            with measuring(engine, batch, peaks=False) as seen:
                engine.step(batch)
        return tuple(seen.events)

    return DryRuns(model, plan, options, rank).within(batch, act)
