"""State of a model on the tensor axis: the layout of each parameter by name, and its stream."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.comm.move import part
from shardwise.comm.world import Axis
from shardwise.core.layout import I
from shardwise.core.param_layout import AxisLayout
from shardwise.engine.rng import ShardedRandom
from shardwise.parallel.tensor.linear import Stream


@dataclass
class Tensors:
    """A model on the tensor axis; on an axis of one rank nothing is sharded and nothing is sent.

    layouts   of parameters that are sharded, or whose gradients differ between the ranks
    sums      for some of them, the axis over which the gradient is summed
    random    random numbers of sharded activations
    others    layers with a mesh of their own, each on the tensor axis of that mesh
    """

    axis: Axis
    stream: Stream
    layouts: dict[str, AxisLayout] = field(default_factory=dict)
    sums: dict[str, Axis] = field(default_factory=dict)
    random: ShardedRandom = field(default_factory=lambda: ShardedRandom(Axis("none")))
    others: tuple["Tensors", ...] = ()

    def of(self, name: str) -> AxisLayout:
        """The layout of parameter `name`."""
        return self.layouts.get(name, AxisLayout(I, self.axis.size))

    def part(self, fill: Callable[[str, Tensor], None], name: str, tensor: Tensor) -> None:
        """Fill this rank's shard of parameter `name` with a function that fills the full tensor."""
        cut = self.of(name).cut
        if cut is None:
            fill(name, tensor)
            return
        whole = tensor.new_empty(cut.full_shape(tensor.shape))
        fill(name, whole)
        tensor.copy_(part(whole, cut, self.axis.rank))

    def begin(self) -> None:
        """Begin a step."""
        self.stream.begin()
        self.random.sharded.clear()
        for other in self.others:
            other.begin()

    def end(self) -> None:
        """End the step, after its last backward pass."""
        self.stream.end()
        for other in self.others:
            other.end()

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
