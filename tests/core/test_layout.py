"""Placements, duals and layouts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import InputError
from shardwise.core.layout import I, Layout, P, Placement, R, S
from shardwise.core.mesh import AXES, Mesh

PLACEMENTS = st.one_of(st.sampled_from([R, I, P]), st.integers(0, 4).map(S))
LAYOUTS = st.dictionaries(st.sampled_from(AXES), PLACEMENTS).map(
    lambda placements: Layout(tuple(placements.items()))
)


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


@given(LAYOUTS)
def test_text_round_trips(layout: Layout):
    """A layout is what its text says, and so is its dual."""
    assert Layout.parse(str(layout)) == layout
    assert layout.dual.dual == layout


@given(LAYOUTS, st.sampled_from(AXES), PLACEMENTS)
def test_moved_changes_one_axis(layout: Layout, axis: str, dst: Placement):
    """Moving on one axis leaves the others, in their order."""
    moved = layout.moved(axis, dst)
    assert moved.on(axis) == dst
    assert [p for p in moved.placements if p[0] != axis] == [
        p for p in layout.placements if p[0] != axis
    ]


def test_share():
    """What a rank stores is divided by every axis that shards, and by no other."""
    layout = Layout.parse("dp=S0 tp=S1 cp=R")
    assert str(layout) == "dp=S0 tp=S1 cp=R"
    assert layout.share(Mesh.parse("dp4 tp2 cp2")) == 1 / 8
    assert layout.share(Mesh.parse("cp2")) == 1
    assert layout.on("pp") == I


@pytest.mark.parametrize("text", ["dp", "dp=", "dp=X", "dp=S", "dp=S-1", "=R", "dp=R dp=P"])
def test_bad_text(text: str):
    """A layout that cannot be is refused with a line that can."""
    with pytest.raises(InputError, match="Write instead: "):
        Layout.parse(text)


@pytest.mark.parametrize(("kind", "dim"), [("S", None), ("R", 0), ("S", -1)])
def test_bad_placement(kind, dim):
    """Only a shard has a dim, from 0 up."""
    with pytest.raises(ValueError, match="S has a dim from 0 up, others none"):
        Placement(kind, dim)
