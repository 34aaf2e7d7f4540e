"""Placements: how the ranks of one axis hold a tensor.

On one axis of n ranks a tensor is in one of four placements:

    R     replicate   every rank holds it and uses it differently          gradient arrives as P
    I     invariant   every rank holds it and does the same with it        gradient arrives as I
    S(d)  shard       rank r holds the r-th block of dimension d           gradient arrives as S(d)
    P     partial     the value is the sum of what the ranks hold          gradient arrives as R

The last column is the *dual*, and it is the whole of distributed backpropagation: the backward of
moving a tensor `src -> dst` is moving its gradient `dst.dual -> src.dual`.

R and I hold the same numbers and differ in their use. A replicated weight meets different data on
each rank, so its gradients differ and must be summed (P). An invariant value is used in the same
way on all ranks, so its gradient is already complete (I). These are the placements of sharding in
JAX types ("varying" and "invariant") and of meta-pytorch/spmd_types.
"""

import re
from dataclasses import dataclass
from functools import cache
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
        """The placement printed as `text`. Raises InputError."""
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
    """Sharded by blocks of `dim`, the r-th on rank r."""
    return Placement("S", dim)
