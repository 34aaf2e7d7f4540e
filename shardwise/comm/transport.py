"""this file is what an axis needs from the outside world: collectives that may finish later.

Every transport speaks of one-dimensional contiguous tensors, starts the work, and returns a
`Pending`; the two `along` a dim take any shape and strides, and return what to call for the result.
The door (move.py) decides what to ask for; nobody else calls these.

Every transport counts, in the ledger of the axis it works for, what it hands to other ranks, at the
point where it does: `begin` gives the line of a call, in which each message is counted.

    Alone    a world of one: nothing to do
    Threads  ranks are threads of this process (tests, and a first look on a laptop)
    Torch    a torch.distributed process group: gloo or NCCL
    Trace    no data at all: what would be sent by any world, on any machine
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from shardwise.comm.ledger import Ledger, Line


class Pending:
    """Work under way.  `wait` ends it; the tensors it reads or writes are left alone until then.

    Work of two halves, each a message, has `then`, which starts the second once the first is there.
    """

    def __init__(
        self,
        ends: Sequence[Callable[[], object]] = (),
        then: Callable[[], "Pending"] | None = None,
    ) -> None:
        self._ends, self._then = ends, then

    def proceed(self) -> None:
        """Where there is a second half: wait for the first, and start it."""
        then, self._then = self._then, None
        if then is not None:
            self._end()
            second = then()
            self._ends, self._then = second._ends, second._then

    def wait(self) -> None:
        """Return when the result is there (on CUDA: when the current stream is made to wait)."""
        self.proceed()
        self._end()

    def _end(self) -> None:
        ends, self._ends = self._ends, ()
        for end in ends:
            end()


class Transport(ABC):
    """The collectives of one group of ranks; `rank` is this rank's place in it.

    Only one that `counted` returned can send.
    """

    rank: int
    size: int
    axis: str
    ledger: Ledger

    def counted(self, axis: str, ledger: Ledger) -> Self:
        """The same group of ranks, for this axis: what is sent counts in `ledger`."""
        one = copy.copy(self)
        one.axis, one.ledger = axis, ledger
        return one

    def begin(self, kind: str) -> Line:
        """The ledger's line for one more call of this kind."""
        return self.ledger.begin(self.axis, kind)

    @abstractmethod
    def all_reduce(self, x: Tensor, op: str = "sum") -> Pending:
        """Leave the sum (or "max", "min") over the ranks in `x`, on every rank."""

    @abstractmethod
    def reduce(self, x: Tensor, root: int, op: str = "sum") -> Pending:
        """Leave the sum over the ranks in `x` of rank `root`; elsewhere `x` is spoiled."""

    @abstractmethod
    def broadcast(self, x: Tensor, root: int) -> Pending:
        """Overwrite `x` with that of rank `root`."""

    @abstractmethod
    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """Write the ranks' `x` (n elements each) end to end in `out` (size * n elements)."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        """Write the sum over the ranks of block `rank` of `x` in `out`; `out` may be that block."""

    def all_gather_along(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' `x`, of any shape, one after the other along `dim`."""
        out, sent = x.new_empty(self.size * x.numel()), x.contiguous()
        self.all_gather(out, sent.view(-1)).wait()
        return torch.cat(out.view(self.size, *x.shape).unbind(), dim)

    def reduce_scatter_along(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        """Begin a reduce_scatter of `x` of any shape; call the result for this rank's block.

        The blocks are of dim `dim`, which divides evenly.  It is called once, and until then `x` is
        left alone.
        """
        blocks = torch.stack(x.chunk(self.size, dim)).contiguous()
        out = torch.empty_like(blocks[0])
        arriving = self.reduce_scatter(out.view(-1), blocks.view(-1))

        def end(_: Tensor = blocks) -> Tensor:  # alive until they are sent
            arriving.wait()
            return out

        return end

    def reduce_scatter_at_once(self, x: Tensor, dim: int) -> Tensor:
        """`reduce_scatter_along`, and wait for it."""
        return self.reduce_scatter_along(x, dim)()

    @abstractmethod
    def all_to_all(
        self, out: Tensor, x: Tensor, out_counts: Sequence[int], in_counts: Sequence[int]
    ) -> Pending:
        """Send `in_counts[r]` elements of `x` to rank r; receive `out_counts[r]` from it."""

    def ready(self) -> None:
        """Called by all ranks: make ready for what two ranks do alone; most need nothing."""
        return

    @abstractmethod
    def send(self, x: Tensor, to: int) -> Pending:
        """Hand `x` to rank `to`."""

    @abstractmethod
    def receive(self, x: Tensor, source: int) -> Pending:
        """Overwrite `x` with what rank `source` sends."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has come here."""


class Links(ABC):
    """Who can make a transport for a group of ranks of this world."""

    closed = False  # whether what was opened has been given back

    @abstractmethod
    def transport(
        self, axis: str, lines: Sequence[Sequence[int]], rank: int, queue: str = "now"
    ) -> Transport:
        """The transport of the line that holds `rank`.  Called by all ranks in the same order.

        `lines` are all groups of the axis, each a list of ranks of the world.  Work on one
        queue of a line never waits for work on another; asked for again, a queue may be the same.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what was opened."""
