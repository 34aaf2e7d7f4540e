"""this file is the moves between a whole tensor and parts of any size: the door for a `Cut`.

`take` is I -> S and `join` S -> I for ranks whose parts differ in size or lie in several ranges;
each is the other's backward.  What is sent is padded to the widest part, so that it is one
all-gather of equal blocks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.move import start
from shardwise.comm.once import once
from shardwise.comm.world import Axis
from shardwise.core.layout import R, S
from shardwise.core.uneven import Cut


def take(x: Tensor, axis: Axis, cut: Cut, returning: Callable[[], None] | None = None) -> Tensor:
    """This rank's part of `x`, which is whole and alike on every rank.  Differentiable.

    `returning` is called whenever a gradient goes back this way.
    """
    return x if axis.size == 1 else _Take.apply(x, axis, cut, returning)


def join(x: Tensor, axis: Axis, cut: Cut) -> Tensor:
    """The whole of which `x` is this rank's part; every rank goes on alike.  Differentiable."""
    return x if axis.size == 1 else _Join.apply(x, axis, cut)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, cut: Cut, returning: Any) -> Tensor:
        ctx.axis, ctx.cut, ctx.returning = axis, cut, returning
        return part(x, cut, axis.rank)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.returning is not None:
            ctx.returning()
        return _whole(grad, ctx.axis, ctx.cut), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, cut: Cut) -> Tensor:
        ctx.axis, ctx.cut = axis, cut
        return _whole(x, axis, cut)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return part(grad, ctx.cut, ctx.axis.rank), None, None


def part(x: Tensor, cut: Cut, rank: int) -> Tensor:
    """What `rank` holds of the whole `x`, as a new contiguous tensor."""
    pieces = [x.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges[rank]]
    if not pieces:
        return x.narrow(cut.dim, 0, 0).clone()
    return torch.cat(pieces, cut.dim)


def _whole(x: Tensor, axis: Axis, cut: Cut) -> Tensor:
    widest = max(cut.size(rank) for rank in range(axis.size))
    block = x.new_zeros((*x.shape[: cut.dim], widest, *x.shape[cut.dim + 1 :]))
    block.narrow(cut.dim, 0, x.shape[cut.dim]).copy_(x)
    out = x.new_empty((axis.size, *block.shape))
    start(block.view(-1), axis, S(0), R, out.view(-1)).wait()
    whole = x.new_empty(cut.whole_shape(x.shape))
    for rank in range(axis.size):
        for here, there, length in cut.spans(rank, 0, cut.size(rank)):
            piece = out[rank].narrow(cut.dim, here, length)
            whole.narrow(cut.dim, there, length).copy_(piece)
    return whole
