"""Communication between ranks: every byte between them goes through a function of this file.

Functions named `begin...`, and `start`, return a `Pending`.  `root`, `to` and `source` are ranks on
the axis.  The backward of `src -> dst` is `dst.dual -> src.dual`, so one autograd function serves
all moves.  On an axis of one rank nothing is sent and nothing is counted, so callers need not ask
whether a parallelism is on.  The transports count what they send (ledger.py); this file does not.
"""

import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.comm.torch_links import once
from shardwise.comm.transport import Pending, Transport
from shardwise.comm.world import Axis, World
from shardwise.core.errors import InputError, RunError, bad
from shardwise.core.layouts.layout import Placement, sums_by_gathering, what
from shardwise.core.layouts.uneven import Cut


def require_no_transform(what: str) -> None:
    """Raise InputError inside of torch.func.vmap, jvp, vjp or grad: its tensors have no storage."""
    if torch._C._are_functorch_transforms_active():
        raise bad(
            f"torch.func (vmap, jvp, vjp or grad) around {what}",
            "its transforms of a module that each rank holds in full, or inside of one layer",
            "the plain module, and torch.distributed to sum what the transform differentiates",
        )


# --- moves ------------------------------------------------------------------------------------


def start(
    x: Tensor, axis: Axis, src: Placement, dst: Placement, out: Tensor, behind: bool = False
) -> Pending[Any]:
    """Begin to move flat `x` from `src` to `dst`; the result will be in `out`.
    Both are one-dimensional, contiguous and of one dtype.  With n ranks and N elements in the
    whole: S -> R takes N/n to N, P -> S takes N to N/n, P -> R works in place (`out is x`).  `out`
    may be this rank's own block of `x`, and the other way round.  `behind` selects the second queue
    of the axis. Raises ValueError if there is no such move between flat tensors.
    """
    asked = what(src, dst)
    transport = axis.behind if behind else axis.transport
    match "keep" if axis.size == 1 else asked:
        case "keep":
            if out.data_ptr() != x.data_ptr():
                out.copy_(x)
            return Pending()
        case "all_gather":
            return transport.all_gather(out, x)
        case "reduce_scatter":
            return transport.reduce_scatter(out, x)
        case "all_reduce":
            return transport.all_reduce(x)
        case _:
            raise ValueError(f"{src} -> {dst} has no form for flat tensors; use move")


def move(x: Tensor, axis: Axis, src: Placement, dst: Placement) -> Tensor:
    """Change the placement of `x` on `axis`.  Differentiable, free when nothing moves.

    `x` is this rank's part: of S(d), the block of dim d.  Dims that are split must divide evenly.

    Raises:
        InputError: a dim that the axis's ranks do not divide.
        ValueError: there is no move from `src` to `dst`.
    """
    if src == dst or axis.size == 1:
        return x
    return _apply(x, axis, (_moved, src, dst), (_moved, dst.dual, src.dual))


def take(x: Tensor, axis: Axis, cut: Cut) -> Tensor:
    """This rank's part of `x`, I -> S, for parts of different sizes.  Differentiable."""
    if axis.size == 1:
        return x
    return _apply(x, axis, (_taken, cut), (_joined, cut))


def join(x: Tensor, axis: Axis, cut: Cut) -> Tensor:
    """The whole tensor, S -> I: an all-gather of parts, padded to the widest. Differentiable."""
    return x if axis.size == 1 else _apply(x, axis, (_joined, cut), (_taken, cut))


def all_to_all(
    x: Tensor, axis: Axis, out_counts: Sequence[int], in_counts: Sequence[int]
) -> Tensor:
    """Send `in_counts[r]` rows of `x` to rank r; return the rows received, in the order of ranks.

    `out_counts[r]` rows come from rank r, which must send as many.  Ranks that do not know these
    counts exchange them first:

        out_counts = all_to_all(torch.tensor(in_counts), axis, [1] * n, [1] * n).tolist()

    Differentiable: the backward is the same exchange with the two counts swapped.

    Raises:
        InputError: the counts do not fit the axis, the rows of `x`, or each other.
        RuntimeError: another rank sends a different number of rows, if the transport detects it
            (see Transport.all_to_all).
    """
    check_counts(x, axis, out_counts, in_counts)
    if axis.size == 1:
        return x
    forth = _exchanged, tuple(out_counts), tuple(in_counts)
    back = _exchanged, tuple(in_counts), tuple(out_counts)
    return _apply(x, axis, forth, back)


