"""Moves of a tensor between placements on one axis: the collective of each, and its price.

The price is the least that any algorithm sends over equal links (the ring bound). For a tensor of N
elements on n ranks, each rank sends

    all_reduce       2 N (n-1)/n        a reduce_scatter, then an all_gather
    reduce_scatter     N (n-1)/n        every block except the rank's own is sent once
    all_gather         N (n-1)/n
    all_to_all         N (n-1)/n^2      all of its block of N/n except 1/n of it;
                                        with counts: all counts except the rank's own
    take_block, pad_block, keep    0    local operations

(Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 2005; Chan et al., "Collective communication: theory, practice, and experience", 2007.)
"""

from dataclasses import dataclass
from functools import lru_cache

from shardwise.core.layouts.layout import Placement

#: (kind before, kind after) -> the collective, and the factor of N (n-1)/n elements that each rank
#: sends. S to S also depends on the dims; `_kind` decides it.
_MOVES: dict[tuple[str, str], tuple[str, int]] = {
    ("P", "R"): ("all_reduce", 2),
    ("P", "I"): ("all_reduce", 2),
    ("P", "S"): ("reduce_scatter", 1),
    ("S", "R"): ("all_gather", 1),
    ("S", "I"): ("all_gather", 1),
    ("R", "S"): ("take_block", 0),
    ("I", "S"): ("take_block", 0),
    ("S", "P"): ("pad_block", 0),
    ("I", "R"): ("keep", 0),
    ("R", "R"): ("keep", 0),
    ("I", "I"): ("keep", 0),
    ("P", "P"): ("keep", 0),
}


#: Up to this size, numbers of all ranks are gathered and added, in half the messages.
GATHERED_BYTES = 2**14


def sums_by_gathering(ranks: int, nbytes: int) -> bool:
    """Whether `ranks` ranks that each have `nbytes` of numbers gather all of them to sum them."""
    return ranks * nbytes <= GATHERED_BYTES


@dataclass(frozen=True)
class Move:
    """A change of placement of one tensor on one axis; each rank sends `sent` elements."""

    what: str
    src: Placement
    dst: Placement
    sent: float

    @property
    def adjoint(self) -> tuple[Placement, Placement]:
        """The placements between which the gradient moves in the backward pass."""
        return self.dst.dual, self.src.dual


def what(src: Placement, dst: Placement) -> str:
    """The collective that moves a tensor from `src` to `dst` on several ranks."""
    return _kind(src, dst)[0]


@lru_cache(maxsize=4096)  # called for every exchange of a flat tensor
def price(src: Placement, dst: Placement, numel: int, n: int) -> Move:
    """The move from `src` to `dst` of a tensor of `numel` elements in total on `n` ranks.

    `sent` is exact for blocks of equal size. On an axis of one rank all placements are equal, and
    the move is `keep`. Raises ValueError for an impossible move (R -> I would claim that different
    uses are the same; R -> P and I -> P would count the value n times).
    """
    collective, times, split = _kind(src, dst)
    if n == 1:
        return Move("keep", src, dst, 0.0)
    return Move(collective, src, dst, times * numel * (n - 1) / (n * n if split else n))


def between(src: str, dst: str) -> str:
    """The kind of a copy between two tiers of a rank; its price is all elements, once."""
    return f"{src}_to_{dst}"


def _kind(src: Placement, dst: Placement) -> tuple[str, int, bool]:
    """The collective, its factor, and whether each rank sends only its own block."""
    if src.kind == dst.kind == "S":
        return ("keep", 0, False) if src == dst else ("all_to_all", 1, True)
    if (src.kind, dst.kind) not in _MOVES:
        raise ValueError(f"there is no move from {src} to {dst}")
    return *_MOVES[src.kind, dst.kind], False
