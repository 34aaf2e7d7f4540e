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

The state of torch's optimizer has views of the maps of the file, which checkpoints read and write.
The update replaces only the tensors without dims there. (ZeRO-Infinity, arXiv 2104.07857, sections
5.1.1 and 6.2.)
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.tiers.disk import Buffer, Disk, Extent
from shardwise.comm.tiers.host_memory import return_freed_memory
from shardwise.comm.tiers.tiers import Tiers, begin_copy
from shardwise.comm.world import World
from shardwise.core.buffer_sizes import chunk_numel, reserved_bytes
from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.optimizer.runs import FlatRun, Runs
from shardwise.engine.options import EngineOptions
from shardwise.engine.precision import DTYPES
from shardwise.flat.flat_parameter import Flat


class FlatOnDisk:
    """The extents of a flat parameter in the file; `weight` if the parameters rest there too."""

    def __init__(self, flat: Flat, disk: Disk, tiers: Tiers, keys: Sequence[str]) -> None:
        def allocate(key: str, dtype: torch.dtype) -> Extent:
            extent = disk.allocate(f"{key} of {flat.names[0]}", flat.shard.numel(), dtype)
            tiers.on_disk(extent)
            return extent

        self.flat, self.weight, dtype = (
            flat,
            tiers.extent(flat.shard),
            torch.promote_types(flat.dtype, torch.float32),
        )
        self.gradient = allocate("gradient", flat.dtype)
        own = self.weight if self.weight and self.weight.dtype == dtype else None
        self.master = own or allocate("master", dtype)
        self.states = {key: allocate(key, dtype) for key in keys}


class ChunkRead(NamedTuple):
    """The chunk `number` of all tensors of a flat parameter that an update reads."""

    of: FlatOnDisk
    number: int

    @property
    def extents(self) -> list[Extent]:
        return [self.of.gradient, self.of.master, *self.of.states.values()]


def read_ahead(disk: Disk, jobs: Sequence[ChunkRead]) -> Iterator[tuple[ChunkRead, list[Buffer]]]:
    """Each job with its chunks in buffers; free buffers read the next jobs meanwhile."""
    begun: deque[tuple[ChunkRead, list[Buffer], list[Future[None]]]] = deque()
    upcoming = deque(jobs)
    while upcoming or begun:
        while upcoming and (not begun or disk.free >= len(upcoming[0].extents)):
            job = upcoming.popleft()
            buffers = [disk.acquire() for _ in job.extents]
            pairs = zip(job.extents, buffers, strict=True)
            begun.append((job, buffers, [disk.begin_read(e, job.number, b) for e, b in pairs]))
        job, buffers, reads = begun.popleft()
        for read in reads:
            disk.finish(read)
        yield job, buffers


