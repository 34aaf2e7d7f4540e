"""What a model on the tensor axis has: the layout of each parameter, by name, and its streams."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from shardwise.comm.move import part
from shardwise.comm.world import Axis
from shardwise.core.layout import I
from shardwise.core.param_layout import AxisLayout
from shardwise.engine.rng import ShardedRandom
from shardwise.kernels.matmul import BY_TORCH
from shardwise.parallel.tensor.linear import Stream


@dataclass
class Tensors:
    """A model on the tensor axis; on an axis of one rank nothing is cut and nothing moves.

    layouts   of parameters that are not the same on all ranks with the same gradient
    sums      for some of them, this rank's axis over which the gradient is summed
    random    random numbers of sharded activations
    """

    axis: Axis
    stream: Stream
    layouts: dict[str, AxisLayout] = field(default_factory=dict)
    sums: dict[str, Axis] = field(default_factory=dict)
    random: ShardedRandom = field(default_factory=lambda: ShardedRandom(Axis("none")))

    def of(self, name: str) -> AxisLayout:
        """The layout of parameter `name`."""
        return self.layouts.get(name, AxisLayout(I, self.axis.size))

    def part(self, fill: Callable[[str, Tensor], None], name: str, tensor: Tensor) -> None:
        """Fill this rank's part of parameter `name` by a rule for the whole."""
        cut = self.of(name).cut
        if cut is None:
            fill(name, tensor)
            return
        whole = tensor.new_empty(cut.whole_shape(tensor.shape))
        fill(name, whole)
        tensor.copy_(part(whole, cut, self.axis.rank))

    def begin(self) -> None:
        """A step begins: its moves are counted."""
        self.stream.counting = True
        self.stream.begin()
        self.stream.crossings.clear()
        self.stream.losses.clear()

    def end(self) -> None:
        """The last backward pass of the step is over."""
        self.stream.counting = False
        self.stream.end()


def nowhere() -> Tensors:
    """A model that is on no tensor axis."""
    return Tensors(Axis("none"), Stream(Axis("none"), split=False, products=BY_TORCH))
