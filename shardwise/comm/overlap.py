"""An all-to-all with something else between its begin and its end, in both directions.

    forward     begin ─ what the caller computes ─ wait
    backward    wait ─ its backward pass ───────── begin        the same, read from right to left

Autograd runs the backward of what was computed last first. So the backward of `wait` begins to
exchange the gradients, that of what was computed in between runs, and that of `begin` waits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.move import begin_all_to_all, check_counts
from shardwise.comm.once import once
from shardwise.comm.transport import Pending
from shardwise.comm.world import Axis

Counts = Sequence[int]


def begin_rows(
    x: Tensor, axis: Axis, out_counts: Counts, in_counts: Counts
) -> Callable[[], Tensor]:
    """Begin `move.all_to_all`; returns a function that waits for the rows. Differentiable.

    The function must be called, once, and `x` must not change before. Raises as `all_to_all`.
    """
    check_counts(x, axis, out_counts, in_counts)
    if axis.size == 1:
        return lambda: x
    exchange = _Exchange(axis, tuple(out_counts), tuple(in_counts))
    if not x.requires_grad:
        exchange.begin(x)
        return exchange.wait
    begun = _Begin.apply(x, exchange)
    return lambda: _Wait.apply(begun, exchange)


class _Exchange:
    """The exchange that is under way, if any: forward, later that of the gradients."""

    def __init__(self, axis: Axis, out_counts: Counts, in_counts: Counts) -> None:
        self.axis, self.out_counts, self.in_counts = axis, out_counts, in_counts
        self.pending: Pending[Tensor] = Pending()

    def begin(self, x: Tensor) -> None:
        self.pending = begin_all_to_all(x, self.axis, self.out_counts, self.in_counts)

    def begin_back(self, grad: Tensor) -> None:
        self.pending = begin_all_to_all(grad, self.axis, self.in_counts, self.out_counts)

    def wait(self) -> Tensor:
        pending, self.pending = self.pending, Pending()
        return pending.wait()


class _Begin(torch.autograd.Function):
    """Its result is empty: it only makes the backward of `wait` run before its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.begin(x)
        return x.new_empty(0)

    @staticmethod
    @once
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.begin_back(grad)
        return grad.new_empty(0), None
