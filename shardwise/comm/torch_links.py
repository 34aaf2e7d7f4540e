"""Process groups of torch.distributed for the lines of a mesh."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.gloo import Gloo
from shardwise.comm.limits import Limits, read_limits
from shardwise.comm.nccl import Nccl
from shardwise.comm.peers import Peers
from shardwise.comm.shared import Mailboxes, shared_memory_wanted
from shardwise.comm.transport import Links, Transport
from shardwise.core.mesh import Mesh


class TorchLinks(Links):
    """Opens a process group for every queue of every line, once; `close` destroys them.

    A group of gloo holds threads and sockets while it lives.  With `ours`, torch.distributed itself
    was initialised here, and `close` ends it.  The groups have the backend of the user's group; if
    that has one backend for each type of device, the one of `device_type`.  Without `shared_memory`
    (None: read the environment) all messages go through the process groups.
    """

    left = False  # whether this process has closed a world that it initialised

    def __init__(
        self, *, ours: bool, device_type: str = "cpu", shared_memory: bool | None = None
    ) -> None:
        self.peers: Peers | None = None
        self.ours, self.device_type = ours, device_type
        self.shared = shared_memory_wanted() if shared_memory is None else shared_memory
        self.opened: dict[tuple[tuple[tuple[int, ...], ...], str], Gloo | Nccl] = {}

    def transport(
        self, axis: str, lines: Sequence[Sequence[int]], rank: int, queue: str = "now"
    ) -> Transport:
        """Open a process group for each line, with the world's backend; return that of `rank`.

        Every rank asks for the same lines in the same order, so all ranks open the same groups.
        """
        key = (tuple(map(tuple, lines)), queue)
        if key in self.opened:
            return self.opened[key]
        mine, backend, timeout = None, self._backend(), group_timeout(read_limits())
        for line in lines:  # torch requires that every rank creates every group in one order
            group = dist.new_group(list(line), timeout, backend, group_desc=axis)
            mine = group if rank in line else mine
        if not isinstance(mine, dist.ProcessGroup):
            raise ValueError(f"rank {rank} is on no line of axis {axis}: {lines}")
        gloo = backend == "gloo"
        self.opened[key] = Gloo(mine, shared=self.shared) if gloo else Nccl(mine)
        return self.opened[key]

    def _backend(self) -> str:
        """The name of the user's backend; for several it is "undefined" or a list."""
        name = dist.get_backend()
        if name != "undefined" and ":" not in name:
            return name
        return "nccl" if self.device_type == "cuda" else "gloo"

    @property
    def shared_bytes(self) -> int:
        """Bytes that this rank has sent to others through shared memory."""
        return sum(mailboxes.put_bytes for mailboxes in self._mailboxes())

    def _mailboxes(self) -> list[Mailboxes]:
        gloo = [transport for transport in self.opened.values() if isinstance(transport, Gloo)]
        return [one.memory.mailboxes for one in gloo if one.memory.mailboxes is not None]

    def close(self) -> None:
        """Destroy the open groups, after their last use on all ranks.

        A rank that still waits for this one gets an error.
        """
        self.closed = True
        peers, self.peers = self.peers, None
        if peers is not None:
            peers.stop()
        if not dist.is_initialized():
            return
        for mailboxes in self._mailboxes():
            mailboxes.leave()
        for transport in self.opened.values():
            dist.destroy_process_group(transport.group)
        self.opened = {}
        if self.ours:
            TorchLinks.left = True
            dist.destroy_process_group()


def group_timeout(limits: Limits) -> timedelta:
    """How long torch waits in a collective: longer than the hang detector."""
    return timedelta(seconds=limits.patience_s + 60.0)


def process_group(transport: Transport) -> dist.ProcessGroup | None:
    """The process group of a transport; None if it has none (threads, traces)."""
    return transport.group if isinstance(transport, Gloo | Nccl) else None


def device_mesh(mesh: Mesh, transports: Sequence[Transport], device_type: str) -> DeviceMesh:
    """Torch's own mesh over our process groups, for other users of it (DTensor, FSDP2).

    `transports` has one for each axis of `mesh`, in its order.

    Raises:
        ValueError: a transport that has no process group (threads, traces).
    """
    groups = [group for group in map(process_group, transports) if group is not None]
    if len(groups) != len(mesh.axes):
        raise ValueError(f"mesh '{mesh}' has axes without a process group of torch.distributed")
    names, sizes = zip(*mesh.axes, strict=True)
    ranks = torch.arange(mesh.size, dtype=torch.int64, device="cpu").view(sizes)
    given = groups if len(groups) > 1 else groups[0]
    return DeviceMesh.from_group(given, device_type, ranks, mesh_dim_names=names)
