"""this file is the gloo transport: ranks hand blocks straight to the ranks that need them.

Gloo's own reduce-scatter is an all-reduce inside (2N(n-1)/n elements on the wire where N(n-1)/n
would do), and its all-gather copies every block once more than it must.  Both are therefore built
here from sends and receives, one message a pair, and the sum is taken where it is needed:

    reduce_scatter, rank 1 of 3          all_gather, rank 1 of 3
      x   [  x0  |  x1  |  x2  ]           out [      |  x   |      ]
             |              |                     ^       |      ^
             v to 0         v to 2            from 0   to 0, 2  from 2
      out = x1 + (from 0) + (from 2)

Two ranks, 16.8 MB, one thread each: reduce-scatter 7.6 ms (gloo's own 24), all-gather 6.3 (12.5).
A large all-reduce is gloo's own, which goes on by itself beside the backward pass; a small one is
the two halves above, half the latency; between two ranks, the whole handed over and added: less.
On one host messages up to a few MiB do not go through gloo at all, see shared.py: those of one
exchange stay in their mailboxes until the last is there, and are joined or added in one step.

Messages count as they are handed over, one by one: `_send` here, `Mailboxes.send` there.  Gloo's
own collectives count by their definition (volume.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm import volume
from shardwise.comm.ledger import Line
from shardwise.comm.shared import Mailboxes, by_gloo, open_mailboxes
from shardwise.comm.transport import Pending, Transport

#: All-reduces up to this size are made of the two halves above (measured: they win below it).
SMALL_BYTES = 2**20

#: Two ranks hand each other the whole up to this size: as many bytes as two halves, one message.
PAIR_BYTES = 2**22

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

PAIRED = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Memory:
    """The memory that the ranks of a group share: opened when it is first wanted, once."""

    def __init__(self, group: dist.ProcessGroup, *, shared: bool) -> None:
        self.group = group
        self.opened: list[Mailboxes] = []  # none or one
        self.asked = not shared

    def mailboxes(self) -> list[Mailboxes]:
        """Those of this group, where its ranks share memory.  Called first by all ranks."""
        if not self.asked:
            self.asked, mailboxes = True, open_mailboxes(self.group)
            self.opened = [] if mailboxes is None else [mailboxes]
        return self.opened


class Gloo(Transport):
    """One process group of gloo; without `shared`, all its messages go through gloo."""

    def __init__(self, group: dist.ProcessGroup, *, shared: bool = True) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.peers = [(self.rank + k) % self.size for k in range(1, self.size)]
        self.memory = Memory(group, shared=shared)

    @property
    def opened(self) -> list[Mailboxes]:
        """The mailboxes opened so far: none or one."""
        return self.memory.opened

    def _exchange(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], line: Line
    ) -> list[Callable[[], object]]:
        """Send and receive one message a peer, in the order of `peers`; how to wait for each."""
        ends: list[Callable[[], object]] = []
        for peer, x in zip(self.peers, incoming, strict=True):
            if x.numel():
                ends.append(self._receive(x, peer))
        for peer, x in zip(self.peers, outgoing, strict=True):
            if x.numel():
                ends += self._send(x, peer, line)
        return ends

    def _receive(self, x: Tensor, peer: int) -> Callable[[], object]:
        mailboxes = self._holding(x)
        return (
            self.group.recv([x], peer, 0).wait if mailboxes is None else mailboxes.receive(x, peer)
        )

    def _meet(
        self, outgoing: Sequence[Tensor], make: Callable[[list[Tensor]], Tensor], line: Line
    ) -> Callable[[], Tensor]:
        """Send one message a peer, of any strides, and expect one of its shape from each.

        Call the result, once, for what `make` makes of those, in the order of `peers`; it keeps no
        view of them, which may lie in a mailbox.  Until then what is sent is left alone.
        """
        like = outgoing[0]
        if not like.numel():  # nothing is sent
            return lambda: make(list(outgoing))
        mailboxes = self._holding(like)
        if mailboxes is not None:
            return mailboxes.meet(outgoing, self.peers, make, line)
        met = [like.new_empty(like.shape) for _ in self.peers]
        ends = self._exchange(outgoing, [x.view(-1) for x in met], line)

        def end() -> Tensor:
            for each in ends:
                each()
            return make(met)

        return end

    def _send(self, x: Tensor, peer: int, line: Line) -> list[Callable[[], object]]:
        """Of any strides; a mailbox takes it as it lies."""
        mailboxes = self._holding(x)
        if mailboxes is not None:
            return mailboxes.send(x, peer, line)
        line.message(x)
        return by_gloo(self.group, x, peer, 0)

    def _holding(self, x: Tensor) -> Mailboxes | None:
        """The mailboxes that a message goes through, if it does."""
        for mailboxes in self.memory.mailboxes():
            if mailboxes.fits(x):
                return mailboxes
        return None

    def all_reduce(self, x: Tensor, op: str = "sum") -> Pending:
        """Large: gloo's own.  Small: its end, or second half, begins when somebody waits for it.

        So ranks must wait for small ones in one order.
        """
        line = self.begin("all_reduce")
        if self.size == 2 and x.nbytes <= PAIR_BYTES:
            return Pending(self._pair(x, PAIRED[op], line) if x.numel() else ())
        open_here = self.memory.mailboxes()
        small_bytes = max([SMALL_BYTES, *(m.most_bytes * self.size for m in open_here)])
        if op != "sum" or x.nbytes > small_bytes or x.numel() % self.size:
            line.collective(x, volume.all_reduce(x.numel(), self.size))
            return _pending(dist.all_reduce(x, OPS[op], self.group, async_op=True))
        block = x.view(self.size, -1)[self.rank]
        first = self._add_blocks(block, x, line)
        return Pending([first.wait], lambda: self._join_blocks(x, block, line))

    def _pair(self, x: Tensor, op: Callable[..., Tensor], line: Line) -> list[Callable[[], object]]:
        """Between two ranks: `x` is handed over whole, and what comes is added to it."""
        (peer,) = self.peers
        leaving = self._send(x, peer, line)
        if not leaving:  # it is in a mailbox
            (mailboxes,) = self.opened
            return [mailboxes.read(x, peer, lambda theirs: op(x, theirs, out=x))]
        arrived = torch.empty_like(x)
        return [self._receive(arrived, peer), *leaving, lambda: op(x, arrived, out=x)]

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> Pending:
        self.begin("reduce").collective(x, volume.reduce(x.numel(), self.rank == root))
        to = dist.get_global_rank(self.group, root)
        return _pending(dist.reduce(x, to, OPS[op], self.group, async_op=True))

    def broadcast(self, x: Tensor, root: int) -> Pending:
        sent = volume.broadcast(x.numel(), self.size, self.rank == root)
        self.begin("broadcast").collective(x, sent)
        source = dist.get_global_rank(self.group, root)
        return _pending(dist.broadcast(x, source, self.group, async_op=True))

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        return self._join_blocks(out, x, self.begin("all_gather"))

    def _join_blocks(self, out: Tensor, x: Tensor, line: Line) -> Pending:
        blocks = out.view(self.size, -1)
        ends = self._exchange([x] * len(self.peers), [blocks[peer] for peer in self.peers], line)
        if blocks[self.rank].data_ptr() != x.data_ptr():
            blocks[self.rank].copy_(x)
        return Pending(ends)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        return self._add_blocks(out, x, self.begin("reduce_scatter"))

    def _add_blocks(self, out: Tensor, x: Tensor, line: Line) -> Pending:
        blocks = x.view(self.size, -1)
        outgoing, own = [blocks[peer] for peer in self.peers], blocks[self.rank]
        return Pending([self._meet(outgoing, lambda others: add_all(own, others, out), line)])

    def all_gather_along(self, x: Tensor, dim: int) -> Tensor:
        """The blocks are joined from where they lie, not put end to end first."""
        line = self.begin("all_gather")
        mailboxes = self._holding(x) if len(self.peers) == 1 and x.numel() else None
        if mailboxes is not None:
            if self.rank:
                return mailboxes.swap(x, 0, lambda theirs: torch.cat((theirs, x), dim), line)
            return mailboxes.swap(x, 1, lambda theirs: torch.cat((x, theirs), dim), line)
        above = self.size - 1 - self.rank  # peers that come after this rank are met first

        def join(others: list[Tensor]) -> Tensor:
            return torch.cat((*others[above:], x, *others[:above]), dim)

        sent = x if len(self.peers) == 1 else x.contiguous()  # once for all
        return self._meet([sent] * len(self.peers), join, line)()

    def reduce_scatter_along(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        """Only what goes to others through gloo is made contiguous."""
        blocks = x.chunk(self.size, dim)
        outgoing, own = [blocks[peer] for peer in self.peers], blocks[self.rank]
        line = self.begin("reduce_scatter")
        return self._meet(outgoing, lambda others: add_all(own, others).contiguous(), line)

    def reduce_scatter_at_once(self, x: Tensor, dim: int) -> Tensor:
        """Between two ranks a swap."""
        part, rank = x.shape[dim] // 2, self.rank
        if len(self.peers) > 1 or not x.numel():
            return super().reduce_scatter_at_once(x, dim)
        sent = x.narrow(dim, (1 - rank) * part, part)
        mailboxes = self._holding(sent)
        if mailboxes is None:
            return super().reduce_scatter_at_once(x, dim)
        own = x.narrow(dim, rank * part, part)
        line = self.begin("reduce_scatter")
        return mailboxes.swap(
            sent, 1 - rank, lambda theirs: torch.add(own, theirs).contiguous(), line
        )

    def all_to_all(
        self, out: Tensor, x: Tensor, out_counts: Sequence[int], in_counts: Sequence[int]
    ) -> Pending:
        """Straight to each peer; what is empty is not sent."""
        theirs, mine = out.split(list(out_counts)), x.split(list(in_counts))
        outgoing, incoming = [mine[p] for p in self.peers], [theirs[p] for p in self.peers]
        ends = self._exchange(outgoing, incoming, self.begin("all_to_all"))
        theirs[self.rank].copy_(mine[self.rank])
        return Pending(ends)

    def ready(self) -> None:
        self.memory.mailboxes()

    def send(self, x: Tensor, to: int) -> Pending:
        """Through a mailbox where they are open: two ranks alone cannot open them."""
        line = self.begin("send")
        for mailboxes in self.opened:
            if mailboxes.fits(x):
                return Pending(mailboxes.send(x.view(-1), to, line))
        line.message(x)
        return Pending([self.group.send([x], to, 1).wait])

    def receive(self, x: Tensor, source: int) -> Pending:
        for mailboxes in self.opened:
            if mailboxes.fits(x):
                return Pending([mailboxes.receive(x.view(-1), source)])
        return Pending([self.group.recv([x], source, 1).wait])

    def barrier(self) -> None:
        dist.barrier(self.group)


def add_all(own: Tensor, others: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """`own` plus `others`, in `out` where there is one; many 16-bit terms are summed in fp32."""
    if len(others) > 1 and own.dtype in (torch.bfloat16, torch.float16):
        total = add_all(own.float(), others)
        return total.to(own.dtype) if out is None else out.copy_(total)
    total = torch.add(own, others[0], out=out)
    for other in others[1:]:
        total.add_(other)
    return total


def _pending(work: Any) -> Pending:
    return Pending([work.wait])
