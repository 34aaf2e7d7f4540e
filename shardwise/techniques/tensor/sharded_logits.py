"""Logits that stay sharded over the vocabulary.

    rank 0 holds x[..., 0..3], rank 1 x[..., 4..7]           x.shape is [..., 8] on both

A model with a vocabulary-parallel output layer returns them.  What is computed on the shards and
what gathers them is in kernels/logits.py.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.layouts.uneven import Cut
from shardwise.kernels.cross_entropy import sharded_cross_entropy
from shardwise.kernels.logits import Logits
from shardwise.techniques.tensor.linear import Stream


class Moves(Protocol):
    """What gathers and shards columns: the stream of a step, or the record of a pass on meta."""

    def join(self, x: Tensor, cut: Cut) -> Tensor:
        """All columns of the shard `x`."""
        ...

    def take(self, x: Tensor, cut: Cut) -> Tensor:
        """This rank's shard of all columns `x`."""
        ...

    def record_loss(self, positions: int, smoothing: bool, element_bytes: int) -> None:
        """Called with each cross-entropy of sharded logits."""


@dataclass(frozen=True)
class Shards:
    """The columns that `cut` assigns to each rank of `axis`: S(-1)."""

    axis: Axis
    cut: Cut
    moves: Moves
    computed = False

    def copy(self, _: torch.dtype | None) -> "Shards":
        """The same: a copy of a shard is a tensor of its own."""
        return self

    @property
    def whole(self) -> int:
        """The size of the vocabulary."""
        return self.cut.whole

    def join(self, local: Tensor) -> Tensor:
        """All columns: an all-gather (I on the axis)."""
        return self.moves.join(local, self.cut)

    def take(self, full: Tensor) -> Tensor | None:
        """This rank's shard; on one rank the gathered tensor is the same memory."""
        return self.moves.take(full, self.cut) if self.axis.size > 1 else None

    def loss(self, local: Tensor, targets: Tensor, /, **options: Any) -> Tensor:
        """The vocabulary-parallel cross-entropy (kernels/cross_entropy.py)."""
        loss, element_bytes = sharded_cross_entropy(
            local, (self.axis, self.cut), targets, **options
        )
        self.moves.record_loss(targets.numel(), options["label_smoothing"] > 0, element_bytes)
        return loss


def sharded_logits(local: Tensor, axis: Axis, cut: Cut, moves: Moves | None = None) -> Logits:
    """Logits whose shard on this rank is `local` [..., v]; nothing is copied.

    `moves` gathers them and records each loss.

    Raises:
        InputError: `local` has another number of columns than this rank's shard.
    """
    columns = cut.size(axis.rank)
    if local.shape[-1] != columns:
        raise bad(
            f"logits with {local.shape[-1]} columns on rank {axis.rank} of axis {axis.name}",
            f"the {columns} columns of {cut.whole} that this rank holds",
            "torch.nn.functional.cross_entropy(logits, targets) for gathered logits",
        )
    moves = moves or Stream(axis, split=False)
    return Logits.of(local, Shards(axis, cut, moves))
