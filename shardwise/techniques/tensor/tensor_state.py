"""State of a model on the tensor axis: its stream, its sums and its random numbers."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.comm.world import Axis
from shardwise.core.applied import Applied
from shardwise.core.layouts.param_layout import Groups
from shardwise.techniques.tensor.linear import Stream
from shardwise.techniques.tensor.rng import ShardedRandom


@dataclass
class Tensors(Applied):
    """A model on the tensor axis; on an axis of one rank nothing is sharded and nothing is sent.

    summed    for groups of ranks that sum gradients, the axis of this rank's group
    random    random numbers of sharded activations
    """

    axis: Axis
    stream: Stream
    summed: dict[Groups, Axis] = field(default_factory=dict[Groups, Axis])
    random: ShardedRandom = field(default_factory=lambda: ShardedRandom(Axis("none")))

    def begin(self, batch: Any, parts: Sequence[Any], *, trains: bool) -> Sequence[Any]:
        self.stream.begin()
        self.random.sharded.clear()
        return parts

    def end(self, *, trains: bool) -> None:
        if trains:
            self.stream.end()

    def during(self, device: torch.device) -> AbstractContextManager[None]:
        """Around a forward and its backward pass: random numbers of sharded activations."""
        return self.random.during(device)

    def sums(self) -> Mapping[tuple[str, Groups], Axis]:
        return {(self.axis.name, groups): axis for groups, axis in self.summed.items()}


def nowhere() -> Tensors:
    """The state of a model without a tensor axis."""
    return Tensors(Axis("none"), Stream(Axis("none"), split=False))
