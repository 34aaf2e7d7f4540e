"""The meter: live tensor bytes by category and tier, their peak in a step, and what no category
holds.

The meter tracks the storages of every operation's results by weak references, on any device; it
measures neither the process nor the allocator.  After each operation it adds up the current sizes
of live storages (units resize theirs to zero and back).

    parameters, gradients, optimizer, buffers    the engine's own, also while gradients are reduced
    activations                                  all other tensors created under the meter: those
                                                 that autograd saves, and received messages

Storages are on the device, or in host memory (comm/tiers/tiers.py).  The result of an operation is
where its operands are.  What a kernel takes and returns inside one operation is not seen.  Without
`peaks` nothing is added up after an operation, which takes most of the time; `now` counts what is
live.

`Live` tracks the result of every operation while an engine is built and steps, wherever it is kept
(an attribute, a list, a closure, the autograd graph), and the model's original weights.  A tensor
that an operation takes and that is not tracked was created elsewhere (a batch, another rank's
tensor, a mailbox) and is ignored.  A dispatch mode belongs to its thread, so in a world of threads
each rank tracks its own.  Memory outside torch, and storages that no torch operation created, are
not tracked.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.schedule.schedule import COMPUTE_OPS, Step
from shardwise.core.tools.tree import leaves
from shardwise.core.zero import (
    ACTIVATIONS,
    GATHERED,
    KEPT,
    MEASURED,
    PART_OF,
    TEMPORARY,
    Event,
    Tier,
)
from shardwise.engine import memory
from shardwise.engine.engine import Engine
from shardwise.observe.step_bytes import SavedStorages
from shardwise.observe.work import UNWRITTEN, call_tensors, in_backward
from shardwise.techniques.data.outputs import tensors_in
from shardwise.techniques.data.units import Unit


class MeterKey(NamedTuple):
    """The key of a count of bytes."""

    category: str
    tier: Tier = "device"


class Storage:
    """A weak reference to a storage, which prevents reuse of its address."""

    def __init__(self, storage: UntypedStorage, place: MeterKey) -> None:
        self.weak, self.place = StorageWeakRef(storage), place

    def nbytes(self) -> int | None:
        storage = UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        return None if storage is None else storage.nbytes()


class Meter(TorchDispatchMode):
    """Measures one engine while entered; it may be entered again for a later step."""

    def __init__(self, engine: "Engine", *, peaks: bool = True) -> None:
        super().__init__()
        self.engine, self.peaks = engine, peaks
        self.storages: dict[int, Storage] = {}
        self.peak_bytes = 0  # of the device
        self.most: dict[tuple[str, str], int] = {}  # the peak of each category by itself
        self.lock = RLock()  # a delayed update runs on a thread of its own

    def __enter__(self) -> Self:
        self.peak_bytes, self.most = 0, {}
        self._look()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        # a mode of the model would see each look at a tensor
        with torch._C.DisableTorchFunction(), self.lock:
            self._track_results(args, made)
            if not self.peaks:
                self._claim_gradients()
            elif func._overloadpacket.__name__ not in UNWRITTEN:
                self._look()
        return made

    def now(self) -> dict[MeterKey, int]:
        """Bytes by category and tier that are live now."""
        self._claim()
        total: dict[MeterKey, int] = {}
        for key, storage in list(self.storages.items()):
            nbytes = storage.nbytes()
            if nbytes is None:
                del self.storages[key]
            elif nbytes:
                total[storage.place] = total.get(storage.place, 0) + nbytes
        return total

    # --- tracking -----------------------------------------------------------------------------

    def _track_results(self, args: Any, made: Any) -> None:
        place = None
        for leaf in call_tensors(made):
            if leaf.layout == torch.strided:
                known = leaf.untyped_storage()._cdata in self.storages
                if not known and not self._elsewhere(leaf, args):
                    place = place or MeterKey(ACTIVATIONS, self._tier(args))
                    self._track(leaf, place)

    def _elsewhere(self, x: Tensor, args: Any) -> bool:
        """Whether `x` is an argument's memory that was made elsewhere: the batch, a message."""
        key = x.untyped_storage()._cdata
        strided = (y for y in call_tensors(args) if y.layout == torch.strided)
        known = any(y.untyped_storage()._cdata == key for y in strided)
        return known and self.engine.world.tiers.of(x) == "device"

    def _look(self) -> None:
        found = self.now()
        on_device = sum(count for place, count in found.items() if place.tier == "device")
        self.peak_bytes = max(self.peak_bytes, on_device)
        self.most |= {place: max(n, self.most.get(place, 0)) for place, n in found.items()}

    def _track(self, tensor: Tensor, place: MeterKey) -> None:
        """Track a storage, unless it is in an arena, which is counted with it."""
        storage = tensor.untyped_storage()
        without_memory = storage.device.type == "meta" and not self.engine.world.meta
        if without_memory or self.engine.world.arenas.hold(tensor):
            return
        tier = self.engine.world.tiers.of(tensor)
        if tier != "device":
            place = place._replace(tier=tier)
        self.storages[storage._cdata] = Storage(storage, place)

    def _tier(self, args: Any) -> Tier:
        """The tier of new results: that of the operands; a copy has one on each tier."""
        found = {self._known_tier(x) for x in call_tensors(args)}
        return "host" if found == {"host"} else "device"

    def _known_tier(self, x: Tensor) -> Tier:
        tracked = self.storages.get(x.untyped_storage()._cdata)
        return self.engine.world.tiers.of(x) if tracked is None else tracked.place.tier

    def _claim(self) -> None:
        """Give the engine's own storages their category, in the order of precedence."""
        for category, _, tensor in memory.owned(self.engine):
            self._own(tensor, PART_OF.get(category, category))

    def _own(self, x: Tensor, category: str) -> None:
        tracked, tier = self.storages.get(x.untyped_storage()._cdata), self.engine.world.tiers.of(x)
        if tracked is None:
            self._track(x, MeterKey(category))
        elif tracked.place.category == ACTIVATIONS or tracked.place.tier != tier:
            tracked.place = MeterKey(category, tier)

    def _claim_gradients(self) -> None:
        """Claim gradients that are being made; once reduced, nobody owns what was sent."""
        for unit in self.engine.data.units.order:
            for x in (x for group in unit.trained for x in memory.gradients_of(group)):
                known = self.storages.get(x.untyped_storage()._cdata)
                if known is None or known.place.category == ACTIVATIONS:
                    self._own(x, "gradients")


