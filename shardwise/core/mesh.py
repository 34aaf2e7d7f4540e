"""The ranks of a run as a grid with named axes, and the arithmetic of coordinates on it.

Ranks are numbered row-major: the last axis varies fastest. The order of the axes is fixed, from
the one that sends least (outermost, pp) to the one that sends most (innermost, tp), so that
neighbours along tp are neighbours in rank and stay inside one machine:

    pp2 dp2 tp2         dp 0      dp 1           line("dp", 1) = (1, 3)
               pp 0   [ 0  1 ]  [ 2  3 ]         line("tp", 4) = (4, 5)
               pp 1   [ 4  5 ]  [ 6  7 ]         line("pp", 6) = (2, 6)
                       tp ->     tp ->

*axis* is of a mesh, *dim* is of a tensor, *rank* is a coordinate on an axis; a rank of the whole
mesh is called global. An axis that a mesh does not have is an axis of size one.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.errors import bad

#: All axes, outermost first.
AXES = ("pp", "dp_replicate", "dp", "dp_shard", "ep", "tp")
PIPELINE, TENSOR = "pp", "tp"
#: The axis of positions, which divides the data ranks.
CONTEXT = "cp"
#: The axis of experts, and the data ranks that hold the same ones.
EXPERTS, REST = "ep", "edp"
#: The axis of a parameter's layout on which its tiles are; no mesh has it.
TILE = "tile"


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes, sorted in the order of `AXES`.

    Raises InputError for an unknown axis, a repeated axis or a size below one.
    """

    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", ordered(self.axes))

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """Parse a mesh such as `dp2 tp2`; the empty text is a mesh of one rank."""
        return cls(tuple(_axis(word) for word in text.split()))

    def __str__(self) -> str:
        return " ".join(f"{name}{size}" for name, size in self.axes)

    @property
    def size(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size_of(self, name: str) -> int:
        """The number of ranks along one axis; 1 for an axis that the mesh does not have."""
        return dict(self.axes).get(name, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The rank of a global rank on every axis. Raises InputError outside of the mesh."""
        if not 0 <= rank < self.size:
            raise bad(f"rank {rank} of the mesh '{self}'", f"0 to {self.size - 1}", "rank 0")
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name, _ in self.axes}

    def rank_at(self, coordinate: dict[str, int]) -> int:
        """The inverse of `coordinate`: the global rank; missing axes are at 0."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinate.get(name, 0)
        return rank

    def line(self, name: str, rank: int) -> tuple[int, ...]:
        """The global ranks along one axis through `rank`, in the order of their rank on it."""
        coordinate = self.coordinate(rank)
        return tuple(self.rank_at(coordinate | {name: k}) for k in range(self.size_of(name)))

    def lines(self, name: str) -> list[tuple[int, ...]]:
        """All lines along one axis; each global rank is in one of them."""
        firsts = (r for r in range(self.size) if not self.coordinate(r).get(name))
        return [self.line(name, rank) for rank in firsts]


def ordered(axes: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """The axes, outermost first. Raises InputError for a wrong name or size."""
    names = [name for name, _ in axes]
    for name, size in axes:
        if name not in AXES:
            raise bad(f"the axis '{name}'", f"the axes {', '.join(AXES)}", f"dp{max(size, 1)}")
        if size < 1:
            raise bad(f"the axis {name} with {size} ranks", "sizes from 1 up", f"{name}2")
        if names.count(name) > 1:
            raise bad(f"the axis {name} more than once", "each axis once", f"{name}{size}")
    return tuple(sorted(axes, key=lambda axis: AXES.index(axis[0])))


def _axis(word: str) -> tuple[str, int]:
    found = re.fullmatch(r"([a-z_]+)(\d+)", word)
    if found is None:
        raise bad(f"the mesh word '{word}'", "an axis and its size, without a space", "dp2 tp2")
    return found[1], int(found[2])
