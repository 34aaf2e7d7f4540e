"""Gradients, masters and optimizer states on a disk, and the update that streams through them.

For each flat parameter the file has a gradient, in the precision of the weight; a master, in 32
bits or as wide as the weight; and each state tensor of the optimizer. All have the elements of this
rank's block, so that chunk c of each has the same elements:

    gradient  | 0 | 1 | 2 |        read ahead     0  1  2
    master    | 0 | 1 | 2 |        update            0  1  2         and copy to the device
    exp_avg   | 0 | 1 | 2 |        write behind         0  1  2      (not the gradient)
    ...

Where parameters rest on the disk too (flat_parameter.py), the weight is the master, unless it has
16 bits: then the update writes it in place of the copy to the device.

The class of torch.optim steps on the pieces of parameters in a chunk: it is elementwise
(elementwise.py), so the result is that of the whole. State tensors without dims, such as Adam's
step count, stay in host memory, and every piece of a parameter steps from the same one.

`torch.state` of the optimizer has views of the maps of the file, which checkpoints read and write.
The update replaces only the tensors without dims there. (ZeRO-Infinity, arXiv 2104.07857, sections
5.1.1 and 6.2.)
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.tiers.disk import Buffer, Disk, Extent
from shardwise.comm.tiers.host_memory import return_freed_memory
from shardwise.comm.tiers.tiers import Tiers, begin_copy
from shardwise.comm.world import World
from shardwise.core.buffer_sizes import chunk_numel, reserved_bytes
from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.engine.optimizer.norm import counts, squares
from shardwise.engine.optimizer.optimizer import Factor, Owned, ShardedOptimizer
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.options import Training
from shardwise.engine.precision import DTYPES
from shardwise.techniques.data.flat.flat_parameter import Flat

#: The state of one parameter, by key.
State = dict[str, Any]


@dataclass(frozen=True)
class ChunkRead:
    """The same chunk of several tensors; `key` is the index of their flat parameter."""

    key: int
    chunk: int
    extents: Sequence[Extent]


def read_ahead(disk: Disk, jobs: Sequence[ChunkRead]) -> Iterator[tuple[ChunkRead, list[Buffer]]]:
    """Each job with its chunks in buffers; free buffers read the next jobs meanwhile."""
    begun: deque[tuple[ChunkRead, list[Buffer], list[Future[None]]]] = deque()
    upcoming = deque(jobs)
    while upcoming or begun:
        while upcoming and (not begun or disk.free >= len(upcoming[0].extents)):
            job = upcoming.popleft()
            buffers = [disk.acquire() for _ in job.extents]
            pairs = zip(job.extents, buffers, strict=True)
            begun.append((job, buffers, [disk.begin_read(e, job.chunk, b) for e, b in pairs]))
        job, buffers, reads = begun.popleft()
        for read in reads:
            disk.finish(read)
        yield job, buffers


class DiskOptimizer(ShardedOptimizer):
    """Masters and states of `flats` are in the file of `disk`, as are their gradients.

    No class that has modes (`eval`, `train`) is updated on a disk (elementwise.py).
    """

    scales_in_place = False  # but in buffers

    def __init__(
        self, spec: OptimizerSpec, flats: Sequence[Flat], tiers: Tiers, disk: Disk
    ) -> None:
        self.tiers, self.disk = tiers, disk
        keys = streamed_keys(spec)
        dtypes = [_wide(flat.dtype) for flat in flats]
        self.gradients = [self._allocate("gradient", flat, flat.dtype) for flat in flats]
        pairs = list(zip(flats, dtypes, strict=True))
        self.weights = [tiers.extent(flat.shard) for flat in flats]
        self.wholes = [
            weight if weight and weight.dtype == dtype else self._allocate("master", flat, dtype)
            for weight, (flat, dtype) in zip(self.weights, pairs, strict=True)
        ]
        self.streamed = [{key: self._allocate(key, flat, d) for key in keys} for flat, d in pairs]
        self.seen: dict[int, Tensor] = {}  # squares of gradients of this step that left the device
        self.mapped = False  # whether pages of the maps may be in memory
        for k, flat in enumerate(flats):
            flat.grads.host_grad = self.gradients[k].tensor
            self._store(flat, self.wholes[k], self.weights[k])
        self.wide = disk.acquire() if flats else None  # gradients of 16 bits, in 32
        masters = {k: master.tensor for k, master in enumerate(self.wholes)}
        super().__init__(spec, flats, masters)

    def _allocate(self, key: str, flat: Flat, dtype: torch.dtype) -> Extent:
        extent = self.disk.allocate(f"{key} of {flat.names[0]}", flat.shard.numel(), dtype)
        self.tiers.on_disk(extent)
        return extent

    def _store(self, flat: Flat, master: Extent, weight: Extent | None) -> None:
        if master is weight:
            return
        if flat.dtype == master.dtype:
            begin_copy(flat.shard, self.tiers, "device", "disk", master.tensor)
            return
        for chunk in range(master.chunks):
            first, last = master.span(chunk)
            narrow, wide = self.disk.acquire(), self.disk.acquire()
            part = narrow.tensor(flat.dtype, last - first)
            if weight is not None:
                self.disk.begin_read(weight, chunk, narrow).result()
            else:
                begin_copy(flat.shard[first:last], self.tiers, "device", "host", part).wait()
            wide.tensor(master.dtype, last - first).copy_(part)
            self.disk.release(narrow)
            self.disk.begin_write(master, chunk, wide)

    def owns(self) -> Iterator[Owned]:
        yield from super().owns()
        for flat, states in zip(self.flats, self.streamed, strict=True):
            yield from (("optimizer", flat, extent.tensor) for extent in states.values())
        yield "buffers", None, self.disk.memory

    # --- the update ---------------------------------------------------------------------------

    def begin_update(self, chosen: Sequence[int], factor: Factor) -> Callable[[], None]:
        assert isinstance(factor.value, float), "an update on a disk waits for its factor"
        return partial(self._update, chosen, factor.value)

    @torch.no_grad()
    def _update(self, chosen: Sequence[int], factor: float) -> None:
        if self.mapped:
            self.disk.drop()
            self.mapped = False
        jobs = [
            ChunkRead(k, chunk, (self.gradients[k], self.wholes[k], *self.streamed[k].values()))
            for k in chosen
            for chunk in range(self.wholes[k].chunks)
        ]
        fresh: dict[Tensor, State] = {}
        for job, buffers in read_ahead(self.disk, jobs):
            with self.disk.use.spending("updated"):
                self._update_chunk(job, buffers, factor, fresh)
                self._publish_chunk(job, buffers[0], buffers[1])
            for extent, buffer in zip(job.extents[1:], buffers[1:], strict=True):
                self.disk.begin_write(extent, job.chunk, buffer)
        self.state.update(fresh)

    def _update_chunk(
        self, job: ChunkRead, buffers: Sequence[Buffer], factor: float, fresh: dict[Tensor, State]
    ) -> None:
        k, flat = job.key, self.flats[job.key]
        targets, state_of = self.targets[k], self.state
        first, last = self.wholes[k].span(job.chunk)
        gradient, master, *states = (
            buffer.tensor(extent.dtype, last - first)
            for extent, buffer in zip(job.extents, buffers, strict=True)
        )
        if gradient.dtype != master.dtype:
            assert self.wide is not None
            gradient = self.wide.tensor(master.dtype, last - first).copy_(gradient)
        if factor != 1.0:
            gradient.mul_(factor)
        named = dict(zip(self.streamed[k], states, strict=True))
        members: list[tuple[int, nn.Parameter, dict[str, Tensor]]] = []
        for i, low, high in self._inside(flat, first, last):
            piece = partial(_piece, low=low, high=high, dims=len(flat.shapes[i]))
            target = nn.Parameter(piece(master))
            target.grad = piece(gradient)
            views = {key: piece(value) for key, value in named.items()}
            before = state_of.get(targets[i])
            if before:
                state_of[target] = {
                    key: views[key] if _streamed(value) else _copied(value)
                    for key, value in before.items()
                }
            members.append((i, target, views))
        groups = self.group_of
        with self.only((groups[id(targets[i])], p) for i, p, _ in members):
            self.torch.step()
        for i, target, views in members:
            after = state_of.pop(target, {})
            fresh[targets[i]] = self._new_state(k, i, after, views)

    @torch.no_grad()
    def see(self, flat: Flat) -> None:
        """Take the squares of a gradient on the device, before it is copied to the disk."""
        if flat.grads.gshard is not None and counts(flat):
            self.seen[id(flat)] = squares(flat)

    def squares(self, flats: Sequence[Flat]) -> list[Tensor]:
        """The sums of squares of the gradients of `flats` seen since the last call."""
        found = [self.seen.pop(id(flat), None) for flat in flats]
        return [squared for squared in found if squared is not None]

    def _inside(self, flat: Flat, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Parameters with a gradient, and their places in elements [first, last) of the block."""
        for i, (low, high) in enumerate(flat.pieces):
            begin, end = max(low, first) - first, min(high, last) - first
            if flat.grads.used[i] and begin < end:
                yield i, begin, end
            elif flat.grads.used[i] and low == high and first == 0:  # none of it is on this rank
                yield i, 0, 0

    def _new_state(self, k: int, i: int, after: State, views: dict[str, Tensor]) -> State:
        """The parameter's new state: values of the piece go to `views`, the rest is kept."""
        for key in filter(lambda key: _streamed(after[key]), after):
            if after[key].data_ptr() != views[key].data_ptr():
                views[key].copy_(after[key])
        return {
            key: self._view(k, i, self.streamed[k][key]) if _streamed(value) else self._owned(value)
            for key, value in after.items()
        }

    def _view(self, k: int, i: int, extent: Extent) -> Tensor:
        return self.flats[k].views.part(i, extent.tensor)

    def _publish_chunk(self, job: ChunkRead, narrow: Buffer, master: Buffer) -> None:
        """Copy a chunk of the master to where the weight rests, and release `narrow`."""
        flat, extent, weight = self.flats[job.key], self.wholes[job.key], self.weights[job.key]
        first, last = extent.span(job.chunk)
        source = master.tensor(extent.dtype, last - first)
        if flat.dtype != extent.dtype:
            source = narrow.tensor(flat.dtype, last - first).copy_(source)
        if weight is not None and weight is not extent:
            self.disk.begin_write(weight, job.chunk, narrow)
            return
        if weight is None:
            begin_copy(source, self.tiers, "host", "device", flat.shard[first:last]).wait()
        self.disk.release(narrow)

    # --- checkpoints --------------------------------------------------------------------------

    def room(self, k: int, index: int, key: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a state that is loaded: in the file, or on the host if it has no dims."""
        extent = self.streamed[k].get(key)
        if extent is not None and len(size) and extent.dtype == dtype:
            return self._view(k, index, extent)
        return self._owned(torch.zeros(tuple(size), dtype=dtype, device="cpu"))

    def _owned(self, value: Any) -> Any:
        return self.tiers.own(value) if isinstance(value, Tensor) else value

    def expose(self) -> None:
        """Before the maps are read: wait until all is written."""
        self.disk.sync()
        self.mapped = True

    @torch.no_grad()
    def loaded(self) -> None:
        """After the maps were written: copy the masters to the weights."""
        self.disk.sync()
        self.disk.drop()
        for k, (master, weight) in enumerate(zip(self.wholes, self.weights, strict=True)):
            for chunk in range(0 if weight is master else master.chunks):
                narrow, buffer = self.disk.acquire(), self.disk.acquire()
                self.disk.begin_read(master, chunk, buffer).result()
                self._publish_chunk(ChunkRead(k, chunk, (master,)), narrow, buffer)
                self.disk.release(buffer)


def open_disk(plan: Plan, training: Training, world: World, model: nn.Module) -> Disk | None:
    """The file for states of `plan` that rest on a disk, and its buffers; None if none do."""
    folder = "." if world.meta else training.offload_folder
    moves = plan.states.moves()
    if moves.offload != "disk":
        return None
    if folder is None:
        raise bad(
            f"offload:{plan.offload} without a folder for the states",
            "a folder on a local disk, one for each machine",
            'offload_folder="/mnt/nvme" to sw.parallelize, or --set offload.folder=/mnt/nvme',
        )
    chunk = chunk_numel(max(p.numel() for p in model.parameters()))
    disk = Disk(folder, world.rank, world.ledger, chunk, dry=world.meta)
    if moves.fetch == "disk":  # parameters are written to it while the model is sharded
        return_freed_memory()
    dtypes = [DTYPES[plan.precision] or p.dtype for p in model.parameters()]
    widest = max(_wide(dtype).itemsize for dtype in dtypes)
    size_bytes = reserved_bytes(len(streamed_keys(training.optimizer)), widest, chunk)
    disk.reserve(world.tiers.empty(size_bytes, torch.uint8), chunk * widest, world.tiers.settle)
    return disk


def streamed_keys(spec: OptimizerSpec) -> list[str]:
    """The keys of states that have an element for each of the parameter's."""
    keys = dict[str, None]()
    for group in range(len(spec.members)):
        probe = nn.Parameter(torch.zeros(2, 3, device="cpu"))
        if spec.alone(group, probe).state.get(probe):
            raise bad(
                f"states on a disk with {spec.members[group][1].kind.__name__}, whose state is "
                "made before the first step, all of it in host memory",
                "an elementwise class that makes its state in its first step",
                "sw.AdamW(lr=3e-4), or offload:optim",
            )
        state = spec.first_state(group, (2, 3))
        keys |= dict.fromkeys(key for key, value in state.items() if _streamed(value))
    return [*keys]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32


def _streamed(value: Any) -> bool:
    """Whether a state has an element for each of the parameter's."""
    return isinstance(value, Tensor) and value.dim() > 0


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _piece(chunk: Tensor, low: int, high: int, dims: int) -> Tensor:
    """Elements [low, high) of a chunk with as many dims as their parameter."""
    if dims == 0 and high > low:
        return chunk[low]
    return chunk[low:high].view(high - low, *[1] * (dims - 1))
