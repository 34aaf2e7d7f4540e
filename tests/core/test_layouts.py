"""Where tensors lie: placements and their moves, meshes, boxes, flat tensors, and parameters."""

import itertools
import math
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import InputError, Problem, bad, refusal
from shardwise.core.layouts.flatten import ALIGN_BYTES, Box1, boxes, flatten
from shardwise.core.layouts.layout import P, R, S, price
from shardwise.core.layouts.uneven import Lengths, balanced
from shardwise.core.mesh import AXES, Mesh
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import ALIASES, ROWS, Moment, Row, bytes_per_parameter

# --- placements and moves -------------------------------------------------------------------------


@given(st.integers(2, 64), st.integers(0, 10**9))
def test_ring_bound(n: int, block: int):
    """A reduction to all costs a reduction and a gather; of even blocks in whole numbers."""
    numel = n * n * block
    gather = price(S(0), R, numel, n).sent
    assert gather == (n - 1) * n * block
    assert price(P, S(0), numel, n).sent == gather
    assert price(P, R, numel, n).sent == 2 * gather
    assert price(S(0), S(1), numel, n).sent * n == gather


# --- meshes ---------------------------------------------------------------------------------------

SIZES = st.dictionaries(st.sampled_from(AXES), st.integers(1, 4), max_size=4)


