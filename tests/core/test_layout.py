"""Placements and their duals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import InputError
from shardwise.core.layout import I, P, Placement, R, S

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


@pytest.mark.parametrize("text", ["", "X", "S", "S-1", "r"])
def test_bad_text(text: str):
    """A placement that cannot be is refused with one that can."""
    with pytest.raises(InputError, match="Write instead: "):
        Placement.parse(text)


@pytest.mark.parametrize(("kind", "dim"), [("S", None), ("R", 0), ("S", -1)])
def test_bad_placement(kind, dim):
    """Only a shard has a dim, from 0 up."""
    with pytest.raises(InputError, match="S with one from 0 up"):
        Placement(kind, dim)
