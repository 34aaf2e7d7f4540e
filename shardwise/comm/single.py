"""this file is the world of one: the null object that keeps `if size > 1` out of every caller."""

from collections.abc import Sequence

from torch import Tensor

from shardwise.comm.transport import Links, Pending, Transport


class Alone(Transport):
    """One rank: every collective is the identity and sends nothing."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor, op: str = "sum") -> Pending:
        return Pending()

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> Pending:
        return Pending()

    def broadcast(self, x: Tensor, root: int) -> Pending:
        return Pending()

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        return _copied(out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        return _copied(out, x)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_counts: Sequence[int], in_counts: Sequence[int]
    ) -> Pending:
        return _copied(out, x)

    def send(self, x: Tensor, to: int) -> Pending:
        raise ValueError(f"a world of one cannot send to rank {to}: there is no other rank")

    def receive(self, x: Tensor, source: int) -> Pending:
        raise ValueError(f"a world of one cannot receive from rank {source}: there is none")

    def barrier(self) -> None:
        return None


def _copied(out: Tensor, x: Tensor) -> Pending:
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    return Pending()


class AloneLinks(Links):
    """Only lines of one rank can be opened."""

    def transport(
        self, axis: str, lines: Sequence[Sequence[int]], rank: int, queue: str = "now"
    ) -> Transport:
        """The transport that moves nothing; a line of more than this rank is an error."""
        longest = max(map(len, lines))
        if longest > 1:
            raise ValueError(f"axis {axis} has {longest} ranks, the world has one")
        return Alone()

    def close(self) -> None:
        """Nothing stays open."""
