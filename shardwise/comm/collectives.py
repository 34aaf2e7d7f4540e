"""this file is the collectives by their usual names, for those who think in them.

Each takes an axis where torch.distributed takes a group, and waits for its result.  `root`, `to`
and `source` are ranks on the axis.  For tensors that autograd follows, use `move`.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from shardwise.comm.move import carry_out, start
from shardwise.comm.transport import Pending, Transport
from shardwise.comm.world import Axis
from shardwise.core.layout import P, R, S


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Leave the sum ("max", "min") over the axis in `x` (any shape, contiguous); returns `x`."""
    if op == "sum":
        start(x.view(-1), axis, P, R, x.view(-1)).wait()
    elif axis.size > 1:
        axis.transport.all_reduce(x.view(-1), op).wait()
    return x


def reduce(x: Tensor, axis: Axis, root: int = 0, op: str = "sum") -> Tensor:
    """Leave the sum in `x` of rank `root`; elsewhere `x` holds nothing of use."""
    axis.transport.reduce(x.view(-1), root, op).wait()
    return x


def broadcast(x: Tensor, axis: Axis, root: int = 0) -> Tensor:
    """Overwrite `x` with that of rank `root`, which sends it n-1 times; returns `x`."""
    axis.transport.broadcast(x.view(-1), root).wait()
    return x


def all_gather(x: Tensor, axis: Axis) -> list[Tensor]:
    """Every rank's `x` (same shape on all), in rank order."""
    if axis.size == 1:
        return [x]
    out = x.new_empty(axis.size * x.numel())
    start(x.contiguous().view(-1), axis, S(0), R, out).wait()
    return list(out.view(axis.size, *x.shape))


def begin_sum(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Start to add up the vector `x` over the axis; call the result for the sum.

    Gather and add: for a few numbers one message each way beats the two of an all-reduce.
    """
    if axis.size == 1:
        return lambda: x
    everyone = x.new_empty(axis.size * len(x))
    arriving = start(x, axis, S(0), R, everyone)

    def total() -> Tensor:
        arriving.wait()
        return everyone.view(axis.size, -1).sum(0)

    return total


def gather(x: Tensor, axis: Axis, root: int = 0) -> list[Tensor] | None:
    """Every rank's `x` on rank `root`, in rank order; None elsewhere."""
    if axis.rank != root:
        send(x, axis, root)
        return None
    out = [x if r == root else torch.empty_like(x) for r in range(axis.size)]
    for r in range(axis.size):
        if r != root:
            receive(out[r], axis, r)
    return out


def scatter(xs: Sequence[Tensor] | None, out: Tensor, axis: Axis, root: int = 0) -> Tensor:
    """Overwrite `out` on rank r with `xs[r]` of rank `root` (others give None); returns `out`."""
    if axis.rank != root:
        return receive(out, axis, root)
    if xs is None or len(xs) != axis.size:
        raise ValueError(f"scatter from rank {root} takes {axis.size} tensors there, one a rank")
    for r, x in enumerate(xs):
        if r != root:
            send(x, axis, r)
    return out.copy_(xs[root])


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Block `rank` of dim `dim` of the sum over the axis."""
    return x if axis.size == 1 else carry_out(x.detach(), axis, P, S(dim))


def all_to_all(
    x: Tensor, axis: Axis, out_counts: Sequence[int], in_counts: Sequence[int]
) -> Tensor:
    """Send `in_counts[r]` rows of `x` to rank r; return the rows received, by rank of origin."""
    row = math.prod(x.shape[1:])  # not x[0].numel(): a rank may have no rows to send
    out = x.new_empty((sum(out_counts), *x.shape[1:]))
    elements = [c * row for c in out_counts], [c * row for c in in_counts]
    axis.transport.all_to_all(out.view(-1), x.contiguous().view(-1), *elements).wait()
    return out


def send(x: Tensor, axis: Axis, to: int) -> None:
    """Hand `x` to rank `to`.

    It may return only when that rank receives: of two that send to each other, one receives first.
    """
    axis.transport.send(x.contiguous(), to).wait()


def receive(out: Tensor, axis: Axis, source: int) -> Tensor:
    """Overwrite `out` with what rank `source` sends; returns `out`."""
    axis.transport.receive(out, source).wait()
    return out


def begin_send(x: Tensor, axis: Axis, to: int) -> Pending:
    """Begin to hand `x` (any shape) to rank `to`, which begins to receive it; wait for none of it.

    Until the end of it `x` is left alone.  Messages from one rank to another arrive in the order
    in which they were begun.  Those up the axis and those down it have a queue each, `transport`
    and `behind`: NCCL does what two ranks give to one queue in turn, so that of two that send to
    each other each would wait for the other to receive.  What `begin_send` sends `begin_receive`
    takes; what `send` sends, `receive`.
    """
    return _way(axis, axis.rank, to).send(x.detach().contiguous(), to)


def begin_receive(out: Tensor, axis: Axis, source: int) -> Pending:
    """Begin to overwrite `out` (contiguous) with what rank `source` sends by `begin_send`."""
    return _way(axis, source, axis.rank).receive(out, source)


def open_ways(axis: Axis, ways: Iterable[tuple[int, int]], device: torch.device) -> None:
    """Make ready to `begin_send` along these ways, each from a rank to another; called by all.

    NCCL joins two ranks at their first message, for which both must come.  So before messages go
    as they will, one of an element goes each way, in one order on all ranks; the ledger has them
    under phase "open".
    """
    for transport in (axis.transport, axis.behind):
        transport.ready()
    for source, to in sorted(set(ways)):
        one = torch.zeros(1, device=device)
        if axis.rank == source:
            with axis.ledger.phase("open"):
                _way(axis, source, to).send(one, to).wait()
        elif axis.rank == to:
            _way(axis, source, to).receive(one, source).wait()


def _way(axis: Axis, source: int, to: int) -> Transport:
    return axis.transport if source < to else axis.behind


def barrier(axis: Axis) -> None:
    """Return when every rank of the axis has come here."""
    axis.transport.barrier()
