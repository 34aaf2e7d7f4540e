"""The interface of a transport: the collectives of one group of ranks, asynchronous and counted.

Tensors are one-dimensional and contiguous, except in the functions that work along a dim, which
take any shape and strides.  Only the functions of move.py call a transport.

Every transport counts what it sends in the ledger of its axis, just before sending: `begin` returns
the line of the ledger for one call.  It refuses tensors that are not on the device of the world: a
number made on the host works on gloo and fails on NCCL.

Each rank whose message fails raises an error that names the peer rank.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.gloo.pool import Pool
from shardwise.comm.ledger import Ledger, Line, volume
from shardwise.comm.start.peers import place
from shardwise.core.errors import bad

T = TypeVar("T")


class Pending(Generic[T]):
    """Asynchronous work: `wait` calls `ends`; what it reads or writes must not be used before."""

    __slots__ = ("_ends",)

    def __init__(self, ends: Sequence[Callable[[], Any]] = ()) -> None:
        self._ends = ends

    def wait(self) -> T:
        """Return the result once, later None; on CUDA, make the current stream wait for it."""
        ends, self._ends = self._ends, ()
        made: Any = None
        for end in ends:
            made = end()
        return made


class Transport(ABC):
    """The collectives of one group of ranks; only one returned by `with_ledger` can send."""

    #: whether the other ranks take part; if not, each is assumed to send what this one sends
    answered = True
    rank: int
    size: int
    axis: str
    ledger: Ledger
    pool: Pool
    device: torch.device

    def with_ledger(
        self, axis: str, ledger: Ledger, device: torch.device, pool: Pool | None = None
    ) -> Self:
        """The same group; it counts on `axis` in `ledger`, and moves tensors of `device`."""
        one = copy.copy(self)
        one.axis, one.ledger, one.pool = axis, ledger, Pool() if pool is None else pool
        one.device = device
        return one

    def begin(self, kind: str, *tensors: Tensor) -> Line:
        self.require_device(kind, *tensors)
        return self.ledger.begin(self.axis, kind)

    def require_device(self, kind: str, *tensors: Tensor) -> None:
        """Raise InputError if a tensor is not on the device of the world."""
        for x in tensors:
            if x.device != self.device:
                raise bad(
                    f"{kind} on axis {self.axis} of a tensor on {x.device}, called by {place()}",
                    f"tensors on {self.device}, the device of the world",
                    "x.to(world.device)",
                )

    def count(self, kind: str, *tensors: Tensor, root: int = 0, counts: Sequence[int] = ()) -> Line:
        """Count a collective that a library executes (ledger.py); `tensors[0]` is what it gets."""
        x = tensors[0]
        numel, peers = volume(kind, x.numel(), self.size, self.rank, root, counts)
        line = self.begin(kind, *tensors)
        line.add(x, numel, peers)
        return line

    @abstractmethod
    def all_reduce(self, x: Tensor, op: str = "sum") -> Pending[Any]:
        """Leave the sum (or "max", "min") over the ranks in `x`, on every rank."""

    @abstractmethod
    def broadcast(self, x: Tensor, root: int) -> Pending[Any]: ...

    @abstractmethod
    def all_gather(self, out: Tensor, x: Tensor) -> Pending[Any]:
        """Write the ranks' `x` (n elements each) one after the other in `out` (size * n)."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, x: Tensor) -> Pending[Any]:
        """Write the sum over the ranks of block `rank` of `x` in `out`; `out` may be that block."""

    @abstractmethod
    def all_to_all(
        self, out: Tensor, x: Tensor, out_counts: Sequence[int], in_counts: Sequence[int]
    ) -> Pending[Any]:
        """Send `in_counts[r]` elements of `x` to rank r; receive `out_counts[r]` from it.
        Raises RuntimeError if another rank sends a different count: always among threads; among
        ranks that share memory if both counts fit a mailbox.
        """

    @abstractmethod
    def send(self, x: Tensor, to: int) -> Pending[Any]: ...

    @abstractmethod
    def receive(self, x: Tensor, source: int) -> Pending[Any]: ...

    @abstractmethod
    def barrier(self) -> None: ...

    def ready(self) -> None:
        """Prepare for `send` and `receive`, which only two ranks call.  Called by all ranks."""
        return

    def all_gather_along(self, x: Tensor, dim: int) -> Tensor:
        out = x.new_empty(self.size * x.numel())
        self.all_gather(out, x.contiguous().view(-1)).wait()
        return torch.cat(out.view(self.size, *x.shape).unbind(), dim)

    def reduce_scatter_along(self, x: Tensor, dim: int) -> Tensor:
        return self.begin_reduce_scatter_along(x, dim).wait()

    def begin_reduce_scatter_along(self, x: Tensor, dim: int) -> Pending[Tensor]:
        """Begin a reduce_scatter of equal blocks of `dim`; `x` must not change until the wait."""
        blocks = torch.stack(x.chunk(self.size, dim)).contiguous()
        out = torch.empty_like(blocks[0])
        arriving = self.reduce_scatter(out.view(-1), blocks.view(-1))

        def end(_: Tensor = blocks) -> Tensor:  # keeps `blocks` alive until they are sent
            return out

        return Pending([arriving.wait, end])