# --- the memory of a step, moment by moment -------------------------------------------------------
#
# event               gathered            kept by autograd           gradients under zero3
# forward embed       embed, block 0      -                          shards
# forward block 0     block 0, block 1    of embed                   .
# loss                head                of all, and of the loss    .
# backward block 1    block 1, block 0    of blocks 0 and 1          shards, all of head
# backward block 0    block 0             of block 0                 shards, all of block 1
# update, end         -                   -                          shards
#
# Hooks on the modules of units are removed at the end, so other steps are not affected. `temporary`
# are the live bytes in no other category.


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
        with self.meter.lock:
            self._see(kind, unit)

    def _see(self, kind: str, unit: str) -> None:
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


# --- live memory ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stray:
    """A live storage of no category: its bytes, and the operation that created it."""

    stored_bytes: int
    made_by: str


class Live(TorchDispatchMode):
    """Tracks what one thread creates while it is entered; it can be entered repeatedly."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, str]] = {}
        self.elsewhere: dict[int, StorageWeakRef] = {}  # the weak reference keeps the address taken

    def of(self, model: nn.Module) -> Self:
        """Track the model's current parameters, which sharding replaces."""
        for p in model.parameters():
            if not p.is_meta:
                self._track(p, "the model before parallelize")
        return self

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.made and storage._cdata not in self.elsewhere:
                self.elsewhere[storage._cdata] = StorageWeakRef(storage)
        with torch._C.DisableTorchFunction():  # function modes (rng.py) have seen this call
            made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            self._track(tensor, str(func))
        return made

    def _track(self, tensor: Tensor, made_by: str) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.made and storage._cdata not in self.elsewhere:
            self.made[storage._cdata] = StorageWeakRef(storage), made_by

    def unaccounted(self, engine: Engine) -> list[Stray]:
        """Live storages in no category of `engine`, largest first, except empty ones."""
        self.elsewhere = {k: weak for k, weak in self.elsewhere.items() if not weak.expired()}
        # torch keeps what the program made a buffer a view of, as in one process
        viewed = [b._base for b in engine.model.buffers() if b._base is not None]
        own = *viewed, *(tensor for _, _, tensor in memory.owned(engine))
        accounted = {tensor.untyped_storage()._cdata for tensor in own}
        found: list[Stray] = []
        for key, (weak, made_by) in list(self.made.items()):
            storage = UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                del self.made[key]
            elif storage.nbytes() and key not in accounted:
                found.append(Stray(storage.nbytes(), made_by))
        return sorted(found, key=lambda stray: -stray.stored_bytes)


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (x for x in call_tensors(tree) if x.layout == torch.strided and not x.is_meta)
