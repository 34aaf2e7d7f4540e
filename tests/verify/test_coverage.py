"""Coverage: pieces that make up a tensor once in every replica, and those that do not."""

import pytest

from shardwise.core.plan import Plan
from shardwise.verify.coverage import uncovered
from shardwise.verify.finding import Piece

#: Ranks' pieces of a tensor of shape [4, 3]: first row, rows, replica.
Rows = tuple[int, int, int]


def problem(plan: str, *by_rank: list[Rows]) -> str:
    shown = [
        [
            Piece("model/w", (4, 3), (first, 0), (rows, 3), replica)
            for first, rows, replica in pieces
        ]
        for pieces in by_rank
    ]
    return uncovered(Plan.parse(plan), {"model/w": (4, 3)}, shown)


WHOLE = {
    "dp2": ([(0, 4, 0)], [(0, 4, 1)]),
    "dp2 zero3": ([(0, 3, 0)], [(3, 1, 0)]),
    "dp4 zero1": ([(0, 4, 0)], [], [], []),
    "dp2 zero1": ([(0, 4, 0)], [(0, 4, 1)]),
    "dp_replicate2 dp_shard2 zero3": ([(0, 2, 0)], [(2, 2, 0)], [(0, 2, 1)], [(2, 2, 1)]),
    "tp2": ([(0, 1, 0), (1, 1, 0)], [(2, 2, 0)]),
    "tp2 sp": ([(0, 4, 0)], [(0, 4, 1)]),
    "pp2 1f1b:2": ([(0, 4, 0)], []),
    "pp2 2bw:2": ([(0, 4, 0)], [(0, 4, 1)]),
}


@pytest.mark.parametrize("plan", WHOLE)
def test_what_is_whole_is_let_pass(plan: str):
    """One replica in pieces, several replicas, padding alone, frozen, a stage's own, a tie."""
    assert problem(plan, *WHOLE[plan]) == ""


LACKING: list[tuple[str, tuple[list[Rows], ...], str]] = [
    ("dp2", ([(0, 4, 0)], []), "data replica [1,"),
    ("dp2 zero3", ([(0, 3, 0)], []), "3 elements are compared by no rank"),
    ("dp2 zero3", ([(0, 3, 0)], [(2, 2, 0)]), "3 more than once in replica 0"),
    ("dp2 zero3", ([(0, 4, 0), (0, 4, 1)], []), "12 more than once on the ranks of"),
    ("tp2", ([(0, 4, 0)], []), "tensor rank 0 compares all of it, and tensor rank 1 does not"),
    ("dp2", ([(0, 4, 1)], [(0, 4, 1)]), "12 elements are compared by no rank"),
    ("dp2 zero1", ([(0, 5, 0)], []), "has [4, 3]"),
]


@pytest.mark.parametrize(("plan", "pieces", "said"), LACKING)
def test_what_lacks_or_doubles_anything_is_named(
    plan: str, pieces: tuple[list[Rows], ...], said: str
):
    """A rank that shows nothing, a gap, an overlap, a piece beyond the end."""
    found = problem(plan, *pieces)
    assert found.startswith("model/w: ") and said in found
