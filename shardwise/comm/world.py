"""this file is the world: which rank this process is, and the axes along which it meets the others.

    world = sw.init()              from torchrun's environment, Slurm's, or a world of one
    world = world.on(mesh)         the same ranks with named axes
    world.axis("dp").rank          a coordinate

The world is a value that is passed along; nothing in Shardwise asks for "the current" one.
"""

import atexit
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.fake import Fake, FakeLinks
from shardwise.comm.ledger import Ledger
from shardwise.comm.limits import Limits, read_limits
from shardwise.comm.malloc import keep_freed_memory
from shardwise.comm.peers import watch_peers
from shardwise.comm.refusal import show_refusals
from shardwise.comm.rendezvous import Start, environment, launched, local_rank
from shardwise.comm.start import meet
from shardwise.comm.torch_links import TorchLinks, device_mesh, group_timeout
from shardwise.comm.transport import Links, Transport
from shardwise.core.errors import InputError, bad
from shardwise.core.hook import no_copy
from shardwise.core.mesh import Mesh


@dataclass(frozen=True)
class Axis:
    """A named axis of the mesh, seen from one rank.

    `transport` carries what the next computation waits for, `behind` what runs behind it (gradient
    reductions): two queues, so that neither holds up the other.  Both count in `ledger`.
    """

    name: str
    transport: Transport = field(default_factory=Fake)
    behind: Transport = field(default_factory=Fake)
    ledger: Ledger = field(default_factory=Ledger)

    def __reduce__(self) -> Any:
        """Copied and pickled only where there are no process groups in it."""
        if self.size > 1:
            raise no_copy("model on several ranks")
        return Axis, (self.name,)

    @property
    def rank(self) -> int:
        """This rank's place on the axis."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """How many ranks the axis has."""
        return self.transport.size


def counted_axis(name: str, queues: Sequence[Transport], ledger: Ledger) -> Axis:
    """The axis over these queues, none or both, which count what they send in `ledger`."""
    return Axis(name, *(queue.counted(name, ledger) for queue in queues), ledger=ledger)


@dataclass(frozen=True)
class World:
    """All ranks of a run, seen from one of them."""

    rank: int
    size: int
    device: torch.device
    links: Links
    mesh: Mesh = Mesh()
    axes: tuple[Axis, ...] = ()
    everyone: Axis = Axis("world")
    ledger: Ledger = field(default_factory=Ledger)

    def axis(self, name: str) -> Axis:
        """The axis of that name; an axis the mesh does not have is an axis of one rank."""
        alone = Axis(name, ledger=self.ledger)
        return next((axis for axis in self.axes if axis.name == name), alone)

    def on(self, mesh: Mesh) -> "World":
        """This world with the axes of `mesh`, and a ledger of its own.  Called by all ranks.

        Raises:
            InputError: the mesh has not as many ranks as the world.
        """
        if mesh.size != self.size:
            raise bad(
                f"a mesh '{mesh}' of {mesh.size} ranks in a world of {self.size}",
                "a mesh with as many ranks as there are processes",
                f"start {mesh.size} processes, or write 'dp{self.size}'",
            )
        ledger = Ledger()
        opened = []
        for name, size in mesh.axes:
            if size > 1:
                lines = mesh.lines(name)
                now = self.links.transport(name, lines, self.rank)
                behind = self.links.transport(name, lines, self.rank, "behind")
                opened.append(counted_axis(name, (now, behind), ledger))
        here = self.everyone
        everyone = counted_axis(here.name, (here.transport, here.behind), ledger)
        return replace(self, mesh=mesh, axes=tuple(opened), everyone=everyone, ledger=ledger)

    def within(self, name: str, groups: Sequence[Sequence[int]]) -> Axis:
        """The ranks of axis `name` that are in one group with this one; called by all ranks.

        `groups` are ranks on the axis, each in one group.  What is sent counts as the axis's.
        """
        here = self.axis(name)
        mine = next(group for group in groups if here.rank in group)
        if all(len(group) == 1 for group in groups):
            return Axis(name, ledger=self.ledger)
        lines = [[line[r] for r in group] for line in self.mesh.lines(name) for group in groups]
        # opened by ranks that are alone too: every rank opens the same, in one order
        pair = [self.links.transport(name, lines, self.rank, queue) for queue in ("now", "behind")]
        opened = pair if len(mine) > 1 else []
        return counted_axis(name, opened, self.ledger)

    def device_mesh(self) -> DeviceMesh:
        """These axes as torch's DeviceMesh, on the same process groups; axes of one rank left out.

        Raises:
            ValueError: the world's ranks are not processes of torch.distributed.
        """
        wide = Mesh(tuple((axis.name, axis.size) for axis in self.axes))
        return device_mesh(wide, [axis.transport for axis in self.axes], self.device.type)

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.everyone.transport.barrier()

    def require_open(self) -> None:
        """Raise InputError if it has been closed."""
        if self.links.closed:
            raise bad(
                "an engine that is used after world.close()",
                "steps, evaluation and checkpoints before the world is left",
                "world.close() as the program's last line",
            )

    def close(self) -> None:
        """Leave the world: process groups that `init` began are destroyed."""
        self.links.close()


def world_of(rank: int, size: int, device: torch.device, links: Links) -> World:
    """A world over `links`.  Called by all ranks."""
    ledger = Ledger()
    lines = [list(range(size))]
    queues = ("now", "behind") if size > 1 else ()
    pair = [links.transport("world", lines, rank, queue) for queue in queues]
    everyone = counted_axis("world", pair, ledger)
    return World(rank, size, device, links, everyone=everyone, ledger=ledger)


def alone(device: torch.device | str = "cpu") -> World:
    """The world of one rank."""
    return world_of(0, 1, torch.device(device), FakeLinks())


def traced(rank: int, size: int) -> World:
    """Rank `rank` of a world of `size` that moves no data and only writes its ledger."""
    return world_of(rank, size, torch.device("cpu"), FakeLinks())


def init(device: str | None = None, *, shared_memory: bool | None = None) -> World:
    """The world this process was started in.

    An initialised `torch.distributed` is used, however it was initialised: the environment is not
    looked at.  Else torchrun's environment, then Slurm's; else this is a world of one.  `device` is
    "cpu", "cuda", or None: CUDA where every local rank can have a GPU.  With `shared_memory=False`
    ranks of one host send everything through their process group, as ranks of several hosts do;
    None takes SHARDWISE_SHARED_MEMORY from the environment, and True where it is not set.

    From then on an InputError that ends a rank is shown as one paragraph (refusal.py).

    Raises:
        InputError: CUDA was asked for and there is none; the environment is incomplete; the world
            of this process has been closed; the ranks cannot meet, or not all came in time (see
            start.py).
    """
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        where = _device(device, local_rank(rank))
        show_refusals(rank, size)
        links = TorchLinks(ours=False, device_type=where.type, shared_memory=shared_memory)
        return world_of(rank, size, _ready(where), links)
    try:
        start = environment()
    except InputError:
        show_refusals()
        raise
    where = _ready(_device(device, start.local_rank if start else 0))
    if start is None or (start.size == 1 and start.rank == 0 and start.address is None):
        return alone(where)
    if TorchLinks.left:
        raise bad(
            "sw.init() after world.close() in one process, whose ranks have parted",
            "one world a process, which any number of engines share",
            "world.close() as the program's last line",
        )
    limits = read_limits()
    show_refusals(start.rank)  # of a start that fails
    store = _begin(start, where, limits)
    show_refusals(start.rank, start.size)  # after torch, which sets a hook too
    links = TorchLinks(ours=True, device_type=where.type, shared_memory=shared_memory)
    if not launched():
        links.peers = watch_peers(store, start.rank, start.size, limits)
    atexit.register(links.close)
    return world_of(dist.get_rank(), dist.get_world_size(), where, links)


def _ready(device: torch.device) -> torch.device:
    if device.type == "cpu":
        keep_freed_memory()
    return device


def _begin(start: Start, device: torch.device, limits: Limits) -> Store:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "nccl"
    store, timeout = meet(start, limits), group_timeout(limits)
    dist.init_process_group(
        backend, store=store, rank=start.rank, world_size=start.size, timeout=timeout
    )
    return store


def _device(asked: str | None, local_rank: int) -> torch.device:
    gpus = torch.cuda.device_count()
    if asked == "cuda" and gpus <= local_rank:
        raise bad(
            f"device cuda for local rank {local_rank}, where {gpus} GPUs can be used",
            "as many local ranks as GPUs, or the processor",
            'device = "cpu"',
        )
    if asked not in (None, "cpu", "cuda"):
        raise bad(f"device '{asked}'", "cpu or cuda", 'device = "cpu"')
    if asked == "cuda" or (asked is None and gpus > local_rank):
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
