"""Coordinates on a mesh."""

from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.mesh import AXES, Mesh

SIZES = st.dictionaries(st.sampled_from(AXES), st.integers(1, 4), max_size=4)
MESHES = SIZES.map(lambda sizes: Mesh(tuple(sizes.items())))


def test_figure():
    """The lines drawn in the module's figure are the lines of that mesh."""
    mesh = Mesh.parse("pp2 dp2 tp2")
    assert mesh.line("dp", 1) == (1, 3)
    assert mesh.line("tp", 4) == (4, 5)
    assert mesh.line("pp", 6) == (2, 6)
    assert mesh.lines("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.coordinate(6) == {"pp": 1, "dp": 1, "tp": 0}


@given(MESHES)
def test_text_round_trips(mesh: Mesh):
    """A mesh is what its text says."""
    assert Mesh.parse(str(mesh)) == mesh
    assert mesh.size == len({tuple(mesh.coordinate(r).items()) for r in range(mesh.size)})


@given(SIZES, st.randoms())
def test_order_is_fixed(sizes: dict[str, int], random):
    """Axes given in any order are kept outermost first: equal meshes are equal values."""
    axes = list(sizes.items())
    random.shuffle(axes)
    assert Mesh(tuple(axes)) == Mesh(tuple(sizes.items()))
    assert [name for name, _ in Mesh(tuple(axes)).axes] == [n for n in AXES if n in sizes]


@given(MESHES)
def test_coordinates_invert(mesh: Mesh):
    """Ranks and coordinates are one to one."""
    for rank in range(mesh.size):
        assert mesh.rank_at(mesh.coordinate(rank)) == rank


@given(MESHES, st.sampled_from(AXES))
def test_lines_cover_once(mesh: Mesh, name: str):
    """The lines of an axis have its size and hold each rank once, at its own rank on the axis."""
    lines = mesh.lines(name)
    assert {len(line) for line in lines} == {mesh.size_of(name)}
    assert sorted(rank for line in lines for rank in line) == list(range(mesh.size))
    for line in lines:
        assert [mesh.coordinate(rank).get(name, 0) for rank in line] == list(range(len(line)))
        assert all(mesh.line(name, rank) == line for rank in line)


def test_innermost_axis_is_contiguous():
    """Neighbours along the last axis are neighbours in rank, so they share a machine."""
    assert Mesh.parse("dp2 tp4").lines("tp") == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_an_absent_axis_is_of_size_one():
    """Asking for an axis that is not there gives each rank alone, and no error."""
    mesh = Mesh.parse("dp2")
    assert mesh.size_of("tp") == 1
    assert mesh.lines("tp") == [(0,), (1,)]
    assert Mesh().size == 1
    assert Mesh().coordinate(0) == {}
