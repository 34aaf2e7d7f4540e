"""How the ranks of a mesh hold one parameter, its gradient and its optimizer state.

This is the only description: the flat parameter, the gradient norm, the boxes of a checkpoint, the
memory, the bytes and the errors are computed from it.

On the data axes a row of the states table says where each state is, and on which tier (zero.py). On
every other axis it is one placement:

    placement   each rank holds                 its gradient
    I           all of the parameter            is the same on all ranks: nothing is summed
    R           all of it, if it is a holder    is partial: summed over the holders
    S(d)        ranges of dim d (uneven.py)     is complete, or summed over ranks that share ranges

A missing axis has the placement I and one rank.  An expert's weight has S(0) on `ep`, and a row on
the remaining data axis; a unit with a row of its own has layouts with that row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from shardwise.core.layouts.layout import I, Placement, R, S
from shardwise.core.layouts.uneven import Cut
from shardwise.core.zero import ROWS, Row

Groups = tuple[tuple[int, ...], ...]


class Shared(NamedTuple):
    """Spans (start, length) of a rank's part of a dim that all of `ranks` hold."""

    dim: int
    spans: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]

    def includes(self, place: int) -> bool:
        return any(start <= place < start + length for start, length in self.spans)


@dataclass(frozen=True)
class AxisLayout:
    """How the `size` ranks of an axis, or its `holders`, hold a parameter; `cut` is for S."""

    placement: Placement = I
    size: int = 1
    cut: Cut | None = None
    holders: tuple[int, ...] = ()

    @classmethod
    def sharded(cls, cut: Cut) -> "AxisLayout":
        return cls(S(cut.dim), cut.ranks, cut)

    @cached_property
    def groups(self) -> Groups:
        """The groups of ranks over which the gradient is summed; empty if it is complete."""
        if self.cut is not None:
            every = dict.fromkeys(map(self.cut.holders, range(self.size)))
            return tuple(every) if self.cut.shared else ()
        return (self.holders or tuple(range(self.size)),) if self.placement == R else ()

    def group(self, rank: int) -> tuple[int, ...]:
        return next((group for group in self.groups if rank in group), (rank,))

    def replica(self, rank: int) -> int:
        same = self.cut.holders(rank) if self.cut else self.holders
        return same.index(rank) if same else rank

    def holder(self, rank: int) -> int:
        return self.holders.index(rank) if self.holders else rank

    def shared(self, rank: int) -> Shared | None:
        """The spans that `rank` shares with ranks whose other spans differ; None without any."""
        found = self.cut.common(rank) if self.cut else {}
        for ranks, spans in found.items():  # at most one group
            return Shared(self.cut.dim if self.cut else 0, tuple(spans), ranks)
        return None


@dataclass(frozen=True)
class Layout:
    """The row on the data axes `shard` and `replicate`, and an `AxisLayout` for other axes.
    The first axis cuts the part on the second, and so on.  `here` is a rank's place on each axis.
    """

    row: Row = ROWS["ddp"]
    shard: str = "none"
    replicate: str = "none"
    axes: tuple[tuple[str, AxisLayout], ...] = ()

    def __str__(self) -> str:
        words = [f"{axis}={on.placement}" for axis, on in self.axes]
        data = [axis for axis in (self.shard, self.replicate) if axis != "none"]
        return " ".join([*words, f"{self.row} over {' and '.join(data) or 'one rank'}"])

    def on(self, axis: str) -> AxisLayout:
        return dict(self.axes).get(axis, AxisLayout())

    def also(self, axis: str, on: AxisLayout) -> "Layout":
        return replace(self, axes=(*self.axes, (axis, on)))

    def held(self, here: Mapping[str, int]) -> bool:
        return all(here.get(axis, 0) in on.holders for axis, on in self.axes if on.holders)

    def cuts(self, here: Mapping[str, int]) -> list[tuple[Cut, int]]:
        """What is cut from the whole in turn on the axes of `here`, and the rank on each."""
        return [(on.cut, here[axis]) for axis, on in self.axes[::-1] if on.cut and axis in here]

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """The key of a flat parameter: parameters with one kind are summed and counted together."""
        others = ((axis, on.cut is None, on.groups) for axis, on in self.axes)
        return (self.row, self.shard, self.replicate, *others)

    @property
    def tied(self) -> bool:
        """Whether several, but not all, ranks of another axis hold the parameter."""
        return any(len(on.holders) > 1 for _, on in self.axes)

    def replica(self, here: Mapping[str, int]) -> int:
        """0 on one of the ranks (of the other axes) that hold the same part, else above 0."""
        return sum(on.replica(here.get(axis, 0)) for axis, on in self.axes)

    def holder(self, here: Mapping[str, int]) -> int:
        """0 on one of the ranks (of the other axes) that hold any part, else above 0."""
        return sum(on.holder(here.get(axis, 0)) for axis, on in self.axes)

    def full_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        shape = tuple(local)
        for _, on in self.axes:
            shape = on.cut.full_shape(shape) if on.cut else shape
        return shape
