"""this file is what tensor ranks hold of each parameter, by name."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from shardwise.comm.move import part
from shardwise.comm.world import Axis
from shardwise.core.model_spec import CutLoss
from shardwise.core.uneven import Cut
from shardwise.engine.rng import ShardedRandom
from shardwise.kernels.matmul import BY_TORCH
from shardwise.parallel.tensor.linear import Stream

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Held:
    """How this rank holds one parameter on the tensor axis.

    cut      what part of it; None: all
    groups   the ranks over which its gradient is a sum still to be taken; none: it is whole
    sums     those of them that are this rank's
    replica  which of the ranks that hold the same this one is
    common   what other ranks hold too, of a parameter that they do not hold alike in all
    """

    cut: Cut | None = None
    groups: Groups = ()
    sums: Axis = field(default_factory=lambda: Axis("none"))
    replica: int = 0
    common: "Common | None" = None

    @property
    def kind(self) -> str:
        """The same word on every rank: parameters of one kind are summed and counted together."""
        return f"{'part' if self.cut else 'whole'} {self.groups}"


@dataclass(frozen=True)
class Common:
    """The spans (start, length) along a cut that the ranks of `line` hold alike.

    Each of them makes a part of their gradient, which is summed as soon as it is made.
    """

    spans: tuple[tuple[int, int], ...]
    line: Axis

    def includes(self, place: int) -> bool:
        """Whether a place along the cut is in it."""
        return any(start <= place < start + length for start, length in self.spans)


@dataclass
class Tensors:
    """A model on the tensor axis; on an axis of one rank nothing is held and nothing moves.

    losses    each parallel loss of this step, in the order of its forward passes
    random    random numbers of sharded activations
    """

    axis: Axis
    stream: Stream
    held: dict[str, Held] = field(default_factory=dict)
    losses: list[CutLoss] = field(default_factory=list)
    random: ShardedRandom = field(default_factory=lambda: ShardedRandom(Axis("none")))

    def of(self, name: str) -> Held:
        """How parameter `name` is held; alike on all ranks where nothing else is said."""
        return self.held.get(name, Held(replica=self.axis.rank))

    def part(self, fill: Callable[[str, Tensor], None], name: str, tensor: Tensor) -> None:
        """Fill this rank's part of parameter `name` by a rule for the whole."""
        cut = self.of(name).cut
        if cut is None:
            fill(name, tensor)
            return
        whole = tensor.new_empty(cut.whole_shape(tensor.shape))
        fill(name, whole)
        tensor.copy_(part(whole, cut, self.axis.rank))

    def join(self, x: Tensor, cut: Cut) -> Tensor:
        """Logits of which `x` are this rank's columns, gathered."""
        return self.stream.join(x, cut)

    def take(self, x: Tensor, cut: Cut) -> Tensor:
        """This rank's columns of logits that were gathered."""
        return self.stream.take(x, cut)

    def lost(self, positions: int, smoothing: bool, element_bytes: int) -> None:
        """A loss of logits that stay cut."""
        if self.stream.counting:
            self.losses.append(CutLoss(positions, smoothing, element_bytes))

    def begin(self) -> None:
        """A step begins: its moves are counted."""
        self.stream.counting = True
        self.stream.begin()
        self.stream.crossings.clear()
        self.losses.clear()

    def end(self) -> None:
        """The last backward pass of the step is over."""
        self.stream.counting = False
        self.stream.end()


def nowhere() -> Tensors:
    """A model that is on no tensor axis."""
    return Tensors(Axis("none"), Stream(Axis("none"), split=False, products=BY_TORCH))


@dataclass(frozen=True)
class Tie:
    """How ranks of the pipeline axis hold one parameter that stages of several of them use.

    ranks    those that hold it; one or none: no tie
    axis     they among themselves
    replica  which of them this one is
    """

    ranks: tuple[int, ...] = ()
    axis: Axis = field(default_factory=lambda: Axis("none"))
    replica: int = 0
