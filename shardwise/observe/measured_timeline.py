"""The memory of a step, moment by moment: measured on this rank, and predicted without one.

    event               gathered            kept by autograd           gradients under zero3
    forward embed       embed, block 0      -                          shards
    forward block 0     block 0, block 1    of embed                   .
    loss                head                of all, and of the loss    .
    backward block 1    block 1, block 0    of blocks 0 and 1          shards, all of head
    backward block 0    block 0             of block 0                 shards, all of block 1
    update, end         -                   -                          shards

A measurement sets hooks on the modules of units and removes them at its end, so other steps are not
affected. `temporary` are the live bytes in no other category.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.plan.plan import Plan
from shardwise.core.schedule.schedule import COMPUTE_OPS, Step
from shardwise.core.tools.tree import leaves
from shardwise.core.zero import (
    ACTIVATIONS,
    GATHERED,
    KEPT,
    MEASURED,
    PREDICTED,
    TEMPORARY,
    Event,
)
from shardwise.engine import memory
from shardwise.engine.engine import Engine
from shardwise.engine.options import EngineOptions
from shardwise.engine.predict import predict_with
from shardwise.observe.dry_engine import DryRun, DryRuns
from shardwise.observe.meter import Meter
from shardwise.observe.step_bytes import SavedStorages
from shardwise.observe.work import in_backward
from shardwise.prediction.prediction import Prediction
from shardwise.techniques.data.outputs import tensors_in
from shardwise.techniques.data.units import Unit


class StepMeter(TorchDispatchMode):
    """The events of one step of one engine, on any device."""

    def __init__(self, engine: Engine, meter: Meter, batch: Any) -> None:
        super().__init__()
        self.engine, self.meter, self.saved = engine, meter, SavedStorages()
        every = leaves(batch, Tensor, objects=True)
        self.batch = {x.untyped_storage()._cdata for x in every}
        self.events: list[Event] = []
        self.open: dict[str, int] = {}  # the number of running modules of each unit
        self.microbatch = 0
        self.in_backward = False
        self.on_host: list[int] = []  # bytes of activations in host memory, at each event

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before, self.in_backward = self.in_backward, in_backward()
        if self.in_backward and not before and not self.engine.staging:
            self.see("loss")
        return func(*args, **(kwargs or {}))

    def see(self, kind: str, unit: str = "") -> None:
        """Record an event: the live bytes now, and the most since the previous event."""
        peak = self.meter.peak_bytes
        self.meter.peak_bytes = 0
        if kind == "forward" and self.events and self.events[-1].kind == "backward":
            self.microbatch += 1
        held = dict.fromkeys(MEASURED, 0)
        for category, stored_bytes in self._alive():
            held[category] += stored_bytes
        self.events.append(Event(kind, unit, self.microbatch, held, max(peak, sum(held.values()))))
        places = ((s.place, s.nbytes() or 0) for s in self.meter.storages.values())
        self.on_host.append(sum(n for place, n in places if place == (ACTIVATIONS, "host")))

    def _alive(self) -> Iterator[tuple[str, int]]:
        """The live storages of the device except the batch: category and bytes of each."""
        self.meter.now()  # tracks new tensors of the engine
        weights = (pair for flat in self.engine.flats for pair in memory.weights_of(flat))
        gathered = {t.untyped_storage()._cdata for category, t in weights if category == GATHERED}
        recomputed = self.engine.recompute.modules.values()
        inputs = {x.untyped_storage()._cdata for one in recomputed for x in one.kept_tensors()}
        saved = self.saved.keys() | inputs
        for key, storage in self.meter.storages.items():
            category = storage.place.category
            if key in gathered:
                category = GATHERED
            elif category == ACTIVATIONS:
                category = KEPT if key in saved else TEMPORARY
            if key not in self.batch and storage.place.tier == "device":
                yield category, storage.nbytes() or 0

    # --- the hooks --------------------------------------------------------------------------------

    def hook(self, stack: ExitStack) -> None:
        for unit in self.engine.data.units.order:
            for module in unit.modules:
                begin, end = partial(self.begins, unit), partial(self.ends, unit)
                stack.callback(module.register_forward_pre_hook(begin).remove)
                stack.callback(module.register_forward_hook(end).remove)

    def begins(self, unit: Unit, *_: Any) -> None:
        self.open[unit.name] = self.open.get(unit.name, 0) + 1
        if self.open[unit.name] == 1 and not in_backward():  # else it is computed again
            self.see("forward", unit.name)

    def ends(self, unit: Unit, _: nn.Module, __: Any, out: Any) -> None:
        """The module returns; its backward begins when a gradient reaches its output."""
        self.open[unit.name] -= 1
        for x in [x for x in tensors_in(out) if x.requires_grad]:
            x.register_hook(lambda _: self.see("backward", unit.name))

    def updates(self, *_: Any) -> None:
        if not any(event.kind == "update" for event in self.events):
            self.see("update")

    def acted(self, step: Step) -> None:
        if step.op in COMPUTE_OPS:
            self.see(str(step))


@contextmanager
def measuring(engine: Engine, batch: Any, *, peaks: bool = True) -> Iterator[StepMeter]:
    """The meter of a step of `engine` on `batch`; `peaks`: also of what lives between events."""
    with ExitStack() as stack:
        meter = stack.enter_context(Meter(engine, peaks=peaks))
        seen = StepMeter(engine, meter, batch)
        passes = engine.passes
        if engine.staging is not None:
            passes.watch = seen.acted
            stack.callback(setattr, passes, "watch", None)
        else:
            seen.hook(stack)
        stack.callback(engine.optimizer.torch.register_step_pre_hook(seen.updates).remove)
        stack.enter_context(saved_tensors_hooks(seen.saved.save, lambda x: x))
        stack.enter_context(seen)
        yield seen
        seen.see("end")


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
