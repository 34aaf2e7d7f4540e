"""The world: the rank of this process, and the mesh axes along which it communicates.

The world is passed as an argument; there is no "current" world.
"""

import atexit
import faulthandler
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shardwise.comm.fake import Fake, FakeLinks
from shardwise.comm.gloo.pool import Pool
from shardwise.comm.ledger import Ledger
from shardwise.comm.start.excepthook import install_excepthook
from shardwise.comm.start.peers import meet, watch_peers
from shardwise.comm.start.rendezvous import (
    Limits,
    Start,
    environment,
    local_rank,
    read_limits,
    require_interfaces,
)
from shardwise.comm.tiers.arena import Arenas
from shardwise.comm.tiers.host_memory import keep_freed_memory
from shardwise.comm.tiers.tiers import Tiers
from shardwise.comm.torch_links import TorchLinks, group_timeout
from shardwise.comm.transport import Lease, Links, Transport
from shardwise.core.errors import InputError, bad
from shardwise.core.layouts.uneven import Counts
from shardwise.core.mesh import AXES, Mesh
from shardwise.core.tools.arguments import choice, flag, short_repr
from shardwise.core.tools.hook import no_copy

# --- work of threads beside the steps -------------------------------------------------------------


class Background:
    """The jobs of one world that have not been settled (PendingCheckpoint), by their folders."""

    def __init__(self) -> None:
        self.jobs: dict[Path, Any] = {}

    def wait(self) -> None:
        for job in self.jobs.values():
            job.wait()
        self.report()

    def report(self) -> None:
        for job in self.jobs.values():
            job.report()

    def settle(self, folder: Path | None = None) -> None:
        """Wait for the job of a folder (None: for all) on all ranks.  Called by all ranks."""
        for path, job in [*self.jobs.items()]:
            if folder is None or folder.absolute() == path:
                job.settle()


@dataclass(frozen=True)
class Axis:
    """A named axis of the mesh, seen from one rank.
    `transport` carries messages that the next computation needs, `behind` those that overlap with
    computation (gradient reductions): two queues, so that neither delays the other.  `open_way`
    opens a queue for messages from one rank to another, where calls on a queue wait for each other;
    `ways` has those that are open (move.py).  All ranks of the world call it.
    """

    name: str
    transport: Transport = field(default_factory=Fake)
    behind: Transport = field(default_factory=Fake)
    ledger: Ledger = field(default_factory=Ledger)
    pool: Pool = field(default_factory=Pool)
    open_way: Callable[[int, int], Transport] | None = None
    ways: dict[tuple[int, int], Transport] = field(default_factory=dict[tuple[int, int], Transport])

    def __reduce__(self) -> Any:
        if self.size > 1:
            raise no_copy("model on several ranks")
        return Axis, (self.name,)

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size


def counted_axis(
    name: str,
    queues: Sequence[Transport],
    ledger: Ledger,
    device: torch.device,
    pool: Pool | None = None,
) -> Axis:
    """The axis over `queues` of tensors of `device`: none for one rank, or one for both uses."""
    pool = Pool() if pool is None else pool
    opened = [queue.with_ledger(name, ledger, device, pool) for queue in queues]
    opened *= 2 if len(opened) == 1 else 1
    return Axis(name, *opened, ledger=ledger, pool=pool)


