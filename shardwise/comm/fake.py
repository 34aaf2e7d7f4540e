"""The fake transport: no other process is there, and only the ledger is written.

It serves a world of one, where nothing is sent, and a traced rank of a world of any size, which
records what that rank would send.  It assumes that the other ranks send the same as this one, or
zeros.  Shapes and the order of calls are real; values stay finite but have no meaning.  Tensors may
be on any device, since recorded passes run on meta.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise.comm.transport import Links, Pending, Transport


class Fake(Transport):
    """Rank `rank` of `size`; without arguments, the only rank of a world of one."""

    answered = False

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def require_device(self, kind: str, *tensors: Tensor) -> None:
        return

    def all_reduce(self, x: Tensor, op: str = "sum") -> Pending[Any]:
        self.count("all_reduce", x)
        x.mul_(self.size if op == "sum" else 1)  # as if every rank had the same
        return Pending()

    def broadcast(self, x: Tensor, root: int) -> Pending[Any]:
        self.count("broadcast", x, root=root)
        return Pending()

    def all_gather(self, out: Tensor, x: Tensor) -> Pending[Any]:
        self.count("all_gather", x, out)
        out.view(self.size, -1).copy_(x.clone())  # as if every rank had the same
        return Pending()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending[Any]:
        self.count("reduce_scatter", x, out)
        out.copy_(x.view(self.size, -1)[self.rank])
        return Pending()

    def all_to_all(
        self, out: Tensor, x: Tensor, out_counts: Sequence[int], in_counts: Sequence[int]
    ) -> Pending[Any]:
        self.count("all_to_all", x, out, counts=in_counts)
        out.copy_(x) if out.numel() == x.numel() else out.zero_()
        return Pending()

    def send(self, x: Tensor, to: int) -> Pending[Any]:
        if self.size == 1:
            raise ValueError(f"a world of one cannot send to rank {to}: there is no other rank")
        self.begin("send", x).add(x, x.numel())
        return Pending()

    def receive(self, x: Tensor, source: int) -> Pending[Any]:
        if self.size == 1:
            raise ValueError(f"a world of one cannot receive from rank {source}: there is none")
        x.zero_()
        return Pending()

    def barrier(self) -> None:
        return None


class FakeLinks(Links):
    """Opens fake transports."""

    def transport(
        self, axis: str, lines: Sequence[Sequence[int]], rank: int, queue: str = "now"
    ) -> Transport:
        line = next(line for line in lines if rank in line)
        return Fake(list(line).index(rank), len(line))

    def close(self) -> None: ...
