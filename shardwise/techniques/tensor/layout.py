"""State of a model on the tensor axis: its stream, its sums and its random numbers."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.comm.world import Axis
from shardwise.core.applied import Applied
from shardwise.core.param_layout import Groups
from shardwise.techniques.tensor.linear import Stream
from shardwise.techniques.tensor.rng import ShardedRandom


@dataclass
class Tensors(Applied):
    """A model on the tensor axis; on an axis of one rank nothing is sharded and nothing is sent.

    sums      for groups of ranks that sum gradients, the axis of this rank's group
    random    random numbers of sharded activations
    others    layers with a mesh of their own, each on the tensor axis of that mesh
    """

    axis: Axis
    stream: Stream
    sums: dict[Groups, Axis] = field(default_factory=dict[Groups, Axis])
    random: ShardedRandom = field(default_factory=lambda: ShardedRandom(Axis("none")))
    others: tuple["Tensors", ...] = ()

    def begin(self, batch: Any, parts: Sequence[Any], *, trains: bool) -> Sequence[Any]:
        for each in (self, *self.others):
            each.stream.begin()
            each.random.sharded.clear()
        return parts

    def end(self, *, trains: bool) -> None:
        for each in (self, *self.others) if trains else ():
            each.stream.end()

    @contextmanager
    def during(self, device: torch.device) -> Iterator[None]:
        """Around a forward and its backward pass: random numbers of sharded activations."""
        with ExitStack() as entered:
            for each in (self, *self.others):
                entered.enter_context(each.random.during(device))
            yield


def nowhere() -> Tensors:
    """The state of a model without a tensor axis."""
    return Tensors(Axis("none"), Stream(Axis("none"), split=False))
