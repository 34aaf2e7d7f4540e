"""Checks every function of comm/move.py: rank r of n holds [0, 1, ..., n-1] + r.

    n = 4     rank 0  0 1 2 3        all-reduce         6 10 14 18   on every rank
              rank 1  1 2 3 4        reduce-scatter     6 | 10 | 14 | 18
              rank 2  2 3 4 5        all-gather         0 1 2 3  1 2 3 4  2 3 4 5  3 4 5 6
              rank 3  3 4 5 6        broadcast from 3   3 4 5 6

All-to-all of these would return each rank its own vector, so there rank r holds
[0, 1, ..., n-1] + 10 r, and gets [r, 10 + r, 20 + r, ...].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shardwise.comm import move
from shardwise.comm.world import Axis
from shardwise.core.layout import I, P, R, S
from shardwise.core.uneven import even


@dataclass(frozen=True)
class Example:
    """The example on this rank: its own vector `x`, and the vectors of all ranks as rows."""

    axis: Axis
    x: Tensor
    everyone: Tensor

    @classmethod
    def on(cls, axis: Axis, device: torch.device) -> "Example":
        """The example on the ranks of `axis`."""
        first = torch.arange(axis.size, dtype=torch.float64, device=device)
        return cls(axis, first + axis.rank, first + first.unsqueeze(1))

    @property
    def sums(self) -> Tensor:
        """[6, 10, 14, 18] of four ranks."""
        return self.everyone.sum(0)

    def only(self, root: int, value: Tensor) -> Tensor:
        """`value` on rank `root`, this rank's own vector elsewhere."""
        return value if self.axis.rank == root else self.x


Found = tuple[Tensor | None, Tensor | None]
Check = Callable[[Example], Found]


def _reduced(op: str) -> Check:
    def check(e: Example) -> Found:
        wanted = {"sum": e.sums, "max": e.everyone.amax(0), "min": e.everyone.amin(0)}[op]
        return move.all_reduce(e.x.clone(), e.axis, op), wanted

    return check


def _mine(e: Example, whole: Tensor) -> Tensor:
    return whole[e.axis.rank : e.axis.rank + 1]


def _exchanged(e: Example) -> Found:
    n, rank = e.axis.size, e.axis.rank
    first = torch.arange(n, dtype=torch.float64, device=e.x.device)
    ones = [1] * n
    return move.all_to_all(first + 10 * rank, e.axis, ones, ones), 10 * first + rank


def _uneven(e: Example) -> Found:
    """Rank r sends s + r rows of the value r to each rank s, so none from 0 to 0."""
    n, rank = e.axis.size, e.axis.rank
    counts = [s + rank for s in range(n)]
    x = torch.full((sum(counts),), float(rank), dtype=torch.float64, device=e.x.device)
    wanted = [float(s) for s in range(n) for _ in range(s + rank)]
    return move.all_to_all(x, e.axis, counts, counts), torch.tensor(wanted).to(x)


def _gathered(e: Example) -> Found:
    rows = move.gather(e.x, e.axis)
    return (None, None) if rows is None else (torch.stack(rows), e.everyone)


def _scattered(e: Example) -> Found:
    rows = list(e.everyone) if e.axis.rank == 0 else None
    return move.scatter(rows, torch.zeros_like(e.x), e.axis), e.x


def _around(e: Example) -> Found:
    """Each rank sends to the next, and the last to the first."""
    n, rank = e.axis.size, e.axis.rank
    sending = move.begin_send(e.x, e.axis, (rank + 1) % n)
    out = torch.zeros_like(e.x)
    move.begin_receive(out, e.axis, (rank - 1) % n).wait()
    sending.wait()
    return out, e.everyone[(rank - 1) % n]


def _joined(e: Example) -> Found:
    """A vector of n + 1 numbers, of which rank 0 holds one more than the others."""
    whole = torch.arange(e.axis.size + 1, dtype=torch.float64, device=e.x.device)
    cut = even(0, len(whole), e.axis.size)
    return move.join(move.take(whole, e.axis, cut), e.axis, cut), whole


def _backward(e: Example) -> Found:
    """The backward pass of an all-gather (S -> R) is a reduce-scatter (P -> S) of the gradients."""
    x = e.x.clone().requires_grad_()
    whole = move.move(x, e.axis, S(0), R)
    (whole * (e.axis.rank + 1)).sum().backward()
    n = e.axis.size
    return x.grad, torch.full_like(e.x, n * (n + 1) / 2)


def _met(e: Example) -> Found:
    move.barrier(e.axis)
    return None, None


CHECKS: Final[dict[str, Check]] = {
    "all_reduce": _reduced("sum"),
    "all_reduce max": _reduced("max"),
    "all_reduce min": _reduced("min"),
    "begin_sum": lambda e: (move.begin_sum(e.x, e.axis).wait(), e.sums),
    "reduce_scatter": lambda e: (move.reduce_scatter(e.x, e.axis), _mine(e, e.sums)),
    "all_gather": lambda e: (torch.stack(move.all_gather(e.x, e.axis)), e.everyone),
    "all_to_all": _exchanged,
    "all_to_all uneven": _uneven,
    "broadcast": lambda e: (
        move.broadcast(e.x.clone(), e.axis, e.axis.size - 1),
        e.everyone[-1],
    ),
    "reduce": lambda e: (move.reduce(e.x.clone(), e.axis), e.only(0, e.sums)),
    "gather": _gathered,
    "scatter": _scattered,
    "send and receive": _around,
    "move P -> I": lambda e: (move.move(e.x, e.axis, P, I), e.sums),
    "move P -> S": lambda e: (move.move(e.x, e.axis, P, S(0)), _mine(e, e.sums)),
    "move S -> I": lambda e: (move.move(e.x, e.axis, S(0), I), e.everyone.flatten()),
    "move S -> R, backward": _backward,
    "take and join": _joined,
    "barrier": _met,
}


def check(axis: Axis, device: torch.device) -> dict[str, str]:
    """Make every check on `axis`; returns by name the problem, or ""."""
    example = Example.on(axis, device)
    return {name: _verdict(one, example) for name, one in CHECKS.items()}


def _verdict(one: Check, example: Example) -> str:
    found, wanted = one(example)
    if found is None or wanted is None or torch.equal(found, wanted):
        return ""
    return f"gave {found.tolist()} instead of {wanted.tolist()}"