def test_the_figure_of_a_mesh():
    """The lines drawn in the module's figure are the lines of that mesh; an absent axis has one."""
    mesh = Mesh.parse("pp2 dp2 tp2")
    assert (mesh.line("dp", 1), mesh.line("tp", 4), mesh.line("pp", 6)) == ((1, 3), (4, 5), (2, 6))
    assert mesh.lines("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.coordinate(6) == {"pp": 1, "dp": 1, "tp": 0}
    assert Mesh.parse("dp2 tp4").lines("tp") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert Mesh.parse("dp2").size_of("tp") == 1
    assert Mesh.parse("dp2").lines("tp") == [(0,), (1,)]


@given(SIZES, st.randoms())
def test_a_mesh_is_a_value(sizes: dict[str, int], random: Any):
    """Its text says it, axes in any order are kept outermost first, coordinates are one to one."""
    axes = list(sizes.items())
    random.shuffle(axes)
    mesh = Mesh(tuple(axes))
    assert mesh == Mesh(tuple(sizes.items())) == Mesh.parse(str(mesh))
    assert [name for name, _ in mesh.axes] == [n for n in AXES if n in sizes]
    assert mesh.size == math.prod(sizes.values())
    assert all(mesh.rank_at(mesh.coordinate(rank)) == rank for rank in range(mesh.size))


@given(SIZES, st.sampled_from(AXES))
def test_lines_cover_once(sizes: dict[str, int], name: str):
    """The lines of an axis have its size and hold each rank once, at its own rank on the axis."""
    mesh = Mesh(tuple(sizes.items()))
    lines = mesh.lines(name)
    assert {len(line) for line in lines} == {mesh.size_of(name)}
    assert sorted(rank for line in lines for rank in line) == list(range(mesh.size))
    for line in lines:
        assert [mesh.coordinate(rank).get(name, 0) for rank in line] == list(range(len(line)))
        assert all(mesh.line(name, rank) == line for rank in line)


# --- boxes, flat tensors, lengths -----------------------------------------------------------------


def flat_indices(shape: tuple[int, ...], box: Box1) -> list[int]:
    """The flat index of every element of a box, by walking it, in row-major order."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    ranges = [range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)]
    return [
        sum(i * stride for i, stride in zip(index, strides, strict=True))
        for index in itertools.product(*ranges)
    ]


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.data())
def test_boxes_cover_an_interval_once(shape: tuple[int, ...], data: st.DataObject):
    """In their order; each is one run of memory inside the tensor; 2 d - 1 at most."""
    ends = st.integers(0, math.prod(shape))
    start, stop = sorted((data.draw(ends), data.draw(ends)))
    found = boxes(shape, start, stop)
    walked = [index for box in found for index in flat_indices(shape, box)]
    assert walked == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    for box in found:
        assert flat_indices(shape, box) == list(range(box.start, box.start + box.numel))
        for offset, size, dim in zip(box.offsets, box.sizes, shape, strict=True):
            assert 0 <= offset < offset + size <= dim


def test_the_figure_of_boxes():
    """The figure in the module is what the function gives; a whole tensor is one box."""
    assert boxes((4, 5), 3, 17) == [
        Box1(offsets=(0, 3), sizes=(1, 2), start=3),
        Box1(offsets=(1, 0), sizes=(2, 5), start=5),
        Box1(offsets=(3, 0), sizes=(1, 2), start=15),
    ]
    assert boxes((2, 3, 4), 0, 24) == [Box1((0, 0, 0), (2, 3, 4), 0)]
    assert (boxes((), 0, 1), boxes((3, 0), 0, 0)) == ([Box1((), (), 0)], [])
    with pytest.raises(ValueError, match="is not inside the 6 elements"):
        boxes((2, 3), 0, 7)


@pytest.mark.parametrize(("element_bytes", "ranks"), [(2, 1), (4, 2), (8, 3)])
def test_flat_parameters_and_shares_are_aligned(element_bytes: int, ranks: int):
    """Each begins at the next multiple of 64 bytes behind the one before."""
    flat = flatten([5, 64, 1, 33], element_bytes, ranks)
    starts = [*flat.offsets, *(rank * flat.share for rank in range(ranks + 1))]
    assert all(start * element_bytes % ALIGN_BYTES == 0 for start in starts)
    ends = [offset + numel for offset, numel in zip(flat.offsets, flat.numels, strict=True)]
    gaps = [(b - a) * element_bytes for a, b in zip(ends, [*starts[1:4], flat.padded], strict=True)]
    assert all(0 <= gap < ALIGN_BYTES for gap in gaps[:-1])
    assert 0 <= gaps[-1] < ALIGN_BYTES * ranks


@given(ranks=st.integers(2, 5), lengths=st.lists(st.integers(1, 30)))
def test_the_size_of_a_shard_tells_the_length(ranks: int, lengths: list[int]):
    """Whatever is met with it: shards hold all of it, and its size stays while the pass goes on."""
    known = Lengths(ranks)
    sizes = {whole: known.shard(whole) for whole in lengths}
    assert all(size * ranks >= whole for whole, size in sizes.items())
    assert {known.full(size): size for size in sizes.values()} == sizes
    assert all(known.shard(whole) == size for whole, size in sizes.items())


# --- the states table of ZeRO, and small parts of the core ----------------------------------------

#: arXiv 1910.02054, table 1: GB a device for 7.5 B, 128 B and 1 T parameters by number of ranks,
#: in the paper's stages P_os (zero1), P_os+g (zero2), P_os+g+p (zero3).
TABLE_1 = {
    1: [(120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)],
    4: [(52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)],
    16: [(35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)],
    64: [(31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)],
    256: [(30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)],
    1024: [(30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)],
}
PARAMETERS = (7.5e9, 128e9, 1e12)
STAGES = ("zero1", "zero2", "zero3")


@pytest.mark.parametrize("n", TABLE_1)
def test_zero_table_1(n: int):
    """Bytes a device are the paper's, to its last digit (it rounds some and truncates some)."""
    for numel, row in zip(PARAMETERS, TABLE_1[n], strict=True):
        for stage, printed in zip(STAGES, row, strict=True):
            digits = str(float(printed)).removesuffix(".0").partition(".")[2]
            ours = numel * bytes_per_parameter(ROWS[stage], n) / 1e9
            assert abs(ours - printed) < 10.0 ** -len(digits), stage


def test_the_word_of_a_row():
    """A row prints as its name, or written out; the plan that names it has that text too."""
    assert ALIASES == {"fsdp": "zero3"}
    assert [str(row) for row in ROWS.values()] == list(ROWS)
    invented = Row(param=R, grad=R, optim=S(0))
    assert str(invented) == "row:R,R,S"
    assert str(Plan.parse("dp2 row:R,P,S")) == "dp2 zero1"
    assert Plan.parse(f"dp2 {invented}").row == "row:R,R,S"
    assert Plan.parse("dp2 row:R,R,S").shard_axis == "dp"
    assert Plan.parse("dp2 row:R,R,R").replicate_axis == "dp"


#: The copies between tiers that states at rest elsewhere add to a row.
COPIES = {
    ("device", "host"): [
        (Moment.BEFORE_UPDATE, "grad", "device", "host"),
        (Moment.AFTER_UPDATE, "param", "host", "device"),
    ],
    ("host", "host"): [
        (Moment.USE, "param", "host", "device"),
        (Moment.BEFORE_UPDATE, "grad", "device", "host"),
    ],
    ("disk", "disk"): [
        (Moment.USE, "param", "disk", "host"),
        (Moment.USE, "param", "host", "device"),
        (Moment.BEFORE_UPDATE, "grad", "device", "host"),
        (Moment.BEFORE_UPDATE, "grad", "host", "disk"),
        (Moment.UPDATE, "grad", "disk", "host"),
        (Moment.UPDATE, "optim", "disk", "host"),
        (Moment.AFTER_UPDATE, "optim", "host", "disk"),
        (Moment.AFTER_UPDATE, "param", "host", "disk"),
    ],
}


@pytest.mark.parametrize(("param", "optim"), COPIES)
@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_tiers(param: str, optim: str, name: str):
    """Parameters off the device are copied before each use; a disk is reached through the host."""
    row = ROWS[name]
    moves = replace(row, param_tier=param, optim_tier=optim).moves()
    copies = [move for move in moves if move.between_tiers]
    found = [(move.moment, move.state, move.src_tier, move.dst_tier) for move in copies]
    assert found == COPIES[param, optim]
    assert [move for move in moves if move not in copies] == list(row.moves())
    assert {move.src_tier for move in row.moves()} == {"device"}


def test_the_text_of_an_error():
    """What was given, what is allowed, what to write, in one line; several are numbered."""
    error = bad("a\nb\x1b[0m.", "sizes from 1 up ", "dp2")
    assert isinstance(error, InputError)
    assert str(error) == "Given: a\\nb\\x1b[0m. Allowed: sizes from 1 up. Write instead: dp2."
    first, second = Problem("a", "b", "c"), Problem("d", "e", "f")
    assert str(refusal("it", [first])) == str(bad("a", "b", "c"))
    assert str(refusal("it", [first, second])).splitlines() == [
        "2 things are wrong with it.",
        f"1. {first}",
        f"2. {second}",
    ]


def heaviest(weights: list[int], cuts: tuple[int, ...]) -> int:
    return max(sum(weights[a:b]) for a, b in pairwise((0, *cuts, len(weights))))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_the_heaviest_part_is_as_light_as_any_cut_makes_it(weights: list[int], data: Any):
    """Against all cuts; of those that are as good, the first in the order of their places."""
    parts = data.draw(st.integers(1, len(weights)))
    every = list(combinations(range(1, len(weights)), parts - 1))
    best = min(heaviest(weights, cuts) for cuts in every)
    assert balanced(weights, parts) == min(c for c in every if heaviest(weights, c) == best)
    assert balanced((0.1,) * 3, 3) == (1, 2)  # fractions, of which sums are rounded
