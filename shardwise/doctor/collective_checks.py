"""Checks the collectives that a step uses: rank r of n holds [0, 1, ..., n-1] + r.

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


Found = tuple[Tensor, Tensor]
Check = Callable[[Example], Found]


def _mine(e: Example, whole: Tensor) -> Tensor:
    return whole[e.axis.rank : e.axis.rank + 1]


def _exchanged(e: Example) -> Found:
    n, rank = e.axis.size, e.axis.rank
    first = torch.arange(n, dtype=torch.float64, device=e.x.device)
    ones = [1] * n
    return move.all_to_all(first + 10 * rank, e.axis, ones, ones), 10 * first + rank


def _around(e: Example) -> Found:
    """Each rank sends to the next, and the last to the first."""
    n, rank = e.axis.size, e.axis.rank
    sending = move.begin_send(e.x, e.axis, (rank + 1) % n)
    out = torch.zeros_like(e.x)
    move.begin_receive(out, e.axis, (rank - 1) % n).wait()
    sending.wait()
    return out, e.everyone[(rank - 1) % n]


CHECKS: Final[dict[str, Check]] = {
    "all_reduce": lambda e: (move.all_reduce(e.x.clone(), e.axis), e.sums),
    "reduce_scatter": lambda e: (move.reduce_scatter(e.x, e.axis), _mine(e, e.sums)),
    "all_gather": lambda e: (torch.stack(move.all_gather(e.x, e.axis)), e.everyone),
    "all_to_all": _exchanged,
    "broadcast": lambda e: (
        move.broadcast(e.x.clone(), e.axis, e.axis.size - 1),
        e.everyone[-1],
    ),
    "send and receive": _around,
}


def check(axis: Axis, device: torch.device) -> dict[str, str]:
    """Make every check on `axis`; returns by name the problem, or ""."""
    example = Example.on(axis, device)
    return {name: _verdict(one, example) for name, one in CHECKS.items()}


def _verdict(one: Check, example: Example) -> str:
    found, wanted = one(example)
    if torch.equal(found, wanted):
        return ""
    return f"gave {found.tolist()} instead of {wanted.tolist()}"