class Links(ABC):
    """Opens transports for groups of ranks of this world."""

    closed = False  # whether `close` has been called
    meshes = 0  # on how many meshes the program has put the world

    def watch(self, ledger: Ledger) -> None:
        return

    @abstractmethod
    def transport(
        self, axis: str, lines: Sequence[Sequence[int]], rank: int, queue: str = "now"
    ) -> Transport:
        """The transport of the line that contains `rank`.  Called by all ranks in the same order.
        `lines` are all groups of the axis, each a list of ranks of the world.  Work on one queue of
        a line never waits for work on another; a repeated request may return the same queue.
        """

    def release(self, lines: Sequence[Sequence[int]], queue: str = "now") -> None:
        """Give back what `transport` opened for `lines`; called by all ranks in the same order."""
        return

    @abstractmethod
    def close(self) -> None: ...

    @property
    def root(self) -> "Links":
        return self

    @property
    def in_order(self) -> bool:
        """Whether each call on a queue waits for those before it."""
        return False


class Lease(Links):
    """The links of one wrapped module, whose `remove` gives back all that it has opened."""

    def __init__(self, inner: Links) -> None:
        self.inner = inner
        self.asked: list[tuple[Sequence[Sequence[int]], str]] = []

    def transport(
        self, axis: str, lines: Sequence[Sequence[int]], rank: int, queue: str = "now"
    ) -> Transport:
        self.asked.append((lines, queue))
        return self.inner.transport(axis, lines, rank, queue)

    def release(self, lines: Sequence[Sequence[int]], queue: str = "now") -> None:
        self.inner.release(lines, queue)

    def remove(self) -> None:
        """Give back everything.  Called by all ranks, after their last message."""
        asked, self.asked = self.asked, []
        for lines, queue in reversed(asked):
            self.inner.release(lines, queue)

    def close(self) -> None:
        self.inner.close()

    @property
    def root(self) -> Links:
        return self.inner.root


# --- errors of messages ---------------------------------------------------------------------------


def rank_name(group: dist.ProcessGroup, peer: int) -> str:
    """`rank 3`: the rank of the world that is number `peer` of the group."""
    try:
        return f"rank {dist.get_global_rank(group, peer)}"
    except (KeyError, RuntimeError, ValueError):  # the group is not, or no longer, registered
        return f"rank {peer} of the group"


def call_name(line: Line) -> str:
    kind = f"{line.kind} on axis {line.axis}" if line.kind else "a message"
    return f"{kind}, called by {place()}"


@contextmanager
def naming(group: dist.ProcessGroup, peer: int | None, line: Line) -> Iterator[None]:
    """Name the call, and the rank at the other end, in an error of gloo."""
    try:
        yield
    except RuntimeError as error:
        whom = "one of the ranks" if peer is None else rank_name(group, peer)
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise RuntimeError(
            f"the connection to {whom} failed in {call_name(line)}. That rank has ended or "
            f"failed: its own error says why ({why})"
        ) from error