def _apply(x: Tensor, axis: Axis, forth: Any, back: Any) -> Tensor:
    if not x.requires_grad:
        act, *arguments = forth
        return act(x, axis, *arguments)
    return _Move.apply(x, axis, forth, back)


class _Move(torch.autograd.Function):
    """`forth` and `back` are a function and its arguments after the tensor and the axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forth: Any, back: Any) -> Tensor:
        ctx.axis, ctx.back = axis, back
        act, *arguments = forth
        return act(x, axis, *arguments)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        act, *arguments = ctx.back
        return act(grad, ctx.axis, *arguments), None, None, None


def _moved(x: Tensor, axis: Axis, src: Placement, dst: Placement) -> Tensor:
    n = axis.size
    match what(src, dst):
        case "all_gather":
            assert src.dim is not None
            return axis.transport.all_gather_along(x, src.dim)
        case "reduce_scatter":
            assert dst.dim is not None
            return reduce_scatter(x, axis, dst.dim)
        case "all_reduce":
            return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)
        case "all_to_all":
            assert src.dim is not None and dst.dim is not None
            blocks = torch.stack(_blocks(x, dst.dim, n))
            return torch.cat(list(_exchanged(blocks, axis, (1,) * n, (1,) * n)), src.dim)
        case "take_block":
            assert dst.dim is not None
            return _blocks(x, dst.dim, n)[axis.rank].clone()
        case "pad_block":
            assert src.dim is not None
            parts = [x if r == axis.rank else torch.zeros_like(x) for r in range(n)]
            return torch.cat(parts, src.dim)
        case _:
            return x.clone()


def _exchanged(x: Tensor, axis: Axis, *counts: Sequence[int]) -> Tensor:
    return begin_all_to_all(x, axis, *counts).wait()


def begin_all_to_all(
    x: Tensor, axis: Axis, out_counts: Sequence[int], in_counts: Sequence[int]
) -> Pending[Tensor]:
    """Begin an `all_to_all` outside of autograd; `x` must not change until the wait."""
    row = math.prod(x.shape[1:])  # a rank may have no rows to send
    out = x.new_empty((sum(out_counts), *x.shape[1:]))
    elements = [c * row for c in out_counts], [c * row for c in in_counts]
    arriving = axis.transport.all_to_all(out.view(-1), x.contiguous().view(-1), *elements)
    return Pending([arriving.wait, lambda: out])


def _taken(x: Tensor, axis: Axis, cut: Cut) -> Tensor:
    return part(x, cut, axis.rank)


def part(x: Tensor, cut: Cut, rank: int) -> Tensor:
    pieces = [x.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges[rank]]
    if not pieces:
        return x.narrow(cut.dim, 0, 0).clone()
    return torch.cat(pieces, cut.dim)


def _joined(x: Tensor, axis: Axis, cut: Cut) -> Tensor:
    widest = max(cut.size(rank) for rank in range(axis.size))
    block = x.new_zeros((*x.shape[: cut.dim], widest, *x.shape[cut.dim + 1 :]))
    block.narrow(cut.dim, 0, x.shape[cut.dim]).copy_(x)
    whole = x.new_empty(cut.full_shape(x.shape))
    for rank, padded in enumerate(all_gather(block, axis)):
        for here, there, length in cut.spans(rank, 0, cut.size(rank)):
            whole.narrow(cut.dim, there, length).copy_(padded.narrow(cut.dim, here, length))
    return whole


def _blocks(x: Tensor, dim: int, n: int) -> list[Tensor]:
    _check_even(x, dim, n)
    return list(x.chunk(n, dim))


def _check_even(x: Tensor, dim: int, n: int) -> None:
    if x.shape[dim] % n:
        raise bad(
            f"dim {dim} of a tensor of shape {tuple(x.shape)}, to be split over {n} ranks",
            f"a dim that is a multiple of {n}",
            f"pad the dim to {x.shape[dim] + -x.shape[dim] % n}",
        )


def check_counts(
    x: Tensor, axis: Axis, out_counts: Sequence[int], in_counts: Sequence[int]
) -> None:
    """Raise InputError for counts of an `all_to_all` that do not fit."""
    n, rank, rows = axis.size, axis.rank, len(x)
    fits = len(out_counts) == len(in_counts) == n and sum(in_counts) == rows
    if fits and out_counts[rank] == in_counts[rank] and min(*out_counts, *in_counts) >= 0:
        return
    raise bad(
        f"all_to_all of {rows} rows on rank {rank} of {n} with out_counts={list(out_counts)} and "
        f"in_counts={list(in_counts)}",
        f"{n} counts from 0 up, in_counts that add up to {rows}, and one count for the rank itself",
        "out_counts = all_to_all(torch.tensor(in_counts), axis, [1] * n, [1] * n).tolist()",
    )


# --- collectives ------------------------------------------------------------------------------


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Leave the sum ("max", "min") over the axis in `x` (any shape, contiguous); returns `x`."""
    if axis.size > 1:
        axis.transport.all_reduce(x.view(-1), op).wait()
    return x


