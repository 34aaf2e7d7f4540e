"""this file is the transport that moves no data: what a world of any size would send.

The other ranks are taken to bring what this one brings, or nothing: values are finite where they
were, and mean nothing; shapes, the order of moves and the ledger are those of the real world.
"""

from collections.abc import Sequence

from torch import Tensor

from shardwise.comm import volume
from shardwise.comm.transport import Links, Pending, Transport


class Trace(Transport):
    """Rank `rank` of `size`, with nobody there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor, op: str = "sum") -> Pending:
        self.begin("all_reduce").collective(x, volume.all_reduce(x.numel(), self.size))
        return Pending()

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> Pending:
        self.begin("reduce").collective(x, volume.reduce(x.numel(), self.rank == root))
        return Pending()

    def broadcast(self, x: Tensor, root: int) -> Pending:
        sent = volume.broadcast(x.numel(), self.size, self.rank == root)
        self.begin("broadcast").collective(x, sent)
        return Pending()

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        self.begin("all_gather").collective(x, volume.all_gather(x.numel(), self.size))
        out.view(self.size, -1).copy_(x.clone())  # as if every rank brought the same
        return Pending()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        self.begin("reduce_scatter").collective(x, volume.reduce_scatter(out.numel(), self.size))
        out.copy_(x.view(self.size, -1)[self.rank])
        return Pending()

    def all_to_all(
        self, out: Tensor, x: Tensor, out_counts: Sequence[int], in_counts: Sequence[int]
    ) -> Pending:
        self.begin("all_to_all").collective(x, volume.all_to_all(in_counts, self.rank))
        out.zero_()
        return Pending()

    def send(self, x: Tensor, to: int) -> Pending:
        self.begin("send").message(x)
        return Pending()

    def receive(self, x: Tensor, source: int) -> Pending:
        x.zero_()
        return Pending()

    def barrier(self) -> None:
        return None


class TraceLinks(Links):
    """Opens lines to nowhere."""

    def transport(
        self, axis: str, lines: Sequence[Sequence[int]], rank: int, queue: str = "now"
    ) -> Transport:
        line = next(line for line in lines if rank in line)
        return Trace(list(line).index(rank), len(line))

    def close(self) -> None:
        """Nothing stays open."""
