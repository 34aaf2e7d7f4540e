"""The tier axis of the door: copies of tensors between a rank's device, its host and a disk.

The ledger has the copies under axis "tier" and the kinds "device_to_host" and "host_to_device", in
the phase in which they are begun.  A copy from the device to a disk goes through the disk's buffers
on the host, and is both "device_to_host" and "host_to_disk"; what is read from it is "disk_to_host"
(disk.py).

The tier of a tensor is that of its storage.  Without an accelerator, device and host are the same
memory: only the table of `Tiers`, of weak references, tells which storages are the host's.

On CUDA each direction has its own stream.  A copy begins after the work that the current stream has
been given, and after earlier copies of the same part of host memory.  `wait` on a copy to the host
blocks until the host may read it; on a copy to the device it makes the current stream wait.  `x`
may be freed at once, but not written before `wait`.  On a CPU the copy is made when it is begun.
"""

from collections import deque
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.comm.ledger import Ledger
from shardwise.comm.tiers.disk import Buffer, Extent
from shardwise.comm.transport import Pending
from shardwise.core.layouts.layout import between
from shardwise.core.tally import TIER
from shardwise.core.zero import Tier

_SWEEP_AT = 64  # table entries, above which entries of freed memory are removed


class _HostMemory:
    """A storage on the host; its copies under way: (first byte, byte after the last, end)."""

    def __init__(self, weak: StorageWeakRef) -> None:
        self.weak = weak
        self.copies: list[tuple[int, int, torch.cuda.Event]] = []

    def of(self, x: Tensor) -> list[torch.cuda.Event]:
        first, end = _span(x)
        return [over for low, high, over in self.copies if low < end and first < high]

    def add(self, x: Tensor, over: torch.cuda.Event) -> None:
        """A copy from or to `x` was begun, after earlier copies of its elements."""
        first, end = _span(x)
        rest = [
            (low, high, each)
            for low, high, each in self.copies
            if not (first <= low and high <= end) and not each.query()
        ]
        self.copies = [*rest, (first, end, over)]


def _span(x: Tensor) -> tuple[int, int]:
    pairs = zip(x.shape, x.stride(), strict=True)
    first, last = int(x.storage_offset()), sum((size - 1) * int(stride) for size, stride in pairs)
    return first * x.itemsize, (first + last + 1) * x.itemsize


