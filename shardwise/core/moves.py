"""What it takes to bring a tensor from one placement to another on one axis, and its price.

The price is the least that any algorithm can do with links that are all alike (the ring bound):
of a tensor of N elements over n ranks, each rank sends

    all_reduce       2 N (n-1)/n        a reduce_scatter, then an all_gather
    reduce_scatter     N (n-1)/n        every block but one's own goes out once
    all_gather         N (n-1)/n
    all_to_all         N (n-1)/n^2      of one's own block of N/n, all but one n-th;
                                        with counts: all counts but the rank's own
    take_block, pad_block, keep    0    arithmetic on what is already here

(Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 2005; Chan et al., "Collective communication: theory, practice, and experience", 2007.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwise.core.layout import Placement

#: kind before, kind after -> what is done, and how many times N (n-1)/n elements each rank sends.
#: S to S is the one pair that also depends on the dims, and is decided in `price`.
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


@dataclass(frozen=True)
class Move:
    """One tensor changing placement on one axis; `sent` is in elements, by each rank."""

    what: str
    src: Placement
    dst: Placement
    sent: float

    @property
    def adjoint(self) -> tuple[Placement, Placement]:
        """The placements between which the gradient moves in the backward pass."""
        return self.dst.dual, self.src.dual


def what(src: Placement, dst: Placement) -> str:
    """What is done to bring a tensor from `src` to `dst`, by ranks that are several."""
    return _kind(src, dst)[0]


@lru_cache(maxsize=4096)  # asked of every flat exchange
def price(src: Placement, dst: Placement, numel: int, n: int) -> Move:
    """The move from `src` to `dst` of a tensor of `numel` elements (all of it) over `n` ranks.

    `sent` is exact wherever the blocks are even. On an axis of one rank all placements hold the
    same numbers: the move is `keep`. Raises ValueError where there is no such move (R -> I would
    declare differing uses to be alike; R -> P and I -> P would count the value n times).
    """
    done, times, split = _kind(src, dst)
    if n == 1:
        return Move("keep", src, dst, 0.0)
    return Move(done, src, dst, times * numel * (n - 1) / (n * n if split else n))


def counts_price(in_counts: Sequence[int], rank: int) -> int:
    """What `rank` sends in an all-to-all with counts: all but what stays, in units of the counts.

    The backward sends the other ranks' counts for `rank` back, which is what it received.
    """
    return sum(in_counts) - in_counts[rank]


def _kind(src: Placement, dst: Placement) -> tuple[str, int, bool]:
    """What is done, how many times over, and whether only one's own block is sent."""
    if src.kind == dst.kind == "S":
        return ("keep", 0, False) if src == dst else ("all_to_all", 1, True)
    if (src.kind, dst.kind) not in _MOVES:
        raise ValueError(f"there is no move from {src} to {dst}")
    return *_MOVES[src.kind, dst.kind], False
