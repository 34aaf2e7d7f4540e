"""The global batch of a mixture of experts: sums and gathers over the data ranks.

Capacity, the loads of experts and the auxiliary losses are functions of all tokens of the global
batch (of one microbatch). The tokens of data rank 0 come first, then those of rank 1, and so on: it
is the order of the rows of the batch, so one process computes the same.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.move import all_gather, move
from shardwise.comm.world import Axis
from shardwise.core.layouts.layout import P, R
from shardwise.techniques.expert.expert_moves import ExpertMove

Record = Callable[[ExpertMove], None]


def record_nothing(_: ExpertMove) -> None:
    """Nobody counts the moves."""


def phase() -> str:
    """The phase of a move: a forward pass inside of a backward pass recomputes."""
    return "backward" if torch._C._current_graph_task_id() != -1 else "forward"


@dataclass(frozen=True)
class GlobalBatch:
    """The data axes, outermost first; without any this process has the whole batch.

    `record` is called with each move before it is made. `loads` are known beforehand, in a pass on
    the meta device: how many choices of each data rank each expert computes.
    """

    axes: tuple[Axis, ...] = ()
    record: Record = record_nothing
    loads: tuple[tuple[int, ...], ...] = ()

    @property
    def ranks(self) -> int:
        """How many data ranks there are."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def rank(self) -> int:
        """The data rank of this process: which share of the rows it has."""
        rank = 0
        for axis in self.axes:
            rank = rank * axis.size + axis.rank
        return rank

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over the data ranks. Differentiable.

        The backward pass sums the gradients, because each rank's loss is a part of the global one.
        """
        returns = int(x.requires_grad and phase() == "forward")
        self.record(ExpertMove("sum", x.numel(), x.element_size(), phase(), returns))
        for axis in self.axes:
            x = move(x, axis, P, R)
        return x

    def gather(self, x: Tensor, *, padded: bool = False) -> Tensor:
        """Every data rank's `x`, of one shape, as [ranks, *x.shape]. Not differentiable.

        `padded`: `x` has a row for each token of the rank with most tokens.
        """
        x = x.detach()
        kind = "gather_padded" if padded else "gather"
        self.record(ExpertMove(kind, x.numel(), x.element_size(), phase()))
        for axis in reversed(self.axes):
            x = torch.stack(all_gather(x, axis))
        return x.reshape(self.ranks, *x.shape[len(self.axes) :])

    def sizes(self, rows: int, device: torch.device) -> list[int]:
        """How many rows each data rank has."""
        return (
            self.gather(torch.tensor([rows], dtype=torch.int64, device=device)).flatten().tolist()
        )