@dataclass(frozen=True)
class World:
    """All ranks of a run, seen from one of them.

    `suffix` ends the names of `axes`, under which their bytes are counted, but not those in `mesh`.
    `background` has the checkpoints that threads are writing.  `number` counts the engines and the
    wrapped modules of the program, each of which has its own mesh.  In a `dry` run no other rank
    answers; it may be on the `meta` device.  `counts` has the rows of all data ranks there, in each
    microbatch; without it they have as many as this one.
    """

    rank: int
    size: int
    device: torch.device
    links: Links
    mesh: Mesh = Mesh()
    axes: tuple[Axis, ...] = ()
    everyone: Axis = Axis("world")
    ledger: Ledger = field(default_factory=Ledger)
    pool: Pool = field(default_factory=Pool)
    arenas: Arenas = field(default_factory=Arenas)
    tiers: Tiers = field(default_factory=Tiers)
    background: Background = field(default_factory=Background)
    suffix: str = ""
    number: int = 0
    dry: bool = False
    meta: bool = False
    counts: list[Counts] = field(default_factory=list[Counts])

    @property
    def storage(self) -> torch.device:
        """Where tensors of the model are: on the device; in a dry run they have no memory."""
        return torch.device("meta") if self.meta else self.device

    def axis(self, name: str) -> Axis:
        """The axis `name` of the mesh; of size one if the mesh has no such axis.

        Raises InputError for a name that no mesh has, which would be an axis that moves nothing.
        """
        if name != "none":
            choice("axis", name, AXES)
        called = f"{name}{self.suffix}"
        alone = Axis(called, ledger=self.ledger)
        return next((axis for axis in self.axes if axis.name == called), alone)

    def on(self, mesh: Mesh) -> "World":
        """This world with the axes of `mesh`, and a new ledger, pool, arenas and table of tiers.

        All ranks must call it.  Raises InputError if the mesh and the world differ in size.
        """
        if not isinstance(mesh, Mesh):
            raise bad(f"world.on({short_repr(mesh)})", "a mesh", 'world.on(sw.Mesh.parse("dp2"))')
        if mesh.size != self.size:
            raise bad(
                f"a mesh '{mesh}' of {mesh.size} ranks in a world of {self.size}",
                "a mesh with as many ranks as there are processes",
                f"start {mesh.size} processes, or write 'dp{self.size}'",
            )
        ledger, pool, here = Ledger(), Pool(), self.everyone
        self.links.root.watch(ledger)
        self.links.root.meshes += 1
        everyone = counted_axis(here.name, (here.transport,), ledger, self.device, pool)
        tiers = Tiers(ledger, self.storage)
        own = replace(self, everyone=everyone, ledger=ledger, pool=pool, tiers=tiers)
        return replace(own, arenas=Arenas(), number=self.links.root.meshes).beside(mesh)

    def beside(self, mesh: Mesh, suffix: str = "") -> "World":
        """This world with the axes of `mesh` alone, named with `suffix`. All ranks must call it."""
        axes = tuple(
            self.across(f"{name}{suffix}", mesh.lines(name)) for name, size in mesh.axes if size > 1
        )
        return replace(self, mesh=mesh, axes=axes, suffix=suffix)

    def across(self, called: str, lines: Sequence[Sequence[int]]) -> Axis:
        """An axis of the ranks in one of `lines` with this one. All ranks must call it."""
        now = self.links.transport(called, lines, self.rank)
        behind = self.links.transport(called, lines, self.rank, "behind")
        found = counted_axis(called, (now, behind), self.ledger, self.device, self.pool)
        return self._with_ways(found, lines)

    def _with_ways(self, axis: Axis, lines: Sequence[Sequence[int]]) -> Axis:

        def open_way(source: int, to: int) -> Transport:
            pairs = [sorted((line[source], line[to])) for line in lines]
            others = {*range(self.size)}.difference(*pairs)
            every = [*pairs, *([rank] for rank in others)]
            found = self.links.transport(axis.name, every, self.rank, f"{source} to {to}")
            return found.with_ledger(axis.name, self.ledger, self.device, self.pool)

        return replace(axis, open_way=open_way) if self.links.root.in_order else axis

    def within(self, name: str, groups: Sequence[Sequence[int]], called: str = "") -> Axis:
        """The ranks of axis `name` in the same one of `groups` as this one. All ranks call it."""
        called = called or self.axis(name).name
        if all(len(group) == 1 for group in groups):
            return Axis(called, ledger=self.ledger)
        lines = [[line[r] for r in group] for line in self.mesh.lines(name) for group in groups]
        return self.across(called, lines)

    def barrier(self) -> None:
        self.everyone.transport.barrier()

    def require_open(self) -> None:
        """Raise InputError if the world has been closed."""
        if self.links.root.closed:
            raise bad(
                "an engine used after world.close()",
                "steps, evaluation and checkpoints before world.close()",
                "world.close() as the program's last line",
            )

    def close(self) -> None:
        """Wait for asynchronous saves, and destroy the process groups that `init` created."""
        self.background.wait()
        self.links.close()


def world_of(rank: int, size: int, device: torch.device, links: Links) -> World:
    """A world over `links`.  All ranks must call it."""
    ledger = Ledger()
    links.root.watch(ledger)
    lines = [list(range(size))]
    opened = [links.transport("world", lines, rank)] if size > 1 else []
    everyone = counted_axis("world", opened, ledger, device)
    tiers = Tiers(ledger, device)
    return World(rank, size, device, links, everyone=everyone, ledger=ledger, tiers=tiers)


def alone(device: torch.device | str = "cpu") -> World:
    return world_of(0, 1, torch.device(device), FakeLinks())


