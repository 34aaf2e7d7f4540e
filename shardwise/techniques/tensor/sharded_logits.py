"""Logits that stay sharded over the vocabulary, and the state of a model on the tensor axis.

    rank 0 holds x[..., 0..3], rank 1 x[..., 4..7]           x.shape is [..., 8] on both

A model with a vocabulary-parallel output layer returns them. kernels/logits.py says what is
computed on the shards and what gathers them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor

from shardwise.comm.move import join, take
from shardwise.comm.world import Axis
from shardwise.core.applied import Applied
from shardwise.core.errors import bad
from shardwise.core.layouts.param_layout import Groups
from shardwise.core.layouts.uneven import Cut
from shardwise.kernels.cross_entropy import LossOptions, sharded_cross_entropy
from shardwise.kernels.logits import Logits
from shardwise.techniques.tensor.linear import Stream
from shardwise.techniques.tensor.rng import ShardedRandom


@dataclass(frozen=True)
class Shards:
    """The columns that `cut` assigns to each rank of `axis`: S(-1)."""

    axis: Axis
    cut: Cut
    computed = False

    def copy(self, _: torch.dtype | None) -> "Shards":
        """The same: a copy of a shard is a tensor of its own."""
        return self

    @property
    def whole(self) -> int:
        return self.cut.whole

    def join(self, local: Tensor) -> Tensor:
        return join(local, self.axis, self.cut.on(local.dim() - 1))

    def take(self, full: Tensor) -> Tensor | None:
        """This rank's shard; on one rank the gathered tensor is the same memory."""
        return take(full, self.axis, self.cut.on(full.dim() - 1)) if self.axis.size > 1 else None

    def loss(self, local: Tensor, targets: Tensor, /, **options: Unpack[LossOptions]) -> Tensor:
        return sharded_cross_entropy(local, (self.axis, self.cut), targets, **options)


def sharded_logits(local: Tensor, axis: Axis, cut: Cut) -> Logits:
    """Logits whose shard on this rank is `local` [..., v], not copied. Raises InputError if `local`
    has another number of columns.
    """
    columns = cut.size(axis.rank)
    if local.shape[-1] != columns:
        raise bad(
            f"logits with {local.shape[-1]} columns on rank {axis.rank} of axis {axis.name}",
            f"the {columns} columns of {cut.whole} that this rank holds",
            "torch.nn.functional.cross_entropy(logits, targets) for gathered logits",
        )
    return Logits.of(local, Shards(axis, cut))


@dataclass
class Tensors(Applied):
    """A model on the tensor axis; on an axis of one rank nothing is sharded and nothing is sent.

    whole     the stream of modules that need the gathered sequence
    summed    for groups of ranks that sum gradients, the axis of this rank's group
    random    random numbers of sharded activations
    """

    axis: Axis
    stream: Stream
    whole: Stream
    summed: dict[Groups, Axis] = field(default_factory=dict[Groups, Axis])
    random: ShardedRandom = field(default_factory=lambda: ShardedRandom(Axis("none")))

    def begin(self, batch: Any, parts: Sequence[Any], *, trains: bool) -> Sequence[Any]:
        self.stream.begin()
        self.random.sharded.clear()
        return parts

    @contextmanager
    def during(self, device: torch.device) -> Iterator[None]:
        with self.random.during(device):
            yield
        self.end_forward()

    def end_forward(self, *_: object) -> None:
        """No layer reads an entered tensor again, whose graph keeps a microbatch's activations."""
        self.stream.slot = self.whole.slot = None

    def sums(self) -> Mapping[tuple[str, Groups], Axis]:
        return {(self.axis.name, groups): axis for groups, axis in self.summed.items()}


def nowhere() -> Tensors:
    stream = Stream(Axis("none"), split=False)
    return Tensors(Axis("none"), stream, stream)
