"""Placements: how the ranks of one axis hold a tensor, and the price of moving it between them.

On one axis of n ranks a tensor is in one of four placements:

    R     replicate   every rank holds it and uses it differently          gradient arrives as P
    I     invariant   every rank holds it and does the same with it        gradient arrives as I
    S(d)  shard       rank r holds the r-th block of dimension d           gradient arrives as S(d)
    P     partial     the value is the sum of what the ranks hold          gradient arrives as R

The last column is the *dual*, and it is the whole of distributed backpropagation: the backward of
moving a tensor `src -> dst` is moving its gradient `dst.dual -> src.dual`.

R and I hold the same numbers and differ in their use.  A replicated weight meets different data on
each rank, so its gradients differ and must be summed (P).  An invariant value is used in the same
way on all ranks, so its gradient is already complete (I).  These are the placements of sharding in
JAX types ("varying" and "invariant") and of meta-pytorch/spmd_types.

The price of a move is the least that any algorithm sends over equal links (the ring bound).  For a
tensor of N elements on n ranks, each rank sends

    all_reduce       2 N (n-1)/n        a reduce_scatter, then an all_gather
    reduce_scatter     N (n-1)/n        every block except the rank's own is sent once
    all_gather         N (n-1)/n
    all_to_all         N (n-1)/n^2      all of its block of N/n except 1/n of it;
                                        with counts: all counts except the rank's own
    take_block, pad_block, keep    0    local operations

(Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
2005; Chan et al., "Collective communication: theory, practice, and experience", 2007.)
"""

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from shardwise.core.errors import bad

Kind = Literal["R", "I", "S", "P"]
_KINDS: dict[str, Kind] = {"R": "R", "I": "I", "P": "P"}


@dataclass(frozen=True)
class Placement:
    """How one axis holds a tensor. Write `R`, `I`, `P` or `S(dim)`; prints as R, I, P, S0."""

    kind: Kind
    dim: int | None = None

    def __post_init__(self) -> None:
        kind: object = self.kind
        right = type(self.dim) is int and self.dim >= 0 if kind == "S" else self.dim is None
        if kind not in ("S", *_KINDS) or not right:
            given = f"the placement {kind} with dim {self.dim!r}"
            raise bad(given, "R, I and P without a dim, and S with one from 0 up", "S(0)")

    @classmethod
    def parse(cls, text: str) -> "Placement":
        if text in _KINDS:
            return cls(_KINDS[text])
        if found := re.fullmatch(r"S(\d+)", text):
            return cls("S", int(found[1]))
        raise bad(f"the placement '{text}'", "R, I, P, or S and the number of a dim", "S0")

    def __str__(self) -> str:
        return self.kind if self.dim is None else f"S{self.dim}"

    @property
    def dual(self) -> "Placement":
        """The placement in which the gradient of such a tensor arrives; its own inverse."""
        return {"R": P, "P": R}.get(self.kind, self)

    def share(self, n: int) -> float:
        """The fraction of the tensor that each of n ranks stores, padding apart."""
        return 1 / n if self.kind == "S" else 1.0


R, I, P = Placement("R"), Placement("I"), Placement("P")


@cache  # made anew for each exchange
def S(dim: int) -> Placement:  # noqa: N802 - the letter of the table above
    return Placement("S", dim)


# --- moves and their prices -----------------------------------------------------------------------

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
    """Whether ranks that each have `nbytes` of numbers gather all of them to sum them."""
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
        return self.dst.dual, self.src.dual


def what(src: Placement, dst: Placement) -> str:
    return _kind(src, dst)[0]


@lru_cache(maxsize=4096)  # called for every exchange of a flat tensor
def price(src: Placement, dst: Placement, numel: int, n: int) -> Move:
    """The move from `src` to `dst` of a tensor of `numel` elements in total on `n` ranks.
    `sent` is exact for blocks of equal size.  Raises ValueError for an impossible move: R -> I
    would claim that different uses are the same; R -> P and I -> P would count the value n times.
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
