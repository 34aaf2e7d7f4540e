"""The gloo transport: ranks send blocks straight to the ranks that need them.

Gloo's own reduce-scatter is an all-reduce inside (2N(n-1)/n elements on the wire where N(n-1)/n
would do), and its all-gather copies every block once more than it must.  Both are therefore built
here from sends and receives, one message a pair, and the sum is taken where it is needed:

    reduce_scatter, rank 1 of 3          all_gather, rank 1 of 3
      x   [  x0  |  x1  |  x2  ]           out [      |  x   |      ]
             |              |                     ^       |      ^
             v to 0         v to 2            from 0   to 0, 2  from 2
      out = x1 + (from 0) + (from 2)

Two ranks, 16.8 MB, one thread each: reduce-scatter 7.6 ms (gloo's own 24), all-gather 6.3 (12.5).
A large all-reduce is gloo's own, which proceeds by itself beside the backward pass; a small one is
the two halves above, at half the latency; between two ranks each sends the whole and adds.
On one host messages of up to a few MiB go through shared memory instead (shared.py).

Messages count one by one as they are sent.  Gloo's own collectives count by their definition
(volume.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.ledger import Line
from shardwise.comm.nccl import OPS, pending
from shardwise.comm.shared import SharedMemory, by_gloo
from shardwise.comm.transport import Pending, Transport

#: All-reduces up to this size are made of the two halves above (measured: they win below it).
SMALL_BYTES = 2**20

#: Two ranks send each other the whole up to this size: as many bytes as two halves, one message.
PAIR_BYTES = 2**22

PAIRED = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}

Wait = Callable[[], object]
Make = Callable[[list[Tensor]], Tensor]


class Gloo(Transport):
    """One process group of gloo; without `shared`, all its messages go through gloo."""

    def __init__(self, group: dist.ProcessGroup, *, shared: bool = True) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.peers = [(self.rank + k) % self.size for k in range(1, self.size)]
        self.memory = SharedMemory(group, wanted=shared)

    # --- messages -----------------------------------------------------------------------------

    def _exchange(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], line: Line
    ) -> list[Wait]:
        """Send and receive one message a peer, in the order of `peers`; how to wait for each.

        Empty messages go through shared memory only, where they show that ranks agree on them.
        """
        shared, ends = self.memory.open() is not None, list[Wait]()
        for peer, x in zip(self.peers, incoming, strict=True):
            if shared or x.numel():
                ends.append(self._receive(x, peer))
        for peer, x in zip(self.peers, outgoing, strict=True):
            if shared or x.numel():
                ends += self._send(x, peer, line)
        return ends

    def _send(self, x: Tensor, peer: int, line: Line, tag: int = 0) -> list[Wait]:
        """Send `x`, of any strides; what to call before it may change."""
        mailboxes = self.memory.fitting(x)
        if mailboxes is not None:
            return mailboxes.send(x, peer, line)
        line.add(x, x.numel())
        return by_gloo(self.group, x, peer, tag)

    def _receive(self, x: Tensor, peer: int, tag: int = 0) -> Wait:
        mailboxes = self.memory.fitting(x)
        if mailboxes is not None:
            return mailboxes.receive(x, peer)
        return self.group.recv([x], peer, tag).wait

    def _meet(self, outgoing: Sequence[Tensor], make: Make, line: Line) -> Pending[Tensor]:
        """Send one message a peer, of any strides, and expect one of its shape from each.

        The result is what `make` makes of those, in the order of `peers`; it must keep no view of
        them, which may lie in a mailbox.  Until then what is sent must not change.
        """
        like = outgoing[0]
        if not like.numel():  # nothing is sent
            return Pending([lambda: make(list(outgoing))])
        mailboxes = self.memory.open()
        if mailboxes is None or like.nbytes > mailboxes.most_bytes:
            met = [like.new_empty(like.shape) for _ in self.peers]
            ends = self._exchange(outgoing, [x.view(-1) for x in met], line)
            return Pending([*ends, lambda: make(met)])
        return Pending([mailboxes.meet(outgoing, self.peers, make, line)])

    def _meet_at_once(self, outgoing: Sequence[Tensor], make: Make, line: Line) -> Tensor:
        """`_meet`, and wait for it: between two ranks in half the time."""
        like, mailboxes = outgoing[0], self.memory.open()
        if self.size > 2 or mailboxes is None or not 0 < like.nbytes <= mailboxes.most_bytes:
            return self._meet(outgoing, make, line).wait()
        return mailboxes.swap(like, self.peers[0], make, line)

    # --- collectives --------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: str = "sum") -> Pending[Any]:
        """Large: gloo's own.  Small: its end, or second half, begins when somebody waits for it.

        So ranks must wait for small ones in the same order.
        """
        mailboxes = self.memory.open()
        if self.size == 2 and x.nbytes <= PAIR_BYTES:
            line = self.begin("all_reduce")
            return Pending(self._pair(x, PAIRED[op], line) if x.numel() else ())
        shared_bytes = 0 if mailboxes is None else mailboxes.most_bytes * self.size
        if op != "sum" or x.nbytes > max(SMALL_BYTES, shared_bytes) or x.numel() % self.size:
            self.count("all_reduce", x)
            return pending(dist.all_reduce(x, OPS[op], self.group, async_op=True))
        line, block = self.begin("all_reduce"), x.view(self.size, -1)[self.rank]
        first = self._add_blocks(block, x, line)
        return Pending([first.wait, lambda: self._join_blocks(x, block, line).wait()])

    def _pair(self, x: Tensor, add: Callable[..., Tensor], line: Line) -> list[Wait]:
        """Between two ranks: `x` is sent whole, and what comes is added to it."""
        (peer,) = self.peers
        leaving = self._send(x, peer, line)
        mailboxes = None if leaving else self.memory.fitting(x)
        if mailboxes is not None:
            return [mailboxes.read(x, peer, lambda theirs: add(x, theirs, out=x))]
        arrived = torch.empty_like(x)  # while `x` is on its way it must not change
        return [self._receive(arrived, peer), *leaving, lambda: add(x, arrived, out=x)]

    def broadcast(self, x: Tensor, root: int) -> Pending[Any]:
        self.count("broadcast", x, root)
        return pending(dist.broadcast(x, group=self.group, async_op=True, group_src=root))

    def all_gather(self, out: Tensor, x: Tensor) -> Pending[Any]:
        return self._join_blocks(out, x, self.begin("all_gather"))

    def _join_blocks(self, out: Tensor, x: Tensor, line: Line) -> Pending[Any]:
        blocks = out.view(self.size, -1)
        ends = self._exchange([x] * len(self.peers), [blocks[peer] for peer in self.peers], line)
        if blocks[self.rank].data_ptr() != x.data_ptr():
            blocks[self.rank].copy_(x)
        return Pending(ends)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending[Any]:
        return self._add_blocks(out, x, self.begin("reduce_scatter"))

    def _add_blocks(self, out: Tensor, x: Tensor, line: Line) -> Pending[Any]:
        blocks = x.view(self.size, -1)
        own = blocks[self.rank]
        outgoing = [blocks[peer] for peer in self.peers]
        return self._meet(outgoing, lambda others: add_all(own, others, out), line)

    def all_gather_along(self, x: Tensor, dim: int) -> Tensor:
        """The blocks are joined from where they lie, not put end to end first."""
        above = self.size - 1 - self.rank  # peers with a higher rank come first in `peers`

        def join(others: list[Tensor]) -> Tensor:
            return torch.cat([*others[above:], x, *others[:above]], dim)

        outgoing = [x] if self.size == 2 else [x.contiguous()] * len(self.peers)  # once for all
        return self._meet_at_once(outgoing, join, self.begin("all_gather"))

    def reduce_scatter_along(self, x: Tensor, dim: int) -> Tensor:
        return self._meet_at_once(*self._blocks_to_add(x, dim), self.begin("reduce_scatter"))

    def begin_reduce_scatter_along(self, x: Tensor, dim: int) -> Pending[Tensor]:
        return self._meet(*self._blocks_to_add(x, dim), self.begin("reduce_scatter"))

    def _blocks_to_add(self, x: Tensor, dim: int) -> tuple[list[Tensor], Make]:
        """The blocks to send, and how to add what comes; what goes by gloo is made contiguous."""
        blocks = x.chunk(self.size, dim)
        own = blocks[self.rank]
        outgoing = [blocks[peer] for peer in self.peers]
        return outgoing, lambda others: add_all(own, others).contiguous()

    def all_to_all(
        self, out: Tensor, x: Tensor, out_counts: Sequence[int], in_counts: Sequence[int]
    ) -> Pending[Any]:
        """One message to each peer and one from it, each as long as the counts say."""
        theirs, mine = out.split(list(out_counts)), x.split(list(in_counts))
        outgoing, incoming = [mine[p] for p in self.peers], [theirs[p] for p in self.peers]
        ends = self._exchange(outgoing, incoming, self.begin("all_to_all"))
        theirs[self.rank].copy_(mine[self.rank])
        return Pending(ends)

    # --- point to point -----------------------------------------------------------------------

    def ready(self) -> None:
        """Two ranks alone cannot open shared memory: where all ranks have not, it is not used."""
        self.memory.open()

    def send(self, x: Tensor, to: int) -> Pending[Any]:
        return Pending(self._send(x, to, self.begin("send"), tag=1))

    def receive(self, x: Tensor, source: int) -> Pending[Any]:
        return Pending([self._receive(x, source, tag=1)])

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
