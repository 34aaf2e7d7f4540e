"""Rows of the batch on ranks of several tensor degrees, and the moves between them.

    rank        0      1      2      3
    tp1, dp4    a      b      c      d        rows a, b, c, d; each S(0) over all ranks
    tp2, dp2    a b    a b    c d    c d      I on the two ranks of a tp group
    tp4         abcd   abcd   abcd   abcd     I on all

From a smaller degree to a larger one is S(0) -> I, one all-gather on the axis of the ranks between
them; back is I -> S(0), where nothing is sent. Backward is the dual: I -> S(0), or an all-gather of
the gradients. Ranks may have different numbers of rows.

Outputs of a layer keep the layer's rows until another operation reads them (Redistributed):

    y = layer_a(x)      rows are gathered before layer_a; y keeps them gathered
    z = layer_b(y)      a layer of the same mesh takes y with these rows: nothing is sent
    z + 1               any other operation first takes this rank's own rows
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shardwise.comm.move import all_gather, join, move, take
from shardwise.comm.world import Axis, World
from shardwise.core.layouts.layout import I, S
from shardwise.core.layouts.uneven import Counts, Cut, wide
from shardwise.core.tools.tree import leaves
from shardwise.kernels.logits import DESCRIBED


def between(degree: int, other: int, ranks: int, stages: int = 1) -> list[list[int]]:
    """Lists of the ranks that move rows between two tensor degrees, of `ranks` in each stage."""
    few, many = sorted((degree, other))
    firsts = (
        s * ranks + g + t for s in range(stages) for g in range(0, ranks, many) for t in range(few)
    )
    return [[first + j * few for j in range(many // few)] for first in firsts]


def _rows(part: Any) -> int:
    return next((len(x) for x in leaves(part, Tensor, objects=True) if x.dim()), 0)


@dataclass
class RowExchange:
    """The rows of this rank at each tensor degree.

    axes     by the smaller and the larger degree (`between`)
    base     the degree of the model's own plan
    place    this rank among the `ranks` of its stage
    world    exchanges the counts of rows
    count    counts the rows of a microbatch
    passes   the number of forwards so far
    assumed  whether `counts` were taken from the first layer of this forward
    """

    axes: Mapping[tuple[int, int], Axis]
    base: int
    place: int
    ranks: int
    world: World
    count: Callable[[Any], int]
    counts: Counts = ()
    parts: list[tuple[Any, Counts]] = field(default_factory=list)
    passes: int = 0
    assumed: bool = False

    def begin(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Exchange the numbers of rows of all microbatches."""
        if not (self.axes and parts):
            return parts
        counts = [self.count(part) for part in parts]
        own = torch.tensor(counts, dtype=torch.int64, device=self.world.device)
        with self.world.ledger.phase("check"):
            every = torch.stack(all_gather(own, self.world.everyone)).tolist()
        first = self.world.rank - self.place
        by_rank = every[first : first + self.ranks : self.base]
        counts = [tuple(rank[n] for rank in by_rank) for n in range(len(parts))]
        counts = self.world.counts or counts
        self.parts = list(zip(parts, counts, strict=True))
        self.counts, self.assumed = counts[0], False
        return parts

    def enter(self, part: Any) -> None:
        self.passes += 1
        self.counts = next((counts for each, counts in self.parts if each is part), self.counts)

    def forget(self) -> None:
        """The next forward has the same rows on all ranks: those of its first layer."""
        self.parts, self.counts, self.passes = [], (), self.passes + 1

    def equal(self, inputs: Any) -> None:
        self.counts, self.assumed = (_rows(inputs),) * (self.ranks // self.base), True

    def drop_assumed(self) -> None:
        """A forward begins, whose numbers of rows may differ from the last one's."""
        if self.assumed:
            self.counts, self.assumed = (), False

    @property
    def uneven(self) -> bool:
        """Whether ranks have different numbers of rows, so that one may take another dim for it."""
        return min(self.counts) < max(self.counts)

    def everywhere(self, flags: Sequence[bool], degree: int) -> list[bool]:
        """Which flags are true on all ranks between the base and another degree."""
        few, many = sorted((self.base, degree))
        unset = [not flag for flag in flags]
        own = torch.tensor(unset, dtype=torch.int64, device=self.world.device)
        everyone = torch.stack(all_gather(own, self.axes[few, many]))
        return (everyone.sum(0) == 0).tolist()

    def held(self, degree: int, place: int | None = None) -> int:
        """The number of rows at this degree of the rank at `place`, or of this rank."""
        place = self.place if place is None else place
        if degree >= self.base:
            wide = degree // self.base
            first = place // degree * wide
            return sum(self.counts[first : first + wide])
        parts, count = self.base // degree, self.counts[place // self.base]
        index = place % self.base // degree
        return count * (index + 1) // parts - count * index // parts

    def move(self, x: Tensor, have: int, want: int, factor: int = 1) -> Tensor:
        """`x`, whose dim 0 has `factor` entries for each row at degree `have`, at `want`."""
        if have == want:
            return x
        few, many = sorted((have, want))
        axis = self.axes[few, many]
        first = self.place // many * many + self.place % few
        sizes = [self.held(few, first + j * few) for j in range(many // few)]
        return self._moved(x.contiguous(), axis, sizes, factor, gathers=have < want)

    def _moved(
        self, x: Tensor, axis: Axis, sizes: Sequence[int], factor: int, *, gathers: bool
    ) -> Tensor:
        if len(set(sizes)) == 1:
            way = (S(0), I) if gathers else (I, S(0))
            return move(x, axis, *way)
        ends = [sum(sizes[: j + 1]) for j in range(len(sizes))]
        ranges = tuple(((end - size, end),) for end, size in zip(ends, sizes, strict=True))
        cut = wide(Cut(0, ends[-1], ranges), 0, factor)
        return join(x, axis, cut) if gathers else take(x, axis, cut)


# --- Tensors with the rows of another degree ------------------------------------------------------


class Redistributed(Tensor):
    """A tensor [rows, ...] with the rows at tensor degree `degree`, made by the layer `layer`. Its
    shape, and what torch functions read, is this rank's own rows.
    """

    exchange: RowExchange
    degree: int
    own: Tensor | None
    version: int

    @staticmethod
    def of(x: Tensor, exchange: RowExchange, degree: int) -> "Redistributed":
        out = x.as_subclass(Redistributed)
        out.exchange, out.degree = exchange, degree
        out.own, out.version = None, 0
        return out

    @property
    def computed_from(self) -> Tensor:
        """The tensor with all rows at `degree`, as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def plain(self) -> Tensor:
        exchange, whole = self.exchange, self.computed_from
        if self.own is None or self._lacks_graph(self.own, whole):
            self.own = exchange.move(whole, self.degree, exchange.base)
            self.version = self.own._version
        return self.own

    def _lacks_graph(self, own: Tensor, whole: Tensor) -> bool:
        """Whether `own` was taken under no_grad, and is read now where autograd records."""
        records = torch.is_grad_enabled() and whole.requires_grad
        return records and not own.requires_grad and own._version == self.version

    def at(self, degree: int) -> Tensor:
        if self.own is not None and self.own._version != self.version:  # changed in place
            return self.exchange.move(self.own, self.exchange.base, degree)
        return self.exchange.move(self.computed_from, self.degree, degree)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if func.__name__ == "__get__" and owner == "shape":
            return _shape(args[0])
        if func.__name__ == "__get__" and owner in DESCRIBED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        if func is Tensor.size and len(args) == 1 and not kwargs:
            return _shape(args[0])
        return func(*plain(args), **plain(kwargs))


def _shape(x: Redistributed) -> torch.Size:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Size((x.exchange.held(x.exchange.base), *x.shape[1:]))


def plain(inputs: Any) -> Any:
    return tree_map(lambda x: x.plain() if isinstance(x, Redistributed) else x, inputs)