class StatesOnDisk:
    """Masters and states of `flats` in the file of `disk`, as are their gradients.

    No class that has modes (`eval`, `train`) is updated on a disk (elementwise.py).
    """

    def __init__(
        self, spec: OptimizerSpec, flats: Sequence[Flat], tiers: Tiers, disk: Disk
    ) -> None:
        self.tiers, self.disk = tiers, disk
        keys = streamed_keys(spec)
        self.places = {flat: FlatOnDisk(flat, disk, tiers, keys) for flat in flats}
        self.mapped = True  # whether pages of the maps may be in memory
        self.wide = disk.acquire() if flats else None  # gradients of 16 bits, in 32
        for flat, of in self.places.items():
            flat.grads.host_grad = of.gradient.tensor

    def master(self, flat: Flat) -> Tensor:
        """The map of the master, with the weights of this rank's block."""
        weight, master = self.places[flat].weight, self.places[flat].master
        if weight is None:
            rests = begin_copy(flat.shard, self.tiers, "device", "host").wait()
            master.tensor.copy_(rests)
        elif master is not weight:
            weight.sync()
            master.tensor.copy_(weight.tensor)
        return master.tensor

    def blocks(self, flat: Flat) -> dict[str, Tensor]:
        return {key: extent.tensor for key, extent in self.places[flat].states.items()}

    # --- the update ---------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, optimizer: Optimizer, runs: Mapping[Flat, Runs], factor: Tensor | float) -> None:
        """The step of torch's `optimizer` on `runs`, with their gradients times `factor`."""
        assert isinstance(factor, float), "an update on a disk waits for its factor"
        if self.mapped:
            self.disk.drop()
            self.mapped = False
        places = [self.places[flat] for flat in runs]
        jobs = [ChunkRead(of, number) for of in places for number in range(of.master.chunks)]
        for job, buffers in read_ahead(self.disk, jobs):
            with self.disk.use.spending("updated"):
                self._update_chunk(job, buffers, factor, runs[job.of.flat], optimizer)
                self._publish_chunk(job, buffers[0], buffers[1])
            for extent, buffer in zip(job.extents[1:], buffers[1:], strict=True):
                self.disk.begin_write(extent, job.number, buffer)

    def _update_chunk(
        self,
        job: ChunkRead,
        buffers: Sequence[Buffer],
        factor: float,
        runs: Runs,
        optimizer: Optimizer,
    ) -> None:
        """Step on the parts of runs in a chunk.  The state of a run is that before the update
        until its last chunk.
        """
        first, last = span = job.of.master.span(job.number)
        gradient, master, *states = (
            buffer.tensor(extent.dtype, last - first)
            for extent, buffer in zip(job.extents, buffers, strict=True)
        )
        if gradient.dtype != master.dtype:
            assert self.wide is not None
            gradient = self.wide.tensor(master.dtype, last - first).copy_(gradient)
        if factor != 1.0:
            gradient.mul_(factor)
        chunks = dict(zip(job.of.states, states, strict=True))
        inside, before = [*_inside(runs, first, last)], dict(optimizer.state)
        for run in inside:
            run.attach(master, gradient, *span)
            if run.param in before:
                optimizer.state[run.param] = {
                    key: run.part(chunks[key], *span) if _streamed(value) else _copied(value)
                    for key, value in before[run.param].items()
                }
        optimizer.step()
        for run in inside:
            state = optimizer.state.pop(run.param, {})
            for key, value in state.items():
                if _streamed(value):
                    _keep(value, run.part(chunks[key], *span))
                    state[key] = run.part(runs.blocks[key])
                elif isinstance(value, Tensor):
                    self.tiers.own(value)
            after = before.get(run.param) if run.low < last < run.high else state
            if after is not None:
                optimizer.state[run.param] = after
            run.detach()

    def _publish_chunk(self, job: ChunkRead, narrow: Buffer, master: Buffer) -> None:
        """Copy a chunk of the master to where the weight rests, and release `narrow`."""
        flat, extent, weight = job.of.flat, job.of.master, job.of.weight
        first, last = extent.span(job.number)
        source = master.tensor(extent.dtype, last - first)
        if flat.dtype != extent.dtype:
            source = narrow.tensor(flat.dtype, last - first).copy_(source)
        if weight is not None and weight is not extent:
            self.disk.begin_write(weight, job.number, narrow)
            return
        if weight is None:
            begin_copy(source, self.tiers, "host", "device", flat.shard[first:last]).wait()
        self.disk.release(narrow)

    # --- checkpoints --------------------------------------------------------------------------

    def expose(self) -> None:
        self.disk.sync()
        self.mapped = True

    @torch.no_grad()
    def loaded(self) -> None:
        """After the maps were written: copy the masters to the weights."""
        self.disk.sync()
        self.disk.drop()
        for of in self.places.values():
            for number in range(0 if of.weight is of.master else of.master.chunks):
                narrow, buffer = self.disk.acquire(), self.disk.acquire()
                self.disk.begin_read(of.master, number, buffer).result()
                self._publish_chunk(ChunkRead(of, number), narrow, buffer)
                self.disk.release(buffer)


def open_disk(plan: Plan, options: EngineOptions, world: World, model: nn.Module) -> Disk | None:
    """The file for states of `plan` that rest on a disk, and its buffers; None if none do."""
    folder = "." if world.meta else options.offload_folder
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
    widest = max(4, *(dtype.itemsize for dtype in dtypes))
    size_bytes = reserved_bytes(len(streamed_keys(options.spec)), widest, chunk)
    disk.reserve(world.tiers.empty(size_bytes, torch.uint8), chunk * widest, world.tiers.settle)
    return disk


def streamed_keys(spec: OptimizerSpec) -> list[str]:
    """The keys of states that have an element for each of the parameter's."""
    keys = dict[str, None]()
    for group in range(len(spec.members)):
        probe = nn.Parameter(torch.zeros(2, 3, device="cpu"))
        if spec.alone(group, probe).state.get(probe):
            kind = spec.members[group][1].kind.__name__
            raise bad(
                f"states on a disk with {kind}, whose state is made before the first step",
                "an elementwise class that makes its state in its first step",
                "sw.AdamW(lr=3e-4), or offload:optim",
            )
        state = spec.first_state(group, (2, 3))
        keys |= dict.fromkeys(key for key, value in state.items() if _streamed(value))
    return [*keys]


def _inside(runs: Runs, first: int, last: int) -> Iterator[FlatRun]:
    """Runs with a gradient and elements in [first, last) of the block, or none on this rank."""
    for run in runs.every:
        here = max(run.low, first) < min(run.high, last)
        if runs.flat.grads.used[run.indices[0]]:
            yield from [run] if here or (run.low == run.high and first == 0) else []


def _streamed(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _keep(value: Tensor, part: Tensor) -> None:
    """Copy a state to its chunk, if a step has made it elsewhere."""
    if part.data_ptr() != value.data_ptr():
        part.copy_(value)
