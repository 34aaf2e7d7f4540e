"""this file is the one door: every byte between ranks passes through it.

    start     the work itself, on flat tensors, returning a `Pending`
    move      the same for tensors of any shape, waited for, and differentiable
    gather, scatter                 of any shape too, not differentiable
    begin_scatter                   the same, to be waited for later

No collective has a backward of its own: the backward of `src -> dst` is `dst.dual -> src.dual`,
so one autograd function serves them all.  On an axis of one rank both are free, so no caller
asks whether a parallelism is on.  The transports count what they send (ledger.py), not the door.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.once import once
from shardwise.comm.transport import Pending
from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.layout import Placement
from shardwise.core.moves import what


def start(
    x: Tensor, axis: Axis, src: Placement, dst: Placement, out: Tensor, behind: bool = False
) -> Pending:
    """Begin to bring flat `x` from `src` to `dst`; the result will be in `out`.

    `x` and `out` are one-dimensional, contiguous and of one dtype; with n ranks and N elements in
    the whole: S -> R takes N/n to N, P -> S takes N to N/n, P -> R works in place (`out is x`).
    `out` may be this rank's own block of `x`, and the other way round.  `behind` uses the axis's
    second queue (see Axis).

    Raises:
        ValueError: there is no such move between flat tensors.
    """
    asked = what(src, dst)
    transport = axis.behind if behind else axis.transport
    match "keep" if axis.size == 1 else asked:
        case "keep":
            return _kept(out, x)
        case "all_gather":
            return transport.all_gather(out, x)
        case "reduce_scatter":
            return transport.reduce_scatter(out, x)
        case "all_reduce":
            return transport.all_reduce(x)
        case _:
            raise ValueError(f"{src} -> {dst} has no form for flat tensors; use move")


def begin_scatter(x: Tensor, axis: Axis, dim: int) -> Callable[[], Tensor]:
    """Begin P -> S(dim) of `x` of any shape; call the result for this rank's block of the sum.

    It is called once, and until then `x` is left alone.
    Raises InputError for a dim that the axis's ranks do not divide.
    """
    _check_even(x, dim, axis.size)
    return axis.transport.reduce_scatter_along(x, dim)


def scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """`begin_scatter`, and wait for it."""
    _check_even(x, dim, axis.size)
    return axis.transport.reduce_scatter_at_once(x, dim)


def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """S(dim) -> R of `x` of any shape: the whole."""
    return axis.transport.all_gather_along(x, dim)


def _kept(out: Tensor, x: Tensor) -> Pending:
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    return Pending()


def move(
    x: Tensor,
    axis: Axis,
    src: Placement,
    dst: Placement,
    returning: Callable[[], None] | None = None,
) -> Tensor:
    """Give `x` another placement on `axis`.  Differentiable, free when nothing moves.

    `x` is this rank's part: of S(d), the block of dim d.  Dims that are split must divide evenly.
    `returning` is called whenever a gradient goes back this way, where something moves.

    Raises:
        InputError: a dim that the axis's ranks do not divide.
        ValueError: there is no move from `src` to `dst`.
    """
    if src == dst or axis.size == 1:
        return x
    return _Move.apply(x, axis, src, dst, returning)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, src: Placement, dst: Placement, returning: Any
    ) -> Tensor:
        ctx.axis, ctx.back, ctx.returning = axis, (dst.dual, src.dual), returning
        return carry_out(x, axis, src, dst)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.returning is not None:
            ctx.returning()
        return carry_out(grad, ctx.axis, *ctx.back), None, None, None, None


def carry_out(x: Tensor, axis: Axis, src: Placement, dst: Placement) -> Tensor:
    """Bring `x` from `src` to `dst` now, as a new tensor; `move` without its derivative."""
    n = axis.size
    match what(src, dst):
        case "all_gather":
            assert src.dim is not None
            return gather(x, axis, src.dim)
        case "reduce_scatter":
            assert dst.dim is not None
            return scatter(x, axis, dst.dim)
        case "all_reduce":
            out = x.clone(memory_format=torch.contiguous_format)
            start(out.view(-1), axis, src, dst, out.view(-1)).wait()
            return out
        case "all_to_all":
            assert src.dim is not None and dst.dim is not None
            return _swap_dims(x, axis, src.dim, dst.dim)
        case "take_block":
            assert dst.dim is not None
            return _blocks(x, dst.dim, n)[axis.rank].clone()
        case "pad_block":
            assert src.dim is not None
            parts = [x if r == axis.rank else torch.zeros_like(x) for r in range(n)]
            return torch.cat(parts, src.dim)
        case _:
            return x.clone()


def _swap_dims(x: Tensor, axis: Axis, src_dim: int, dst_dim: int) -> Tensor:
    """S(src_dim) -> S(dst_dim): block r of dst_dim goes to rank r."""
    n = axis.size
    blocks = torch.stack(_blocks(x, dst_dim, n))
    out = torch.empty_like(blocks)
    counts = [blocks[0].numel()] * n
    axis.transport.all_to_all(out.view(-1), blocks.view(-1), counts, counts).wait()
    return torch.cat(list(out), src_dim)


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
