"""Axes: what the dims of tensors range over, traced through the operations of a model.

Every dim of a tensor is a product of axes, from major to minor:

    y = up(x)                   [B, T, F]           F is the output axis of the layer up
    y.view(B, T, H, D)          [B, T, H, D]        F is split into H and D
    y.view(B, T, K, G, D)       [B, T, K, G, D]     H is split into K and G
    y * z                                           axes of the same dim are united
    y.softmax(-1)                                   the last axis is mixed: it cannot be sharded

An axis that nothing mixes can be sharded: each rank holds a part of every tensor that has it.
"""

import math
from collections.abc import Iterable, Sequence


class TracedAxis:
    """One axis, `size` long. A split axis has parts; a united one is another axis.

    `mixed` says why ranks cannot hold parts of it; "" if they can.
    """

    __slots__ = ("_mixed", "_parts", "_same", "size")

    def __init__(self, size: int, mixed: str = "") -> None:
        self.size = size
        self._same: TracedAxis | None = None
        self._parts: tuple[TracedAxis, TracedAxis] | None = None
        self._mixed = mixed

    @property
    def root(self) -> "TracedAxis":
        """The representative of all axes that are united with this one."""
        axis = self
        while axis._same is not None:
            axis = axis._same
        return axis

    @property
    def leaves(self) -> tuple["TracedAxis", ...]:
        """The axes that this one was split into, from major to minor; itself if unsplit."""
        root = self.root
        if root._parts is None:
            return (root,)
        return tuple(leaf for part in root._parts for leaf in part.leaves)

    @property
    def mixed(self) -> str:
        """Why it cannot be sharded."""
        return self.root._mixed

    def mix(self, why: str) -> None:
        """Mark the axis as impossible to shard."""
        for leaf in self.leaves:
            leaf._mixed = leaf._mixed or why

    def split(self, major: int) -> None:
        """Split a leaf into `major` times the rest; both are mixed if it is."""
        root = self.root
        assert root._parts is None and root.size % major == 0
        root._parts = TracedAxis(major, root._mixed), TracedAxis(root.size // major, root._mixed)

    def unite(self, other: "TracedAxis") -> None:
        """Make two leaves one axis."""
        mine, theirs = self.root, other.root
        if mine is not theirs:
            mine._mixed = mine._mixed or theirs._mixed
            theirs._same = mine


#: The axes of one dim, from major to minor; a dim of size one has none.
Dim = tuple[TracedAxis, ...]


def fresh(size: int, mixed: str = "") -> Dim:
    """A dim of a new axis."""
    return () if size == 1 else (TracedAxis(size, mixed),)


def leaves(dim: Iterable[TracedAxis]) -> list[TracedAxis]:
    """The unsplit axes of a dim."""
    return [leaf for axis in dim for leaf in axis.leaves]


def mix(dims: Iterable[Dim], why: str) -> None:
    """Mark all axes of these dims as impossible to shard."""
    for dim in dims:
        for axis in dim:
            axis.mix(why)


def unite(one: Dim, other: Dim) -> None:
    """Unite the axes of two dims of one size, after splitting them until they match."""
    left, right = leaves(one), leaves(other)
    while left and right:
        a, b = left[0], right[0]
        if a.size == b.size:
            a.unite(b)
            left, right = left[1:], right[1:]
        elif max(a.size, b.size) % min(a.size, b.size):
            mix((tuple(left), tuple(right)), "it is divided in two ways")
            return
        else:
            max(a, b, key=lambda axis: axis.size).split(min(a.size, b.size))
            left, right = leaves(left), leaves(right)


def regroup(dims: Sequence[Dim], sizes: Sequence[int]) -> tuple[Dim, ...]:
    """The dims of a view with these sizes. Axes that it divides unevenly are mixed."""
    rest = [leaf for dim in dims for leaf in leaves(dim)]
    found: list[Dim] = []
    for size in sizes:
        taken: list[TracedAxis] = []
        while (held := math.prod(axis.size for axis in taken)) < size and rest:
            wanted = size // held
            if size % held == 0 and wanted % rest[0].size == 0:
                taken.append(rest.pop(0))
            elif size % held == 0 and rest[0].size % wanted == 0:
                rest[0].split(wanted)
                rest = leaves(rest)
            else:
                break
        if math.prod(axis.size for axis in taken) != size:
            mix(dims, "a view divides it unevenly")
            return tuple(fresh(size, "a view divides it unevenly") for size in sizes)
        found.append(tuple(taken))
    return tuple(found)
