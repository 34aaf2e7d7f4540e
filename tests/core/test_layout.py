"""Placements and their duals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.layouts.layout import I, P, Placement, R, S

PLACEMENTS = st.one_of(st.sampled_from([R, I, P]), st.integers(0, 4).map(S))


@pytest.mark.parametrize(
    ("placement", "dual"), [(R, P), (I, I), (S(0), S(0)), (S(2), S(2)), (P, R)], ids=str
)
def test_dual(placement: Placement, dual: Placement):
    """The gradient arrives where the table of placements says."""
    assert placement.dual == dual


@given(PLACEMENTS)
def test_dual_is_its_own_inverse(placement: Placement):
    """The dual of the dual is the placement, and its text is the placement."""
    assert placement.dual.dual == placement
    assert Placement.parse(str(placement)) == placement