def begin_sum(x: Tensor, axis: Axis) -> Pending[Tensor]:
    """Begin to sum contiguous `x`, which must not change until the wait and is not written."""
    if axis.size == 1:
        return Pending([lambda: x])
    if not sums_by_gathering(axis.size, x.nbytes):
        total = x.clone(memory_format=torch.contiguous_format)
        return Pending([axis.transport.all_reduce(total.view(-1)).wait, lambda: total])
    most = max(1, axis.pool.most_bytes // (axis.size * x.element_size()))
    if x.numel() > most:
        sums = [begin_sum(part, axis) for part in x.view(-1).split(most)]
        return Pending([lambda: torch.cat([each.wait() for each in sums]).view_as(x)])
    slot = axis.pool.slot(axis.size * x.nbytes, x.device)
    gathered = slot.tensor((axis.size * x.numel(),), x.dtype)
    arriving = axis.transport.all_gather(gathered, x.view(-1))
    ends = [arriving.wait, lambda: gathered.view(axis.size, *x.shape).sum(0)]
    return Pending([slot.until(Pending(ends).wait)])


def all_gather(x: Tensor, axis: Axis) -> list[Tensor]:
    """Every rank's `x` (same shape on all), in rank order."""
    if axis.size == 1:
        return [x]
    out = x.new_empty(axis.size * x.numel())
    axis.transport.all_gather(out, x.contiguous().view(-1)).wait()
    return list(out.view(axis.size, *x.shape))


def all_gather_along(x: Tensor, axis: Axis, dim: int) -> Tensor:
    transport = axis.transport
    return x if transport.size == 1 else transport.all_gather_along(x, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's block of dim `dim` of the sum. Raises InputError if the dim does not divide."""
    transport = axis.transport
    _check_even(x, dim, transport.size)
    x = x.detach() if x.requires_grad else x
    return x if transport.size == 1 else transport.reduce_scatter_along(x, dim)


def begin_reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Pending[Tensor]:
    """Begin a `reduce_scatter`; `x` must not change until the wait."""
    transport = axis.transport
    _check_even(x, dim, transport.size)
    if transport.size == 1:
        return Pending([lambda: x])
    return transport.begin_reduce_scatter_along(x, dim)


def broadcast(x: Tensor, axis: Axis, root: int = 0) -> Tensor:
    """Overwrite contiguous `x` with that of rank `root`; gloo sends bytes of any dtype."""
    if axis.size > 1 and x.numel():
        axis.transport.broadcast(x.view(-1).view(torch.uint8), root).wait()
    return x


def barrier(axis: Axis) -> None:
    axis.transport.barrier()


# --- point to point ---------------------------------------------------------------------------


def send(x: Tensor, axis: Axis, to: int) -> None:
    """Send `x` to rank `to`; it may block until that rank receives."""
    axis.transport.send(x.contiguous(), to).wait()


def receive(out: Tensor, axis: Axis, source: int) -> Tensor:
    axis.transport.receive(out, source).wait()
    return out


def begin_send(x: Tensor, axis: Axis, to: int) -> Pending[Any]:
    """Begin to send `x` (any shape) to rank `to`, which calls `begin_receive`. `x` must not change
    until the wait.  Messages between two ranks arrive in the order of their begin.
    """
    queue, other = _queue(axis, axis.rank, to)
    return queue.send(x.detach().contiguous(), other)


def begin_receive(out: Tensor, axis: Axis, source: int) -> Pending[Any]:
    """Begin to overwrite `out` (contiguous) with what rank `source` sends by `begin_send`."""
    queue, other = _queue(axis, source, axis.rank)
    return queue.receive(out, other)


def open_ways(axis: Axis, ways: Iterable[tuple[int, int]], device: torch.device) -> None:
    """Prepare `begin_send` for these pairs (source, destination); called by all ranks.
    NCCL carries out the calls of one communicator in order, each when both ranks have come to it.
    If messages between three ranks, or of both directions between two, shared one, ranks could wait
    for each other in a circle.  So each pair gets a communicator of its own.  NCCL connects two
    ranks at their first message, and both must take part: each pair sends one element, in the same
    order on all ranks.  The ledger counts them under phase "open".
    """
    axis.transport.ready()
    for source, to in sorted(set(ways)):
        if axis.open_way is not None and (source, to) not in axis.ways:
            axis.ways[source, to] = axis.open_way(source, to)
        one = torch.zeros(1, dtype=torch.float32, device=device)
        if axis.rank == source:
            with axis.ledger.phase("open"):
                begin_send(one, axis, to).wait()
        elif axis.rank == to:
            begin_receive(one, axis, source).wait()


def _queue(axis: Axis, source: int, to: int) -> tuple[Transport, int]:
    way = axis.ways.get((source, to))
    if way is None:
        return axis.transport, to if axis.rank == source else source
    return way, 1 - way.rank


# --- any Python object ----------------------------------------------------------------------------

T = TypeVar("T")


def on_rank_zero(act: Callable[[], T], world: World) -> T:
    """The result of `act` on rank 0, or its InputError or RunError, on every rank. All call it."""
    found: tuple[InputError | RunError | None, Any] = None, None
    if world.rank == 0:
        try:
            found = None, act()
        except (InputError, RunError) as error:
            found = error, None
    error, result = broadcast_object(found, world.everyone, 0, world.device)
    if error is not None:
        raise error
    return result


def on_all_ranks(act: Callable[[], object], world: World) -> None:
    """Call `act` on every rank; the lowest rank's InputError or RunError is raised on all."""
    found: InputError | RunError | None = None
    try:
        act()
    except (InputError, RunError) as error:
        found = error
    for error in all_gather_object(found, world):
        if error is not None:
            raise error


def all_gather_object(value: Any, world: World) -> list[Any]:
    return gather_object(value, world.everyone, world.device)


def gather_object(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """The values of all ranks of the axis, on each of them. Called by all of them."""
    packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    own = torch.tensor([len(packed)], dtype=torch.int64, device=device)
    lengths = torch.cat(all_gather(own, axis)).tolist()
    padded = packed.new_zeros(max(lengths))
    padded[: len(packed)] = packed
    parts = zip(all_gather(padded, axis), lengths, strict=True)
    # pickles come only from the ranks of this command
    return [pickle.loads(part[:n].cpu().numpy().tobytes()) for part, n in parts]  # noqa: S301


def broadcast_object(value: Any, axis: Axis, root: int, device: torch.device) -> Any:
    """The value of rank `root` of the axis, on every rank of it. Called by all of them."""
    packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    size = broadcast(torch.tensor([len(packed)], dtype=torch.int64, device=device), axis, root)
    packed = packed if axis.rank == root else packed.new_empty(int(size.item()))
    return pickle.loads(broadcast(packed, axis, root).cpu().numpy().tobytes())  # noqa: S301
