import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.checkpoint.load import load
from shardwise.checkpoint.lock import SAVING_LOCK
from shardwise.checkpoint.save import save
from shardwise.checkpoint.save_plans import BoxSavePlanner, split_block
from shardwise.comm.start.launch import spawn
from shardwise.comm.world import World, alone, init
from shardwise.core.errors import RunError
from shardwise.engine.state.box import Box
from tests.checkpoint.cuts import CUTS, boxes_of, emptied, sample, save_by_all

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)
SHAPES = st.lists(st.integers(0, 7), max_size=4)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=3)


GIVEN = given(
    described=TENSORS,
    before=st.tuples(st.sampled_from(sorted(CUTS)), st.integers(1, 6)),
    after=st.tuples(st.sampled_from(sorted(CUTS)), st.integers(1, 6)),
    piece_bytes=st.sampled_from([1, 24, 2**20]),
)


def fills(described: list, before: tuple[str, int], after: tuple[str, int], piece_bytes: int):
    """Save tensors by n ranks, and fill the boxes of m ranks exactly."""
    tensors = {f"t{i}": sample(shape, dtype, i) for i, (shape, dtype) in enumerate(described)}
    if before[0] == "hybrid":
        before = ("hybrid", 2 * before[1])
    with tempfile.TemporaryDirectory() as folder:
        held = [boxes_of(tensors, before[0], rank, before[1]) for rank in range(before[1])]
        save_by_all(Path(folder), held, {"step": 3}, piece_bytes)
        for rank in range(after[1]):
            expected = boxes_of(tensors, after[0], rank, after[1])
            got = emptied(boxes_of(tensors, after[0], rank, after[1]))
            assert load(Path(folder), got, alone()) == {"step": 3}
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("examples", [12, pytest.param(60, marks=pytest.mark.full)])
def test_boxes_cut_in_any_way_load_into_boxes_cut_in_any_other(examples: int):
    """Tensors of any shape and dtype, saved by n ranks, fill the boxes of m ranks exactly."""
    settings(max_examples=examples, deadline=None)(GIVEN(fills))()


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), max_size=4), limit=st.integers(1, 50))
def test_pieces_are_small_and_cover_their_box_once(sizes: list[int], limit: int):
    """A box is cut into pieces within the limit that hold each of its elements once."""
    count = torch.zeros(sizes, dtype=torch.int64)
    for offsets, lengths in split_block((0,) * len(sizes), tuple(sizes), limit):
        assert math.prod(lengths) <= limit
        count[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] += 1
    assert count.eq(1).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_are_written_once_and_by_all(tmp_path: Path, ranks: int):
    """Of tensors that every rank holds each is written by one, and each rank writes its share."""
    tensors = {f"layer{i}": sample((64, 64), torch.float32, i) for i in range(8)}
    held = [boxes_of(tensors, "copies", rank, ranks) for rank in range(ranks)]
    written = save_by_all(tmp_path, held, {"step": 1})
    assert written == [8 // ranks] * ranks
    files = sum(path.stat().st_size for path in (tmp_path / "step-000001").glob("*.distcp"))
    assert 8 * 64 * 64 * 4 <= files < 1.5 * 8 * 64 * 64 * 4


def test_a_copy_goes_to_a_rank_that_has_little_else_to_write(tmp_path: Path):
    """A rank with a large box of its own leaves the copies to the others."""
    large, copied = sample((100, 100), torch.float32), sample((10,), torch.float32)
    held = [boxes_of({"copied": copied}, "copies", rank, 2) for rank in range(2)]
    held[0] += boxes_of({"large": large}, "copies", 0, 1)
    assert save_by_all(tmp_path, held, {"step": 1}) == [1, 1]


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 0), (2, 3))], r"'w': boxes hold 6 elements of \(4, 3\) float32"),
        ([((0, 0), (3, 3)), ((2, 0), (1, 3))], r"'w': two boxes hold the element at \(2, 0\)"),
        ([((0, 0), (4, 2)), ((1, 1), (1, 2)), ((0, 2), (2, 1))], "two boxes hold"),
    ],
)
def test_boxes_that_do_not_make_up_their_tensor_are_not_saved(
    tmp_path: Path, boxes: list, message: str
):
    """A tensor with an element that no box holds, or that two hold, is not published."""
    held = [Box("w", (4, 3), offsets, sizes, torch.ones(sizes)) for offsets, sizes in boxes]
    with pytest.raises(RunError, match=message):
        save(tmp_path, held, {"step": 1}, alone())
    assert not list(tmp_path.glob("step*"))


def test_ranks_that_disagree_on_a_tensor_are_told():
    """Boxes of one name with different dtypes are an error that names both."""
    plans = []
    for dtype in (torch.float32, torch.bfloat16):
        planner = BoxSavePlanner([Box("w", (2,), (0,), (2,), torch.ones(2, dtype=dtype))])
        plans.append(planner.create_local_plan())
    with pytest.raises(ValueError, match=r"disagree on 'w': \(2,\) float32 and \(2,\) bfloat16"):
        BoxSavePlanner([]).create_global_plan(plans)


def state() -> dict[str, Tensor]:
    return {
        "model/a": sample((7, 5), torch.float32, 1),
        "model/b": sample((11,), torch.bfloat16, 2),
        "optim/step/a": sample((), torch.float64, 3),
        "buffer/c": sample((3, 2, 2), torch.float16, 4),
    }


def check(folder: Path, cut_name: str, world: World) -> dict:
    expected = boxes_of(state(), cut_name, world.rank, world.size)
    got = emptied(boxes_of(state(), cut_name, world.rank, world.size))
    scalars = load(folder, got, world)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(expected, got, strict=True))
    return scalars


def save_with_all(folder: Path) -> list[str]:
    world = init()
    save(folder, boxes_of(state(), "flat", world.rank, world.size), {"step": 5, "x": 0.5}, world)
    # rank 0 may still hold its lock
    return sorted(path.name for path in folder.iterdir() if path.name != SAVING_LOCK)


def load_and_save_copies(folder: Path) -> dict:
    world = init()
    scalars = check(folder, "dim", world)
    save(folder, boxes_of(state(), "copies", world.rank, world.size), {"step": 6}, world)
    return scalars


@pytest.mark.full
def test_four_processes_save_two_load_and_save_and_one_loads(tmp_path: Path):
    """Shards of four real processes load as blocks in two, whose copies load whole in one."""
    assert spawn(save_with_all, 4, (tmp_path,)) == [["latest", "step-000005"]] * 4
    assert check(tmp_path, "copies", alone()) == {"step": 5, "x": 0.5}
    assert spawn(load_and_save_copies, 2, (tmp_path,)) == [{"step": 5, "x": 0.5}] * 2
    assert check(tmp_path, "flat", alone()) == {"step": 6}
