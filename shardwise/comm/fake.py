"""The fake transport: no other process is there, and only the ledger is written.

It serves a world of one, where nothing is sent, and a traced rank of a world of any size, which
records what that rank would send.  It assumes that the other ranks send the same as this one, or
zeros.  Shapes and the order of calls are real; values stay finite but have no meaning.  Tensors may
be on any device, since recorded passes run on meta.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardwise.comm.ledger import volume
from shardwise.comm.transport import Links, Pending, Transport


class Fake(Transport):
    """Rank `rank` of `size`; without arguments, the only rank of a world of one."""

    answered = False

    def __init__(self, rank: int = 0, size: int = 1, links: "FakeLinks | None" = None) -> None:
        self.rank, self.size, self.links = rank, size, links

    def require_device(self, kind: str, *tensors: Tensor) -> None:
        return

    def _send(
        self,
        kind: str,
        x: Tensor,
        act: Callable[[], Any],
        *,
        root: int = 0,
        counts: Sequence[int] = (),
    ) -> Pending[Any]:
        line = self.begin(kind, x)
        before = line.sent_bytes
        numel, peers = (
            (x.numel(), 1)
            if kind == "send"
            else volume(kind, x.numel(), self.size, self.rank, root, counts)
        )
        line.add(x, numel, peers)
        if self.links is not None and self.links.issue is not None:
            return self.links.issue(self.axis, kind, line.sent_bytes - before, act)
        act()
        return Pending()

    def all_reduce(self, x: Tensor, op: str = "sum") -> Pending[Any]:
        # as if every rank had the same
        return self._send("all_reduce", x, lambda: x.mul_(self.size if op == "sum" else 1))

    def broadcast(self, x: Tensor, root: int) -> Pending[Any]:
        return self._send("broadcast", x, lambda: None, root=root)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending[Any]:
        # as if every rank had the same
        return self._send("all_gather", x, lambda: out.view(self.size, -1).copy_(x.clone()))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending[Any]:
        own = x.view(self.size, -1)[self.rank]
        return self._send("reduce_scatter", x, lambda: out.copy_(own))

    def all_to_all(
        self, out: Tensor, x: Tensor, out_counts: Sequence[int], in_counts: Sequence[int]
    ) -> Pending[Any]:
        """As if every rank had the same, or zeros."""

        def act() -> Tensor:
            return out.copy_(x) if out.numel() == x.numel() else out.zero_()

        return self._send("all_to_all", x, act, counts=in_counts)

    def send(self, x: Tensor, to: int) -> Pending[Any]:
        if self.size == 1:
            raise ValueError(f"a world of one cannot send to rank {to}: there is no other rank")
        return self._send("send", x, lambda: None)

    def receive(self, x: Tensor, source: int) -> Pending[Any]:
        if self.size == 1:
            raise ValueError(f"a world of one cannot receive from rank {source}: there is none")
        x.zero_()
        return Pending()

    def barrier(self) -> None:
        return None


#: Gets the axis, the kind and the sent bytes of a message, and what gives its result.
Issue = Callable[[str, str, int, Callable[[], Any]], Pending[Any]]


class FakeLinks(Links):
    """Opens fake transports. While a step is recorded, `issue` is called for each message."""

    issue: Issue | None = None

    def transport(
        self, axis: str, lines: Sequence[Sequence[int]], rank: int, queue: str = "now"
    ) -> Transport:
        line = next(line for line in lines if rank in line)
        return Fake(list(line).index(rank), len(line), self)

    def close(self) -> None: ...
