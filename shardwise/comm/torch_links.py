"""this file is how lines of a mesh become process groups of torch.distributed."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.gloo import Gloo
from shardwise.comm.limits import Limits, read_limits
from shardwise.comm.nccl import Nccl
from shardwise.comm.peers import Peers
from shardwise.comm.transport import Links, Transport
from shardwise.core.mesh import Mesh


class TorchLinks(Links):
    """Opens a process group for every queue of every line, once; `close` gives them back.

    A group of gloo holds threads and sockets for as long as it lives.  `ours` says that
    torch.distributed itself was started by us, and ends with us.  The groups have the backend that
    the user's has; of one with a backend for each type of device, that of `device_type`.  Without
    `shared_memory` all messages go through the process groups.
    """

    left = False  # whether this process has been in a world of ours, and has left it

    def __init__(self, *, ours: bool, device_type: str = "cpu", shared_memory: bool = True) -> None:
        self.peers: Peers | None = None
        self.ours, self.device_type, self.shared_memory = ours, device_type, shared_memory
        self.opened: dict[tuple[tuple[tuple[int, ...], ...], str], Gloo | Nccl] = {}

    def transport(
        self, axis: str, lines: Sequence[Sequence[int]], rank: int, queue: str = "now"
    ) -> Transport:
        """A process group for each line, gloo or NCCL as the world is; ours is returned.

        Every rank asks for the same lines in the same order, and so finds the same ones opened.
        """
        key = (tuple(map(tuple, lines)), queue)
        if key in self.opened:
            return self.opened[key]
        mine, backend, timeout = None, self._backend(), group_timeout(read_limits())
        for line in lines:  # every rank makes every group, in one order: torch asks for it
            group = dist.new_group(list(line), timeout, backend, group_desc=axis)
            mine = group if rank in line else mine
        if not isinstance(mine, dist.ProcessGroup):
            raise ValueError(f"rank {rank} is on no line of axis {axis}: {lines}")
        gloo = backend == "gloo"
        self.opened[key] = Gloo(mine, shared=self.shared_memory) if gloo else Nccl(mine)
        return self.opened[key]

    def _backend(self) -> str:
        """The name of the user's backend; several have the name "undefined", or are listed."""
        name = dist.get_backend()
        if name != "undefined" and ":" not in name:
            return name
        return "nccl" if self.device_type == "cuda" else "gloo"

    @property
    def shared_bytes(self) -> int:
        """Bytes that this rank has handed to others through shared memory."""
        gloo = [transport for transport in self.opened.values() if isinstance(transport, Gloo)]
        return sum(mailboxes.put_bytes for one in gloo for mailboxes in one.opened)

    def close(self) -> None:
        """Destroy what was opened.  All ranks have come to the end of what they did on it.

        One that has not is told where it waits for this one.
        """
        self.closed = True
        peers, self.peers = self.peers, None
        if peers is not None:
            peers.stop()
        if not dist.is_initialized():
            return
        for transport in self.opened.values():
            for mailboxes in transport.opened if isinstance(transport, Gloo) else ():
                mailboxes.leave()
            dist.destroy_process_group(transport.group)
        self.opened = {}
        if self.ours:
            TorchLinks.left = True
            dist.destroy_process_group()


def group_timeout(limits: Limits) -> timedelta:
    """How long torch waits in a collective: longer than a rank that hangs is looked for."""
    return timedelta(seconds=limits.patience_s + 60.0)


def device_mesh(mesh: Mesh, transports: Sequence[Transport], device_type: str) -> DeviceMesh:
    """Torch's own mesh over the process groups of ours, for what else speaks it (DTensor, FSDP2).

    `transports` are one an axis of `mesh`, in its order.

    Raises:
        ValueError: a transport that has no process group (threads, traces).
    """
    groups = [t.group for t in transports if isinstance(t, Gloo | Nccl)]
    if len(groups) != len(mesh.axes):
        raise ValueError(f"mesh '{mesh}' has axes without a process group of torch.distributed")
    names, sizes = zip(*mesh.axes, strict=True)
    ranks = torch.arange(mesh.size).view(sizes)
    given = groups if len(groups) > 1 else groups[0]
    return DeviceMesh.from_group(given, device_type, ranks, mesh_dim_names=names)
