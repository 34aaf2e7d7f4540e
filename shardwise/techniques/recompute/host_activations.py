"""Activations in host memory: a block's saved tensors rest there until its backward pass.

    forward     block 0     block 1     block 2
                  | keeps     | keeps     | keeps           each storage is copied to the host
                  v           v           v                 when autograd saves it
    host        [ 0 ]       [ 1 ]       [ 2 ]
    backward    block 2 begins: [ 2 ] and, ahead of its use, [ 1 ] are fetched
                block 1 begins: [ 0 ] is fetched
                block 0 begins

A storage is copied once, even if many saved tensors share it. Parameters, buffers, the batch, and
storages of fewer than `SMALL_BYTES` stay on the device. At most two blocks are being copied to the
host, and at most two are fetched. All copies go through comm/tiers/tiers.py.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.comm.tiers.tiers import Tiers, begin_copy
from shardwise.comm.transport import Pending
from shardwise.core.tools.structure import graph_break
from shardwise.core.tools.tree import leaves

#: Storages of fewer bytes stay on the device.
SMALL_BYTES: Final = 1024


class Stored:
    """A storage that rests on the host; on the device too while its block's backward runs."""

    def __init__(self, host: "HostActivations", x: Tensor) -> None:
        storage = x.untyped_storage()
        self.host, self.version = host, x._version
        self.source = StorageWeakRef(storage)  # no other storage gets the address
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
        flat.set_(storage, 0, (storage.nbytes(),), (1,))
        self.rest = host.tiers.empty(storage.nbytes(), torch.uint8)
        self.leaving = begin_copy(flat, host.tiers, "device", "host", self.rest)
        self.blocks: list[weakref.ref[HostedBlock]] = []
        self.arriving: Pending[Tensor] | None = None
        self.here: Tensor | None = None
        self.nbytes = storage.nbytes()
        self.fetched = False

    def fetch(self) -> None:
        if not self.fetched:
            self.arriving = begin_copy(self.rest, self.host.tiers, "host", "device")
            self.fetched = True
            self.host.count(self.nbytes)

    def bytes(self) -> Tensor:
        self.fetch()
        if self.arriving is not None:
            self.here, self.arriving = self.arriving.wait(), None
        assert self.here is not None
        return self.here

    def drop(self) -> None:
        if self.fetched:
            self.here = self.arriving = None
            self.fetched = False
            self.host.count(-self.nbytes)

    def __del__(self) -> None:
        """Runs when autograd has released the last tensor of it."""
        if self.__dict__.get("fetched"):
            self.host.count(-self.nbytes)


class Kept:
    """A tensor that autograd saved, as a view of a storage on the host."""

    def __init__(self, stored: Stored, block: "HostedBlock", x: Tensor) -> None:
        self.stored, self.block, self.dtype = stored, block, x.dtype
        self.view = x.shape, x.stride(), x.storage_offset()

    def tensor(self) -> Tensor:
        self.block.begin_backward()
        return self.stored.bytes().view(self.dtype).as_strided(*self.view)


class HostedBlock:
    """One forward pass of a block: its stored tensors, and the pass of the previous block."""

    def __init__(
        self, host: "HostActivations", module: nn.Module, before: "HostedBlock | None"
    ) -> None:
        self.host, self.module = host, module
        self.before = None if before is None else weakref.ref(before)
        self.kept: list[weakref.ref[Stored]] = []
        self.begun = False

    def begin_backward(self) -> None:
        """Fetch the storages of this and the previous block."""
        if self.begun:
            return
        self.begun = True
        before = None if self.before is None else self.before()
        own = [*self.stored(), *(before.stored() if before is not None else ())]
        self.host.begin_backward(own)

    def stored(self) -> Iterator[Stored]:
        yield from (stored for ref in self.kept if (stored := ref()) is not None)


