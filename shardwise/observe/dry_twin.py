"""A dry run beside an engine: what each step and evaluation sends, and what rests between them.

    engine         step 0     evaluate     step 1     skipped     step 2
    dry run        step 0     evaluate     step 1                 step 2

The dry run is asked first. It takes the numbers that decide what a step does from the engine: how
many steps were taken, how many of them were not skipped, and whether an update is pending.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import nn

from shardwise.comm.unchanged import kept_values
from shardwise.core.layouts.uneven import Counts
from shardwise.core.plan.plan import Plan
from shardwise.core.tally import Key, sent_bytes
from shardwise.core.zero import Event
from shardwise.engine import memory
from shardwise.engine.engine import Engine
from shardwise.engine.options import EngineOptions
from shardwise.engine.step_end import Progress
from shardwise.observe.dry_engine import ALONE, DryRun
from shardwise.observe.measured_timeline import measuring
from shardwise.observe.meta_pass import UNKNOWN

T = TypeVar("T")


class DryTwin:
    """The dry run of an engine with these arguments, for a complete plan; `model` is not changed.

    `note` says that it computes values, because the model's forward reads some. Every method raises
    InputError like `parallelize` and `Engine.step`.
    """

    def __init__(self, model: nn.Module, plan: Plan, options: EngineOptions, rank: int) -> None:
        self._make = partial(DryRun, model, plan, options, rank)
        self.on_meta = any(p.is_meta for p in model.parameters())
        self.note = ""
        self.run: DryRun | None = None

    def step(
        self, beside: Engine | Progress | None, batch: Any, counts: Sequence[Counts] = ()
    ) -> dict[Key, int]:
        """The bytes of a step on this rank's `batch`; of the one that `beside` takes next.
        `counts` are the rows of all data ranks in each microbatch; they have as many if not given.
        """

        def act(engine: Engine) -> dict[Key, int]:
            """Take the step from where `beside` is."""
            if beside is not None:
                now = beside if isinstance(beside, Progress) else Progress.of(beside)
                now.give_to(engine)
            engine.world.counts[:] = counts
            engine.step(batch)
            engine.wait()
            return sent_bytes(engine.last)

        return self.within(batch, act)

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

        def act(engine: Engine) -> dict[Key, int]:
            """Evaluate from where `beside` is."""
            if beside is not None:
                Progress.of(beside).give_to(engine)
            before = engine.ledger.lines
            engine.world.counts[:] = counts
            engine.evaluate(batch)
            engine.wait()
            return sent_bytes(engine.ledger.since(before))

        return self.within(batch, act)

    def memory(self) -> dict[str, int]:
        """The bytes that rest on all tiers, by category."""
        assert self.run is not None
        return memory.resting(self.run.engine)

    def within(self, batch: Any, act: Callable[[Engine], T]) -> T:
        """The result of `act(engine)`; of an engine that computes values if meta does not do."""
        with ALONE, kept_values(batch):
            if self.run is None and (found := self._first(act)) is not None:
                return found
            assert self.run is not None
            with self.run.running() as engine:
                return act(engine)

    def _first(self, act: Callable[[Engine], T]) -> T | None:
        """The result of the first call; None, with a run that computes values, if meta fails."""
        try:
            self.run = self._make()
            with self.run.running() as engine:
                return act(engine)
        except UNKNOWN:
            if self.on_meta:
                raise
        self.run = self._make(real=True)
        self.note = "the model's forward reads values: the dry run has those of the batch"
        return None
