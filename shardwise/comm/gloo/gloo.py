"""The gloo transport: ranks send blocks directly to the ranks that need them.

Gloo's own reduce-scatter is an all-reduce inside (it sends 2N(n-1)/n elements instead of N(n-1)/n),
and its all-gather copies every block once more than necessary.  Here both consist of sends and
receives, one message per pair of ranks, and the receiver adds:

    reduce_scatter, rank 1 of 3          all_gather, rank 1 of 3
      x   [  x0  |  x1  |  x2  ]           out [      |  x   |      ]
             |              |                     ^       |      ^
             v to 0         v to 2            from 0   to 0, 2  from 2
      out = x1 + (from 0) + (from 2)

Two ranks, 16.8 MB, one thread each: reduce-scatter 7.6 ms (gloo's own 24), all-gather 6.3 (12.5).

Terms of a sum arrive in the pool of communication buffers (pool.py), in pieces if they are larger
than a slot of the pool.  A large all-reduce is gloo's own, which proceeds during the backward pass;
a small one consists of the two halves above, with half the latency; between two ranks each sends
its whole tensor and adds.  On one host, messages of up to a few MiB go through shared memory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.gloo.pool import Slot, aligned, parts
from shardwise.comm.gloo.shared import SharedMemory, await_work, by_gloo
from shardwise.comm.ledger import Line
from shardwise.comm.nccl import OPS
from shardwise.comm.transport import Pending, Transport, naming
from shardwise.core.buffer_sizes import piece_bytes

#: All-reduces up to this size consist of the two halves above, which are faster below it.
SMALL_BYTES = 2**20

#: Up to this size two ranks exchange whole tensors: the bytes of two halves in one message.
PAIR_BYTES = 2**22

PAIRED = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}

HALF = (torch.bfloat16, torch.float16)

Wait = Callable[[], object]
Make = Callable[[list[Tensor]], Tensor]
Add = Callable[..., Tensor]


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
        """Send and receive a message per peer; the waits. Empty ones go through memory alone."""
        shared, ends = self.memory.open() is not None, list[Wait]()
        for peer, x in zip(self.peers, incoming, strict=True):
            if shared or x.numel():
                ends.append(self._receive(x, peer, line))
        for peer, x in zip(self.peers, outgoing, strict=True):
            if shared or x.numel():
                ends += self._send(x, peer, line)
        return ends

    def _send(self, x: Tensor, peer: int, line: Line, tag: int = 0) -> list[Wait]:
        mailboxes = self.memory.mailboxes_for(x)
        if mailboxes is not None:
            return mailboxes.send(x, peer, line)
        line.add(x, x.numel())
        return by_gloo(self.group, x, peer, tag, line)

    def _receive(self, x: Tensor, peer: int, line: Line, tag: int = 0) -> Wait:
        mailboxes = self.memory.mailboxes_for(x)
        if mailboxes is not None:
            return mailboxes.receive(x, peer, line)
        with naming(self.group, peer, line):
            work = self.group.recv([x.view(-1)], peer, tag)
        return partial(await_work, work, self.group, peer, line)

    def _meet(self, outgoing: Sequence[Tensor], make: Make, line: Line) -> Pending[Tensor]:
        """Send one message to each peer, of any strides, and receive one of its shape from each.
        For messages that fit a mailbox.  `make` gets the messages in the order of `peers`, and must
        keep no view of them.  `outgoing` must not change until the wait.
        """
        if not outgoing[0].numel():  # nothing is sent
            return Pending([lambda: make(list(outgoing))])
        mailboxes = self.memory.open()
        assert mailboxes is not None
        return Pending([self.pool.in_turn(mailboxes.meet(outgoing, self.peers, make, line))])

    def _swap(self, x: Tensor, make: Make, line: Line) -> Tensor:
        """`_meet` between two ranks with an immediate wait, in half the time."""
        mailboxes = self.memory.open()
        if mailboxes is None or not x.numel():
            return self._meet([x], make, line).wait()
        return mailboxes.swap(x, self.peers[0], make, line)

    def _by_gloo(self, x: Tensor) -> bool:
        mailboxes = self.memory.open()
        return x.numel() > 0 and (mailboxes is None or x.nbytes > mailboxes.most_bytes)

    # --- pieces -------------------------------------------------------------------------------

    def _sum(
        self, own: Tensor, outgoing: Sequence[Tensor], out: Tensor, line: Line, add: Add = torch.add
    ) -> Pending[Tensor]:
        """Write in `out` the sum of `own` and the peers' messages; none may change meanwhile."""
        most = self._most(own, len(outgoing), _wide(own, outgoing))
        ends = [
            self._sum_piece(own[at], [x[at] for x in outgoing], out[at], line, add)
            for at in parts(own.shape, most)
        ]
        return Pending([*ends, lambda: out])

    def _sum_piece(
        self, own: Tensor, outgoing: Sequence[Tensor], out: Tensor, line: Line, add: Add
    ) -> Wait:
        wide = _wide(own, outgoing)
        slot = self._slot(own, len(outgoing), wide)
        received = [slot.tensor(own.shape, own.dtype) for _ in outgoing]
        sent = [_contiguous(x, slot) for x in outgoing]
        ends = self._exchange(sent, received, line)
        sums = [slot.tensor(own.shape, torch.float32) for _ in range(2 * wide)]

        def finish(_: Sequence[Tensor] = sent) -> None:  # alive until they are sent
            for end in ends:
                end()
            add_all(own, received, out, sums, add)

        return slot.until(finish)

    def _spread(
        self, outgoing: Sequence[Tensor], places: Sequence[Tensor], line: Line
    ) -> Pending[Any]:
        if all(place.is_contiguous() for place in places):  # on all ranks, as strides may not be
            return Pending(self._exchange(outgoing, places, line))
        most = self._most(outgoing[0], len(outgoing), wide=False)
        return Pending(
            [
                self._spread_piece([x[at] for x in outgoing], [x[at] for x in places], line)
                for at in parts(outgoing[0].shape, most)
            ]
        )

    def _spread_piece(
        self, outgoing: Sequence[Tensor], places: Sequence[Tensor], line: Line
    ) -> Wait:
        slot = self._slot(outgoing[0], len(outgoing), wide=False)
        received = [slot.tensor(x.shape, x.dtype) for x in places]
        sent = [_contiguous(x, slot) for x in outgoing]
        ends = self._exchange(sent, received, line)

        def finish(_: Sequence[Tensor] = sent) -> None:
            for end in ends:
                end()
            for place, x in zip(places, received, strict=True):
                place.copy_(x)

        return slot.until(finish)

    def _slot(self, x: Tensor, messages: int, wide: bool) -> Slot:
        """A slot for `messages` pieces like `x` and copies; with `wide`, for two fp32 sums too."""
        copies = messages * (1 if x.dim() == 1 else 2)
        nbytes = copies * aligned(x.nbytes) + 2 * wide * aligned(4 * x.numel())
        return self.pool.slot(nbytes, x.device)

    def _most(self, x: Tensor, messages: int, wide: bool) -> int:
        copies = messages * (1 if x.dim() == 1 else 2)
        return piece_bytes(self.pool.most_bytes, copies, sums=wide) // x.element_size()

    # --- collectives --------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: str = "sum") -> Pending[Any]:
        """Ranks wait for small ones in one order: their second half begins with the wait."""
        mailboxes = self.memory.open()
        if self.size == 2 and x.nbytes <= PAIR_BYTES:
            line = self.begin("all_reduce", x)
            return Pending(self._pair(x, PAIRED[op], line) if x.numel() else ())
        shared_bytes = 0 if mailboxes is None else mailboxes.most_bytes * self.size
        if op != "sum" or x.nbytes > max(SMALL_BYTES, shared_bytes) or x.numel() % self.size:
            line = self.count("all_reduce", x)
            work = dist.all_reduce(x, OPS[op], self.group, async_op=True)
            return Pending([partial(await_work, work, self.group, None, line)])
        line, block = self.begin("all_reduce", x), x.view(self.size, -1)[self.rank]
        first = self._add_blocks(block, x, line)
        return Pending([first.wait, lambda: self._join_sums(x, block, line)])

    def _join_sums(self, x: Tensor, block: Tensor, line: Line) -> None:
        joining = self._join_blocks(x, block, line)
        self.pool.catch_up()  # sums begun since then come first
        joining.wait()

    def _pair(self, x: Tensor, add: Add, line: Line) -> list[Wait]:
        (peer,) = self.peers
        mailboxes = self.memory.mailboxes_for(x)
        if mailboxes is None or x.nbytes > self.pool.most_bytes:
            return [self._sum(x, [x], x, line, add).wait]
        leaving = mailboxes.send(x, peer, line)
        if not leaving:
            arriving = mailboxes.read(x, peer, lambda theirs: add(x, theirs, out=x), line)
            return [self.pool.in_turn(arriving)]
        slot = self.pool.slot(x.nbytes, x.device)  # `x` must not change while it is sent
        arrived = slot.tensor(x.shape, x.dtype)
        ends = [mailboxes.receive(arrived, peer, line), *leaving, lambda: add(x, arrived, out=x)]
        return [slot.until(Pending(ends).wait)]

    def broadcast(self, x: Tensor, root: int) -> Pending[Any]:
        line = self.count("broadcast", x, root=root)
        work = dist.broadcast(x, group=self.group, async_op=True, group_src=root)
        return Pending(
            [partial(await_work, work, self.group, root if root != self.rank else None, line)]
        )

    def all_gather(self, out: Tensor, x: Tensor) -> Pending[Any]:
        return self._join_blocks(out, x, self.begin("all_gather", x, out))

    def _join_blocks(self, out: Tensor, x: Tensor, line: Line) -> Pending[Any]:
        blocks = out.view(self.size, -1)
        ends = self._exchange([x] * len(self.peers), [blocks[peer] for peer in self.peers], line)
        if blocks[self.rank].data_ptr() != x.data_ptr():
            blocks[self.rank].copy_(x)
        return Pending(ends)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending[Any]:
        return self._add_blocks(out, x, self.begin("reduce_scatter", x, out))

    def _add_blocks(self, out: Tensor, x: Tensor, line: Line) -> Pending[Any]:
        blocks = x.view(self.size, -1)
        own = blocks[self.rank]
        outgoing = [blocks[peer] for peer in self.peers]
        if self._by_gloo(own) or _wide(own, outgoing):
            return self._sum(own, outgoing, out, line)
        return self._meet(outgoing, lambda others: add_all(own, others, out), line)

    def all_gather_along(self, x: Tensor, dim: int) -> Tensor:
        """Joins the blocks directly, without concatenating them first."""
        line = self.begin("all_gather", x)
        if self._by_gloo(x):
            shape = list(x.shape)
            shape[dim] *= self.size
            out = x.new_empty(shape)
            blocks = out.chunk(self.size, dim)
            blocks[self.rank].copy_(x)
            places = [blocks[peer] for peer in self.peers]
            self._spread([x] * len(places), places, line).wait()
            return out
        above = self.size - 1 - self.rank  # peers with a higher rank come first in `peers`

        def join(others: list[Tensor]) -> Tensor:
            return torch.cat([*others[above:], x, *others[:above]], dim)

        if self.size == 2:
            return self._swap(x, join, line)
        return self._meet([x.contiguous()] * len(self.peers), join, line).wait()  # once for all

    def reduce_scatter_along(self, x: Tensor, dim: int) -> Tensor:
        own, outgoing = self._blocks_of(x, dim)
        if self.size > 2 or self._by_gloo(own):
            return self.begin_reduce_scatter_along(x, dim).wait()
        line = self.begin("reduce_scatter", x)
        return self._swap(outgoing[0], lambda others: add_all(own, others).contiguous(), line)

    def begin_reduce_scatter_along(self, x: Tensor, dim: int) -> Pending[Tensor]:
        own, outgoing = self._blocks_of(x, dim)
        line = self.begin("reduce_scatter", x)
        if self._by_gloo(own) or _wide(own, outgoing):
            return self._sum(own, outgoing, own.new_empty(own.shape), line)
        return self._meet(outgoing, lambda others: add_all(own, others).contiguous(), line)

    def _blocks_of(self, x: Tensor, dim: int) -> tuple[Tensor, list[Tensor]]:
        blocks = x.chunk(self.size, dim)
        return blocks[self.rank], [blocks[peer] for peer in self.peers]

    def all_to_all(
        self, out: Tensor, x: Tensor, out_counts: Sequence[int], in_counts: Sequence[int]
    ) -> Pending[Any]:
        """One message to each peer and one from it."""
        theirs, mine = out.split(list(out_counts)), x.split(list(in_counts))
        outgoing, incoming = [mine[p] for p in self.peers], [theirs[p] for p in self.peers]
        ends = self._exchange(outgoing, incoming, self.begin("all_to_all", x, out))
        theirs[self.rank].copy_(mine[self.rank])
        return Pending(ends)

    # --- point to point -----------------------------------------------------------------------

    def ready(self) -> None:
        """Open shared memory now, since two ranks alone cannot open it later."""
        self.memory.open()

    def send(self, x: Tensor, to: int) -> Pending[Any]:
        return Pending(self._send(x, to, self.begin("send", x), tag=1))

    def receive(self, x: Tensor, source: int) -> Pending[Any]:
        self.require_device("receive", x)
        return Pending([self._receive(x, source, Line(self.axis, "send"), tag=1)])

    def barrier(self) -> None:
        with naming(self.group, None, Line(self.axis, "barrier")):
            dist.barrier(self.group)


def add_all(
    own: Tensor,
    others: Sequence[Tensor],
    out: Tensor | None = None,
    sums: Sequence[Tensor] = (),
    add: Add = torch.add,
) -> Tensor:
    """`own` plus `others`, in `out` if given; in fp32 in `sums`, two tensors of that shape."""
    if sums and out is not None:
        total, term = sums
        total.copy_(own)
        for other in others:
            total.add_(term.copy_(other))
        return out.copy_(total)
    total = add(own, others[0], out=out)
    for other in others[1:]:
        add(total, other, out=total)
    return total


def _wide(own: Tensor, others: Sequence[Tensor]) -> bool:
    return len(others) > 1 and own.dtype in HALF


def _contiguous(x: Tensor, slot: Slot) -> Tensor:
    return x if x.is_contiguous() else slot.tensor(x.shape, x.dtype).copy_(x)
