"""Process groups of torch.distributed for the lines of a mesh, and a cheap `once_differentiable`.

torch's `once_differentiable` switches gradients off and on around every call, which can take longer
than the backward itself.  `once` does so only if gradients are on; usually they are off.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from shardwise.comm.fake import Fake
from shardwise.comm.gloo.gloo import Gloo
from shardwise.comm.gloo.shared import shared_memory_wanted
from shardwise.comm.ledger import Ledger
from shardwise.comm.nccl import Nccl
from shardwise.comm.start.peers import Peers
from shardwise.comm.start.rendezvous import Limits, read_limits
from shardwise.comm.transport import Links, Transport


class TorchLinks(Links):
    """Opens a process group for every queue of a line, once; `close` destroys them.
    A group of gloo holds threads and sockets while it lives.  With `ours`, torch.distributed itself
    was initialised here, and `close` ends it.  The groups have the backend of the user's group; if
    that has one backend for each type of device, the one of `device_type`.  Without `shared_memory`
    (None: read the environment) all messages go through the process groups.
    """

    #: Those of `init`: torch.distributed exists once in a process, and so do its groups.
    of_process: "TorchLinks | None" = None

    def __init__(
        self, *, ours: bool, device_type: str = "cpu", shared_memory: bool | None = None
    ) -> None:
        self.peers: Peers | None = None
        self.ours, self.device_type = ours, device_type
        self.shared = shared_memory_wanted() if shared_memory is None else shared_memory
        self.parent = dist.group.WORLD
        self.opened: dict[tuple[tuple[int, ...], str], Gloo | Nccl | None] = {}
        self.users: Counter[tuple[tuple[int, ...], str]] = Counter()

    def watch(self, ledger: Ledger) -> None:
        if self.peers is not None:
            self.peers.ledgers.add(ledger)

    def same(self, device_type: str, shared_memory: bool | None) -> bool:
        wanted = shared_memory_wanted() if shared_memory is None else shared_memory
        alive = not self.closed and self.parent is dist.group.WORLD
        return alive and (self.device_type, self.shared) == (device_type, wanted)

    def transport(
        self, axis: str, lines: Sequence[Sequence[int]], rank: int, queue: str = "now"
    ) -> Transport:
        """The transport of the line of `rank`; ranks ask for the same lines in order."""
        keys = [(tuple(line), queue) for line in lines]
        self.users.update(keys)
        self._open(axis, [key for key in keys if len(key[0]) > 1 and key not in self.opened])
        own = next((key for key in keys if rank in key[0]), None)
        if own is None:
            raise ValueError(f"rank {rank} is on no line of axis {axis}: {lines}")
        return self.opened.get(own) or Fake()  # a line of one rank has no group

    def _open(self, axis: str, keys: Sequence[tuple[tuple[int, ...], str]]) -> None:
        """Open the groups of these lines, in one call if NCCL can split the user's group."""
        timeout, backend = group_timeout(read_limits()), self._backend()
        rank, parent = dist.get_rank(), self.parent
        if keys and parent is not None and parent.bound_device_id is not None:
            lines = [list(line) for line, _ in keys]
            mine = dist.split_group(split_ranks=lines, timeout=timeout, group_desc=axis)
            groups = [mine if rank in line else None for line in lines]
        else:  # torch requires that every rank creates every group in one order
            groups = [
                dist.new_group(list(line), timeout, backend, group_desc=axis) for line, _ in keys
            ]
        for key, group in zip(keys, groups, strict=True):
            self.opened[key] = None
            if isinstance(group, dist.ProcessGroup):
                gloo = backend == "gloo"
                self.opened[key] = Gloo(group, shared=self.shared) if gloo else Nccl(group)

    def release(self, lines: Sequence[Sequence[int]], queue: str = "now") -> None:
        """Destroy the groups of the lines that nobody else has asked for."""
        keys = [(tuple(line), queue) for line in lines]
        self.users.subtract(keys)
        unused = [key for key in keys if self.users[key] <= 0 and key in self.opened]
        if self.closed or not unused or dist.group.WORLD is not self.parent:
            return
        dist.barrier()  # all ranks have had their last message
        self._destroy([self.opened.pop(key) for key in unused])

    @staticmethod
    def _destroy(transports: Iterable[Gloo | Nccl | None]) -> None:
        own = [transport for transport in transports if transport is not None]
        for transport in own:
            if isinstance(transport, Gloo) and transport.memory.mailboxes is not None:
                transport.memory.mailboxes.leave()
        for transport in own:
            dist.destroy_process_group(transport.group)

    @property
    def in_order(self) -> bool:
        """Each communicator of NCCL has one stream."""
        return self._backend() == "nccl"

    def _backend(self) -> str:
        """The name of the user's backend; for several it is "undefined" or a list."""
        name = dist.get_backend()
        if name != "undefined" and ":" not in name:
            return name
        return "nccl" if self.device_type == "cuda" else "gloo"

    @property
    def shared_bytes(self) -> int:
        gloo = [transport for transport in self.opened.values() if isinstance(transport, Gloo)]
        return sum(one.memory.mailboxes.put_bytes for one in gloo if one.memory.mailboxes)

    def close(self) -> None:
        """Destroy the groups after their last use; a rank that still waits gets an error."""
        self.closed = True
        peers, self.peers = self.peers, None
        if peers is not None:
            peers.stop()
        if not dist.is_initialized():
            return
        self._destroy(self.opened.values())
        self.opened = {}
        if self.ours:
            TorchLinks.of_process = self  # `init` cannot begin another
            dist.destroy_process_group()


def group_timeout(limits: Limits) -> timedelta:
    """How long torch waits in a collective: longer than the hang detector."""
    return timedelta(seconds=limits.patience_s + 60.0)


def available_backends() -> tuple[str, ...]:
    """Those of this build of PyTorch."""
    return ("gloo",) * dist.is_gloo_available() + ("nccl",) * dist.is_nccl_available()


# --- a cheaper `once_differentiable` --------------------------------------------------------------


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the `backward` of an autograd function.  A double backward through it raises."""
    refusing = once_differentiable(backward)

    @wraps(backward)
    def chosen(ctx: Any, *grads: Any) -> Any:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *grads)

    return chosen