def traced(rank: int, size: int) -> World:
    """Rank `rank` of a world of `size` that sends nothing and only fills its ledger."""
    return world_of(rank, size, torch.device("cpu"), FakeLinks())


def init(device: str | None = None, *, shared_memory: bool | None = None) -> World:
    """The world of this process.  All calls share its process groups.

    If `torch.distributed` is initialised, its default group is used.  Otherwise the environment of
    torchrun or Slurm is read; without either this is a world of one rank.  `device` is "cpu",
    "cuda", or None: CUDA if there is a GPU for every local rank.  With `shared_memory=False`, ranks
    of one host send everything through their process group, as ranks of different hosts do; None
    reads SHARDWISE_SHARED_MEMORY from the environment (default: True).

    It also installs an excepthook that prints an InputError as one paragraph.

    Raises:
        InputError: there is no GPU for device "cuda"; the environment is incomplete; the world of
            this process has been closed; the ranks cannot connect, or some did not start in time.
    """
    if shared_memory is not None:
        flag("shared_memory", shared_memory)
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        where = device_of_rank(device, local_rank(rank))
        install_excepthook(rank, size)
        return world_of(rank, size, _ready(where), _links_of_program(where, shared_memory))
    try:
        start = environment()
    except InputError:
        install_excepthook()
        raise
    install_excepthook(start.rank if start else 0)  # for errors of the start itself too
    where = _ready(device_of_rank(device, start.local_rank if start else 0))
    if start is None or not start.host:
        return alone(where)
    left = TorchLinks.of_process
    if left is not None and left.ours and left.closed:
        raise bad(
            "sw.init() after world.close() in one process",
            "one world per process, shared by any number of engines",
            "world.close() as the program's last line",
        )
    limits = read_limits()
    require_interfaces()
    store = _begin(start, where, limits)
    links = TorchLinks(ours=True, device_type=where.type, shared_memory=shared_memory)
    TorchLinks.of_process = links
    if not faulthandler.is_enabled():  # NCCL aborts a process whose collective has timed out
        faulthandler.enable(2)
    links.peers = watch_peers(store, start.rank, start.size, limits, where.index)
    atexit.register(links.close)
    # again, since torch sets its own hook
    install_excepthook(start.rank, start.size, links.close)
    return world_of(start.rank, start.size, where, links)


def _links_of_program(device: torch.device, shared_memory: bool | None) -> TorchLinks:
    """The links over the program's default group; an earlier call's if they fit."""
    links = TorchLinks.of_process
    if links is None or not links.same(device.type, shared_memory):
        links = TorchLinks(ours=False, device_type=device.type, shared_memory=shared_memory)
        TorchLinks.of_process = links
    return links


def leased(world: World | None) -> World:
    """The world (None: that of `init`) for one wrapped module: its `links` are a Lease."""
    found = init() if world is None else world
    if isinstance(found.links, Lease):
        return found
    lease = Lease(found.links)
    if world is None and found.size > 1:
        lease.asked.append(([list(range(found.size))], "now"))  # by `init`
    return replace(found, links=lease)


def _ready(device: torch.device) -> torch.device:
    if device.type == "cpu":
        keep_freed_memory()
        return device
    # a communicator that waits for another rank must not stand before kernels in a hardware queue:
    # there are 8 for all streams, unless this says more before the GPU is used
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    torch.cuda.set_device(device)
    return device


def _begin(start: Start, device: torch.device, limits: Limits) -> Store:
    gpu = device.type == "cuda"
    store, timeout = meet(start, limits), group_timeout(limits)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=store,
        rank=start.rank,
        world_size=start.size,
        timeout=timeout,
        device_id=device if gpu else None,  # then its groups are split off (torch_links.py)
    )
    return store


def device_of_rank(asked: str | None, local_rank: int) -> torch.device:
    """The device of a process: the one asked for; None: a GPU if every local rank has one."""
    if asked is not None:
        choice("device", asked, ("cpu", "cuda"))
    gpus = torch.cuda.device_count()
    # a scheduler may show each process its own GPU alone; torchrun shows all ranks the same
    own = gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    own &= "TORCHELASTIC_RUN_ID" not in os.environ
    needed = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    if asked == "cuda" and gpus < needed and not own:
        raise bad(
            f"device cuda for {needed} local ranks, with {gpus} GPUs available",
            "as many local ranks as GPUs, or the CPU",
            'device = "cpu"',
        )
    if asked == "cuda" or (asked is None and (own or gpus >= needed)):
        return torch.device("cuda", 0 if own else local_rank)
    return torch.device("cpu")
