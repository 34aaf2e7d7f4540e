"""The times of messages between pairs of ranks, and an all-to-all that overlaps with other work.

    forward     begin ─ what the caller computes ─ wait
    backward    wait ─ its backward pass ───────── begin        the same, read from right to left

Autograd runs the backward of what was computed last first.  So the backward of `wait` begins to
exchange the gradients, that of what was computed in between runs, and that of `begin` waits.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.comm import move
from shardwise.comm.move import begin_all_to_all, check_counts
from shardwise.comm.torch_links import once
from shardwise.comm.transport import Pending
from shardwise.comm.world import Axis

PAIR_ELEMENTS: Final = 2**18
SLOW: Final = 2.0  # a link this many times slower than the median link is slow
ALL_PAIRS: Final = 8  # up to so many ranks, every pair is measured
TRIES: Final = 7
PAIR_S: Final = 0.1  # seconds of a pair after which it begins no other try


def pairs(axis: Axis, device: torch.device) -> dict[tuple[int, int], float]:
    """Seconds of a round trip of PAIR_ELEMENTS, for the pairs of ranks that begin with this one.
    Every rank of the axis calls it.  Up to ALL_PAIRS ranks every pair is timed, above that
    neighbours and pairs with the first: one at a time, so that a slow pair does not delay others;
    the minimum of a few tries.
    """
    n = axis.size
    ways = {(r, (r + 1) % n) for r in range(n)} | {(0, r) for r in range(1, n)}
    if n <= ALL_PAIRS:
        ways = set(itertools.combinations(range(n), 2))
    ways = {(min(way), max(way)) for way in ways}
    x = torch.zeros(PAIR_ELEMENTS, dtype=torch.float32, device=device)
    found = dict[tuple[int, int], float]()
    for a, b in sorted(ways):
        move.barrier(axis)
        if axis.rank in (a, b):
            _shortest(x[:1], axis, a, b, tries=1)  # opens the connection
            found[a, b] = _shortest(x, axis, a, b, TRIES)
    return {way: s for way, s in found.items() if way[0] == axis.rank}  # the other did not wait


def _shortest(x: Tensor, axis: Axis, a: int, b: int, tries: int) -> float:
    """The time of the shortest try; `b` says in the first element whether another follows."""
    began, found, more = time.perf_counter(), list[float](), True
    while more:
        start = time.perf_counter()
        if axis.rank == a:
            move.begin_send(x, axis, b).wait()
            move.begin_receive(x, axis, b).wait()
        else:
            move.begin_receive(x, axis, a).wait()
            settle(x.device)
            x[0] = float(len(found) + 1 < tries and time.perf_counter() - began < PAIR_S)
            move.begin_send(x, axis, a).wait()
        settle(x.device)
        found.append(time.perf_counter() - start)
        more = bool(x[0].item())
    return min(found)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slow_ranks(seconds: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """Ranks whose fastest link takes more than SLOW times the median of links between others."""
    found: dict[int, float] = {}
    for r in sorted({rank for pair in seconds for rank in pair}):
        own = [s for pair, s in seconds.items() if r in pair]
        others = [s for pair, s in seconds.items() if r not in pair]
        if others and (times := min(own) / statistics.median_low(others)) > SLOW:
            found[r] = times
    return found


# --- an all-to-all beside other work --------------------------------------------------------------

Counts = Sequence[int]


def begin_rows(
    x: Tensor, axis: Axis, out_counts: Counts, in_counts: Counts
) -> Callable[[], Tensor]:
    """Begin `move.all_to_all`, differentiable: call the result once; `x` must not change before."""
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