class Tiers:
    """The tiers of one rank, between which copies are counted in `ledger`."""

    def __init__(self, ledger: Ledger | None = None, device: torch.device | None = None) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self.device = torch.device("cpu") if device is None else device
        self._host: dict[int, _HostMemory] = {}
        self._disk: WeakValueDictionary[int, Extent] = WeakValueDictionary()
        self._sweep_at = _SWEEP_AT
        # how many storages have become memory of the host or a disk, and changes of size
        self.owned = self.resized = 0
        self.issue: Any = None  # while a step is recorded: called for each copy (comm/fake.py)
        self._lock = Lock()  # a thread that updates owns states that it makes
        self._streams: dict[Tier, torch.cuda.Stream] = {}

    @property
    def accelerated(self) -> bool:
        return self.device.type == "cuda"

    def of(self, x: Tensor) -> Tier:
        if self._disk and self.extent(x) is not None:
            return "disk"
        return "host" if self._memory(x) is not None else "device"

    def holds(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._host or storage._cdata in self._disk

    def resize(self, x: Tensor, nbytes: int) -> None:
        """Give the storage of `x` another size; views of it stay, and its values are undefined."""
        x.untyped_storage().resize_(nbytes)
        self.resized += 1

    def bound_device(self, most_bytes: int | None) -> None:
        """Bound torch's memory on a CUDA device (a CPU has none) until these tiers are freed."""
        if most_bytes is not None and self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            before = torch.cuda.get_per_process_memory_fraction(self.device)
            put = torch.cuda.set_per_process_memory_fraction
            put(min(1.0, most_bytes / total), self.device)
            finalize(self, put, before, self.device).atexit = False

    def on_disk(self, extent: Extent) -> Tensor:
        """Count the storage of `extent.tensor` as memory of its disk; returns it."""
        self._disk[extent.tensor.untyped_storage()._cdata] = extent
        self.owned += 1
        return extent.tensor

    def extent(self, x: Tensor) -> Extent | None:
        return self._disk.get(x.untyped_storage()._cdata)

    def own(self, x: Tensor) -> Tensor:
        """Count the storage of `x` as memory of the host from now on; returns `x`."""
        storage = x.untyped_storage()
        with self._lock:
            if self._memory(x) is None:
                self._sweep()
                self._host[storage._cdata] = _HostMemory(StorageWeakRef(storage))
                self.owned += 1
        return x

    @property
    def host_bytes(self) -> int:
        with self._lock:
            weak = [each.weak.cdata for each in self._host.values()]
        storages = map(torch.UntypedStorage._new_with_weak_ptr, weak)
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def empty_like(self, x: Tensor, tier: Tier) -> Tensor:
        """A tensor of the shape, dtype and order of dims of `x` on `tier`; values are undefined."""
        strides = torch.empty_like(x, device="meta").stride()
        if tier == "device":
            return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=self.device)
        return self.empty(x.numel(), x.dtype).as_strided(x.shape, strides)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in new host memory; values are undefined."""
        with _disable_current_modes():  # a meter must not see the memory before it is the host's
            nbytes, pinned = numel * dtype.itemsize, self.accelerated
            place = "meta" if self.device.type == "meta" else "cpu"
            made = torch.empty(nbytes, dtype=torch.uint8, device=place, pin_memory=pinned)
            self.own(made)
        return made.view(dtype)

    def following(self, dst: Tier) -> AbstractContextManager[None]:
        """Inside, work follows the copies to `dst` begun so far, and nothing waits for it here."""
        stream = self._streams.get(dst)
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def follow(self, dst: Tier) -> None:
        """Let later work of the current stream wait for the copies to `dst` begun so far."""
        stream = self._streams.get(dst)
        if stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def settle(self, x: Tensor) -> None:
        """Wait for copies from or to these elements of host tensor `x`, before it is written."""
        memory = self._memory(x)
        for over in [] if memory is None else memory.of(x):
            over.synchronize()

    def copying(self, x: Tensor, over: torch.cuda.Event) -> None:
        memory = self._memory(x)
        assert memory is not None
        with self._lock:
            memory.add(x, over)

    def _memory(self, x: Tensor) -> _HostMemory | None:
        return self._host.get(x.untyped_storage()._cdata)

    def _sweep(self) -> None:
        if len(self._host) < self._sweep_at:
            return
        self._host = {key: one for key, one in self._host.items() if not one.weak.expired()}
        self._sweep_at = max(_SWEEP_AT, 2 * len(self._host))

    def _copy_beside(self, out: Tensor, x: Tensor, to: Tier) -> torch.cuda.Event:
        stream = self._streams.get(to)
        if stream is None:
            stream = self._streams[to] = torch.cuda.Stream(self.device)
        on_host, on_device = (out, x) if to == "host" else (x, out)
        memory = self._memory(on_host)
        assert memory is not None
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for earlier in memory.of(on_host):
            stream.wait_event(earlier)
        with torch.cuda.stream(stream):
            out.copy_(x, non_blocking=True)
            on_device.record_stream(stream)
            over = torch.cuda.Event()
            over.record(stream)
        self.copying(on_host, over)
        return over


def begin_copy(
    x: Tensor, tiers: Tiers, src: Tier, dst: Tier, out: Tensor | None = None
) -> Pending[Tensor]:
    """Begin to copy `x`, which is on `src`, to `out` on `dst`; None is new memory there.
    `out` has the shape and dtype of `x`, and is the result of `wait`.  Not differentiable.  A copy
    to or from "disk" needs `out`: to it, `x` may be freed or written at once, and `wait` returns
    when it is written; from it, most may happen in `wait`.  Raises ValueError if `x` or `out` is on
    another tier, or if there is no copy from `src` to `dst`.
    """
    if (src, dst) == ("device", "disk") and out is not None:
        return _write_behind(x.detach(), tiers, out)
    if (src, dst) == ("disk", "device") and out is not None:
        return Pending([Fetch(_extent(x, tiers), out, tiers).wait])
    if {src, dst} != {"device", "host"}:
        raise ValueError(
            f"no copy from tier {src} to tier {dst}; allowed: device to host and back, or to disk "
            "and back with a given result"
        )
    x = x.detach()
    out = tiers.empty_like(x, dst) if out is None else out.detach()
    for tensor, tier in ((x, src), (out, dst)):
        if tiers.of(tensor) != tier:
            raise ValueError(f"a tensor on tier {tiers.of(tensor)} in a copy from {src} to {dst}")
    tiers.ledger.begin(TIER, between(src, dst)).add(x, x.numel(), peers=0)
    return _copy(x, tiers, dst, out)


def _copy(x: Tensor, tiers: Tiers, dst: Tier, out: Tensor) -> Pending[Tensor]:
    if not tiers.accelerated:
        if tiers.issue is not None:
            way = between("host" if dst == "device" else "device", dst)
            arriving = tiers.issue(TIER, way, x.nbytes, lambda: out.copy_(x))
            return Pending([arriving.wait, lambda: out])
        out.copy_(x)
        return Pending([lambda: out])
    over = tiers._copy_beside(out, x, dst)
    return Pending([lambda: _arrived(out, tiers, over)])


def _extent(x: Tensor, tiers: Tiers) -> Extent:
    extent = tiers.extent(x)
    if extent is None:
        raise ValueError(f"a tensor on tier {tiers.of(x)} in a copy from or to a disk")
    return extent


def _write_behind(x: Tensor, tiers: Tiers, out: Tensor) -> Pending[Tensor]:
    """Copy flat `x` to a disk, chunk by chunk; it may be freed or written when this returns."""
    extent = _extent(out, tiers)
    for chunk in range(extent.chunks):
        first, last = extent.span(chunk)
        buffer = extent.disk.acquire()
        part = buffer.tensor(x.dtype, last - first)
        arriving = begin_copy(x[first:last], tiers, "device", "host", part)
        extent.disk.begin_write(extent, chunk, buffer, arriving.wait)
    return Pending([extent.sync, lambda: out])


def _arrived(out: Tensor, tiers: Tiers, over: torch.cuda.Event) -> Tensor:
    if tiers.of(out) == "host":
        over.synchronize()
    else:
        current = torch.cuda.current_stream(tiers.device)
        current.wait_event(over)
        out.record_stream(current)  # it may have been allocated under another stream
    return out


# --- a tensor on its way from a disk --------------------------------------------------------------


class Fetch:
    """Brings `extent` to `out`, a flat tensor on the device."""

    def __init__(self, extent: Extent, out: Tensor, tiers: Tiers) -> None:
        self.extent, self.disk, self.out, self.tiers = extent, extent.disk, out, tiers
        self.upcoming = deque(range(extent.chunks))
        self.begun: deque[tuple[int, Buffer, Future[None]]] = deque()
        whole = self.disk.memory
        tiers.ledger.begin(TIER, between("disk", "host")).add(whole, extent.whole_bytes, peers=0)
        tiers.ledger.begin(TIER, between("host", "device")).add(out, out.numel(), peers=0)
        self._read_ahead()

    def wait(self) -> Tensor:
        """Return `out` when all is there.  Raises DiskError."""
        while self.upcoming or self.begun:
            if not self.begun:
                self._read(self.disk.acquire())
            chunk, buffer, read = self.begun.popleft()
            self.disk.finish(read)
            first, last = self.extent.span(chunk)
            part = buffer.tensor(self.out.dtype, last - first)
            _copy(part, self.tiers, "device", self.out[first:last]).wait()
            self.disk.release(buffer)
            self._read_ahead()
        return self.out

    def _read_ahead(self) -> None:
        while self.upcoming and self.disk.free > self.disk.buffers // 2:
            self._read(self.disk.acquire())

    def _read(self, buffer: Buffer) -> None:
        chunk = self.upcoming.popleft()
        read = self.disk.begin_read(self.extent, chunk, buffer, counted=False)
        self.begun.append((chunk, buffer, read))
