from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.balance import balanced


def heaviest(weights: list[int], cuts: tuple[int, ...]) -> int:
    return max(sum(weights[a:b]) for a, b in pairwise((0, *cuts, len(weights))))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_the_heaviest_part_is_as_light_as_any_cut_makes_it(weights, data):
    """Against all cuts; of those that are as good, the first in the order of their places."""
    parts = data.draw(st.integers(1, len(weights)))
    every = list(combinations(range(1, len(weights)), parts - 1))
    best = min(heaviest(weights, cuts) for cuts in every)
    assert balanced(weights, parts) == min(c for c in every if heaviest(weights, c) == best)


@pytest.mark.parametrize(
    ("weights", "cuts"),
    [((5, 1, 1, 1, 1, 5), (1, 5)), ((1, 1, 1, 1), (1, 2)), ((0.1,) * 3, (1, 2))],
)
def test_three_parts(weights, cuts):
    """The figure of the file; equal weights; fractions, of which sums are rounded."""
    assert balanced(weights, 3) == cuts