class HostActivations:
    """The activations of one rank's blocks on the host; `places` has their stages and places."""

    def __init__(
        self, model: nn.Module, tiers: Tiers, places: Mapping[str, tuple[int, int]]
    ) -> None:
        self.model, self.tiers, self.places = model, tiers, places
        self.known: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        self.fetched: weakref.WeakSet[Stored] = weakref.WeakSet()
        self.leaving: deque[list[weakref.ref[Stored]]] = deque()
        self.running: HostedBlock | None = None
        self.latest: weakref.ref[HostedBlock] | None = None
        self.place = -1, 0  # of the latest block
        self.stays: set[int] = set()
        self.batch: set[int] = set()
        self.beside: dict[int, StorageWeakRef] = {}  # storages of this step that stay
        self.fetched_bytes = self.most_fetched_bytes = 0

    def install(self, *, hooks: bool) -> None:
        """Store the saved tensors of blocks on the host; without `hooks`, those given to `keep`."""
        for name, place in self.places.items():
            module = self.model.get_submodule(name)
            module.forward = _OnHost(module, self, place, hooks=hooks)

    def begin(self, batch: Any) -> None:
        self.batch = set(map(storage_of, leaves(batch, Tensor, objects=True)))
        self.most_fetched_bytes = self.fetched_bytes
        self.beside.clear()

    def keep(self, x: Tensor) -> Any:
        """Store `x`, detached, for the running block, on the host unless it stays."""
        storage, block = x.untyped_storage(), self.running
        x = x.detach() if x.grad_fn is not None else x  # a node that saves its output is no cycle
        stays = storage._cdata in self.stays or storage.nbytes() < SMALL_BYTES
        if block is None or stays or type(x) not in (Tensor, nn.Parameter):
            self.beside.setdefault(storage._cdata, StorageWeakRef(storage))
            return x
        stored = self.known.get(storage._cdata)
        if stored is None or stored.version != x._version:
            self.stays |= _keys(block.module)  # some were gathered since
            if storage._cdata in self.stays:
                return x
            stored = self.known[storage._cdata] = Stored(self, x)
            self.leaving[-1].append(weakref.ref(stored))
        if all(ref() is not stored for ref in block.kept):
            block.kept.append(weakref.ref(stored))
            stored.blocks.append(weakref.ref(block))
        return Kept(stored, block, x)

    @staticmethod
    def read(kept: Any) -> Tensor:
        return kept.tensor() if isinstance(kept, Kept) else kept

    @contextmanager
    def block(self, module: nn.Module, place: tuple[int, int], *, hooks: bool) -> Iterator[None]:
        """The forward pass of a block, which begins a chain if it does not follow the latest."""
        before = None if self.latest is None else self.latest()
        follows = place[0] == self.place[0] and place[1] > self.place[1]
        if not follows:
            self.stays = self.batch | _keys(self.model)
        self.running, self.place = HostedBlock(self, module, before if follows else None), place
        self.latest = weakref.ref(self.running)
        self._bound()
        try:
            if hooks:
                with saved_tensors_hooks(self.keep, self.read):
                    yield
            else:
                yield
        finally:
            self.running = None

    def begin_backward(self, needed: Iterable[Stored]) -> None:
        """Fetch the `needed` storages; free copies that no later backward pass reads."""
        needed = list(needed)
        for stored in set(self.fetched).difference(needed):
            if len(stored.blocks) == 1:
                stored.drop()
                self.fetched.discard(stored)
        for stored in needed:
            stored.fetch()
            self.fetched.add(stored)

    def count(self, nbytes: int) -> None:
        self.fetched_bytes += nbytes
        self.most_fetched_bytes = max(self.most_fetched_bytes, self.fetched_bytes)

    def _bound(self) -> None:
        self.leaving.append([])
        while len(self.leaving) > 2:
            for ref in self.leaving.popleft():
                stored = ref()
                if stored is not None:
                    stored.leaving.wait()


class _OnHost:
    def __init__(
        self, module: nn.Module, host: HostActivations, place: tuple[int, int], *, hooks: bool
    ) -> None:
        self.module, self.forward, self.host = module, module.forward, host
        self.place, self.hooks = place, hooks
        self.run = graph_break(self._run)
        self.__wrapped__ = module.forward  # whose signature this one has

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        with self.host.block(self.module, self.place, hooks=self.hooks):
            return self.forward(*args, **kwargs)

    def __reduce__(self) -> Any:
        """A copy of the module keeps its activations on the device."""
        return same, (self.forward,)


def same(x: Any) -> Any:
    return x


def _keys(module: nn.Module) -> set[int]:
    """The storages of the parameters and buffers, as they are: asking for them gathers nothing."""
    tables = [t for m in module.modules() for t in (m._parameters, m._buffers)]
    return {storage_of(x) for table in tables for x in dict.values(table) if x is not None}


def storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata
