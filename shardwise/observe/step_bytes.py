"""The live bytes of an engine's step after each of its operations, and the most of them.

A sum is kept as storages are made, resized and freed; nothing walks all storages but when what is
live may be more than ever.

    made      by an operation: counted after it, if its memory has values and is not the host's
    resized   the full parameters of units, to nothing and back
    freed     a weak reference to the storage calls back
    owned     by the engine when the step begins

What a kernel takes and returns inside of one operation is not seen, nor is the batch.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.comm.fake import FakeLinks
from shardwise.comm.transport import Pending
from shardwise.core.tally import Key
from shardwise.core.tools.tree import leaves
from shardwise.core.zero import ACTIVATIONS, OWNED
from shardwise.engine import memory
from shardwise.engine.engine import Engine
from shardwise.observe.meta_pass import known_by
from shardwise.observe.work import UNWRITTEN, call_tensors, in_backward, moves_nothing, operation_of
from shardwise.prediction.prediction import Begun, Issued, Operation, Waited
from shardwise.techniques.recompute.checkpointed import computes_again

# --- what a rank issues (prediction/prediction.py) -----------------------------------------------
#
# kernels     the operations of forward and backward passes, on tensors of the model's device
# messages    of transports that only count (comm/fake.py), and copies between tiers
#             (comm/tiers/tiers.py); what these compute to give a result is no kernel

#: The phases whose kernels are recorded: the update's cost follows from the states.
PASSES: Final = ("forward", "backward")


class Issues:
    """What `engine` issues while it is `recording`."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.found = engine, list[Issued]()
        self.known = dict[Any, Operation | None]()
        self.begun, self.hidden = 0, False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, messages and copies are recorded; StepBytes passes on operations."""
        world = self.engine.world
        links = world.links.root
        assert isinstance(links, FakeLinks)
        links.issue = world.tiers.issue = self.message
        try:
            yield
        finally:
            links.issue = world.tiers.issue = None

    def message(
        self, axis: str, kind: str, sent_bytes: int, act: Callable[[], Any]
    ) -> Pending[Any]:
        """A message or a copy begins; `act` gives its result."""
        before, self.hidden = self.hidden, True
        act()
        self.hidden = before
        number = self.begun = self.begun + 1
        self.found.append(Begun(number, Key(axis, kind, self.engine.ledger.now), sent_bytes))
        return Pending([lambda: self.found.append(Waited(number))])

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """An operation below autograd."""
        if moves_nothing(func) or self.hidden or self.engine.ledger.now not in PASSES:
            return
        key = known_by(func, args, kwargs)
        if key is None or key not in self.known:
            here = not self.engine.world.meta or any(x.is_meta for x in call_tensors((args, out)))
            self.known[key] = operation_of(func, args, kwargs, out) if here else None
        if (found := self.known[key]) is not None:
            backward = in_backward()
            again = backward and computes_again()
            self.found.append(found._replace(backward=backward, again=again))


# --- live bytes -----------------------------------------------------------------------------------


class SavedStorages:
    """The storages that autograd has saved, each counted once while it is alive."""

    def __init__(self) -> None:
        self.alive: dict[int, StorageWeakRef] = {}

    def save(self, x: Tensor) -> Tensor:
        """The hook for a saved tensor, without its node, which might never be freed."""
        storage = x.untyped_storage()
        self.alive.setdefault(storage._cdata, StorageWeakRef(storage))
        return x.detach() if x.grad_fn is not None else x

    def keys(self) -> set[int]:
        self.alive = {key: weak for key, weak in self.alive.items() if not weak.expired()}
        return set(self.alive)


class KeptBytes:
    """The most that autograd, and recomputed modules, keep for the backward pass at a `look`.
    Parameters, what else the engine owns, and the batch are not among it. `slots` has the sizes of
    the kept inputs that belong in an arena, with the most of each size.
    """

    def __init__(self, engine: Engine, batch: Any) -> None:
        self.engine, self.saved = engine, SavedStorages()
        self.batch = {x.untyped_storage()._cdata for x in leaves(batch, Tensor, objects=True)}
        self.most = self.most_on_host = 0
        self.slots = Counter[int]()

    def look(self) -> None:
        """Count what is kept now."""
        world, recomputation = self.engine.world, self.engine.recompute
        tiers, host = world.tiers, recomputation.host
        if world.arenas.kept.memory is None:
            self.slots |= sum((m.slots() for m in recomputation.modules.values()), Counter[int]())
        for x in (x for one in recomputation.modules.values() for x in one.kept_tensors()):
            if not world.arenas.hold(x):
                self.saved.save(x)
        self.saved.alive |= {} if host is None else host.beside
        owned = {x.untyped_storage()._cdata for _, _, x in memory.owned(self.engine)} | self.batch
        found = 0
        for key in self.saved.keys() - owned:
            storage = UntypedStorage._new_with_weak_ptr(self.saved.alive[key].cdata)
            found += 0 if storage is None or tiers.holds(storage) else storage.nbytes()
        self.most = max(self.most, found)
        on_host = tiers.host_bytes - sum(self.engine.host_memory().values())
        self.most_on_host = max(self.most_on_host, on_host)


class StepBytes:
    """The bytes of `engine` on its device: `now`, and the most so far, `most`.
    `parts` has the most by category; looked for from `least` bytes on, which may be `most` of an
    earlier step. `issues` gets each operation that is seen.
    """

    def __init__(self, engine: Engine, least: int = 0, issues: Issues | None = None) -> None:
        self.engine, self.least, self.issues = engine, least, issues
        self.now = self.most = 0
        self.parts = dict[str, int]()
        self.known: dict[int, tuple[ref[UntypedStorage], int]] = {}
        self.on_host = set[int]()  # of the known ones
        self.freed: list[tuple[int, ref[UntypedStorage]]] = []
        self.owned = self.resized = 0  # changes of tiers so far
        for _, _, tensor in memory.owned(engine):
            self._count(tensor)
        self.fulls = [flat.full.untyped_storage() for flat in engine.flats if flat.reshards]

    def see(self, func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        """Count the result of an operation (meta_pass.py)."""
        self._forget()
        for x in call_tensors(made):
            if x.layout == torch.strided and x.untyped_storage()._cdata not in self.known:
                self._made(x, args)
        if func._overloadpacket.__name__ not in UNWRITTEN:
            self._look()
        if self.issues is not None:
            self.issues.operation(func, args, kwargs, made)

    def _made(self, x: Tensor, args: Any) -> None:
        """Count a result, unless it is an argument's memory that was made elsewhere."""
        key = x.untyped_storage()._cdata
        strided = [y for y in call_tensors(args) if y.layout == torch.strided]
        if not any(y.untyped_storage()._cdata == key for y in strided):
            self._count(x, there=bool(strided) and all(map(self._is_on_host, strided)))

    def _is_on_host(self, x: Tensor) -> bool:
        key = x.untyped_storage()._cdata
        return key in self.on_host or self.engine.world.tiers.of(x) == "host"

    def _count(self, x: Tensor, *, there: bool = False) -> None:
        """Count a storage once; on the host `there` is what is computed from its memory."""
        world, storage = self.engine.world, x.untyped_storage()
        key = storage._cdata
        elsewhere = storage.device.type == "meta" and not world.meta
        if key in self.known or elsewhere or world.arenas.hold(x):
            return
        weak = ref(storage, partial(self._gone, key))
        self.known[key] = weak, 0
        if there or world.tiers.of(x) != "device":
            self.on_host.add(key)
        else:
            self._resize(key, storage.nbytes())

    def _gone(self, key: int, weak: "ref[UntypedStorage]") -> None:
        self.freed.append((key, weak))  # perhaps in another thread

    def _forget(self) -> None:
        while self.freed:
            key, weak = self.freed.pop()
            if key in self.known and self.known[key][0] is weak:
                self.now -= self.known.pop(key)[1]
                self.on_host.discard(key)

    def _resize(self, key: int, nbytes: int) -> None:
        weak, before = self.known[key]
        self.known[key] = weak, nbytes
        self.now += nbytes - before

    def _look(self) -> None:
        tiers = self.engine.world.tiers
        if tiers.resized != self.resized:
            self.resized = tiers.resized
            for storage in self.fulls:
                self._resize(storage._cdata, storage.nbytes())
        if tiers.owned != self.owned:  # what was counted may be the host's since
            self.owned = tiers.owned
            for key, (weak, nbytes) in list(self.known.items()):
                storage = weak() if nbytes else None
                if storage is not None and tiers.holds(storage):
                    self.on_host.add(key)
                    self._resize(key, 0)
        if self.now > self.most:
            self.most = self.now
            if self.now >= self.least:
                self.parts = self._parts()

    def _parts(self) -> dict[str, int]:
        owned = memory.in_step(self.engine)
        found = {name: owned[name] for name in OWNED}
        return found | {ACTIVATIONS: self.now - sum(found.values())}
