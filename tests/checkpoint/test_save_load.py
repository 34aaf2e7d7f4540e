"""`sw.save` and `sw.load`: what is saved goes on under any plan, and in any loop."""

import math
import os
import random
import signal
import tempfile
from collections import Counter, OrderedDict, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shardwise as sw
from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.folder import find, prune
from shardwise.checkpoint.load import load
from shardwise.checkpoint.open_checkpoint import describe
from shardwise.checkpoint.save import save
from shardwise.checkpoint.save_plans import BoxSavePlanner
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError, RunError
from shardwise.engine.state.box import Box
from tests.checkpoint.support import (
    ADAM,
    Own,
    Sum,
    boxes_of,
    engine_of,
    names,
    rows,
    sample,
    save_by_all,
    steps,
)
from tests.pool import run_gloo

# --- boxes --------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)
SHAPES = st.lists(st.integers(0, 7), max_size=4)
CUT = st.tuples(st.sampled_from(["flat", "dim", "copies", "hybrid"]), st.integers(1, 6))


@settings(max_examples=20, deadline=None)
@given(
    described=st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=3),
    before=CUT,
    after=CUT,
    piece_bytes=st.sampled_from([1, 24, 2**20]),
)
def test_boxes_cut_in_any_way_load_into_boxes_cut_in_any_other(
    described: list[Any], before: tuple[str, int], after: tuple[str, int], piece_bytes: int
):
    """Tensors of any shape and dtype, saved by n ranks, fill the boxes of m ranks exactly."""
    tensors = {f"t{i}": sample(shape, dtype, i) for i, (shape, dtype) in enumerate(described)}
    if before[0] == "hybrid":
        before = ("hybrid", 2 * before[1])
    with tempfile.TemporaryDirectory() as folder:
        held = [boxes_of(tensors, before[0], rank, before[1]) for rank in range(before[1])]
        save_by_all(Path(folder), held, {"step": 3}, piece_bytes)
        for rank in range(after[1]):
            expected, got = (boxes_of(tensors, after[0], rank, after[1]) for _ in range(2))
            for box in got:
                box.tensor.fill_(7)
            assert load(Path(folder), got, alone()) == {"step": 3}
            assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(expected, got, strict=True))


def test_copies_are_written_once_by_those_with_little_else(tmp_path: Path):
    """Each rank writes its share; one with a large box of its own leaves them to the others."""
    tensors = {f"layer{i}": sample((64, 64), torch.float32, i) for i in range(8)}
    held = [boxes_of(tensors, "copies", rank, 4) for rank in range(4)]
    assert save_by_all(tmp_path, held, {"step": 1}) == [2] * 4
    written = sum(path.stat().st_size for path in (tmp_path / "step-000001").glob("*.distcp"))
    assert 8 * 64 * 64 * 4 <= written < 1.5 * 8 * 64 * 64 * 4
    copied = {"copied": sample((10,), torch.float32)}
    held = [boxes_of(copied, "copies", rank, 2) for rank in range(2)]
    held[0] += boxes_of({"large": sample((100, 100), torch.float32)}, "copies", 0, 1)
    assert save_by_all(tmp_path, held, {"step": 2}) == [1, 1]


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 0), (2, 3))], r"'w': boxes hold 6 elements of \(4, 3\) float32"),
        ([((0, 0), (3, 3)), ((2, 0), (1, 3))], r"'w': two boxes hold the element at \(2, 0\)"),
        ([((0, 0), (4, 2)), ((1, 1), (1, 2)), ((0, 2), (2, 1))], "two boxes hold"),
    ],
)
def test_boxes_that_do_not_make_up_their_tensor_are_not_saved(
    tmp_path: Path, boxes: list[Any], message: str
):
    """An element that no box holds, or that two hold; ranks that disagree on a tensor."""
    held = [Box("w", (4, 3), offsets, sizes, torch.ones(sizes)) for offsets, sizes in boxes]
    with pytest.raises(RunError, match=message):
        save(tmp_path, held, {"step": 1}, alone())
    assert not list(tmp_path.glob("step*"))
    dtypes = torch.float32, torch.bfloat16
    each = [Box("w", (2,), (0,), (2,), torch.ones(2, dtype=dtype)) for dtype in dtypes]
    plans = [BoxSavePlanner([box]).create_local_plan() for box in each]
    with pytest.raises(ValueError, match=r"disagree on 'w': \(2,\) float32 and \(2,\) bfloat16"):
        BoxSavePlanner([]).create_global_plan(plans)


# --- the folder ---------------------------------------------------------------------------------


def saved(folder: Path, step: int, **scalars: Any) -> Path:
    return save(
        folder, [Box.full("w", torch.full((4,), 1.0 * step))], {"step": step, **scalars}, alone()
    )


def loaded(folder: Any) -> float:
    tensor = torch.empty(4)
    load(folder, [Box.full("w", tensor)], alone())
    return tensor[0].item()


def test_a_checkpoint_is_published_under_its_step_and_as_the_latest(tmp_path: Path):
    """Nothing else is left; a step saved again is replaced; what was saved last is found."""
    for step in (100, 200, 200, 300, 100):
        assert saved(tmp_path, step) == tmp_path / folders.name_of(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", *names(tmp_path)]
    assert names(tmp_path) == ["step-000100", "step-000200", "step-000300"]
    assert (tmp_path / "latest").read_text() == "step-000100\n"
    assert find(str(tmp_path)) == Path(describe(str(tmp_path))["path"]) == tmp_path / "step-000100"
    assert loaded(str(tmp_path)) == 100.0
    assert find(tmp_path / "step-000200") == tmp_path / "step-000200"
    wrong: Any = 3
    for use in (lambda: load(wrong, [], alone()), lambda: save(wrong, [], {"step": 1}, alone())):
        with pytest.raises(InputError, match=r"folder 3\. Allowed: text or a pathlib\.Path"):
            use()
    with pytest.raises(RunError, match=r"step 1 could not be saved in .*latest"):
        saved(tmp_path / "latest", 1)


@pytest.mark.parametrize(
    "pointer", [None, b"step-000300", b"", b"../elsewhere", b"\xff", b"x" * 5000, b"\0", "fifo"]
)
def test_without_a_good_pointer_the_newest_whole_checkpoint_is_found(
    tmp_path: Path, pointer: bytes | str | None
):
    """`latest` may be missing or wrong: then the names tell, and halves are passed over."""
    saved(tmp_path, 100)
    saved(tmp_path, 200)
    (tmp_path / "step-000300").mkdir()
    (tmp_path / "latest").unlink()
    if isinstance(pointer, bytes):
        (tmp_path / "latest").write_bytes(pointer)
    elif pointer:
        os.mkfifo(tmp_path / "latest")
    assert find(tmp_path) == tmp_path / "step-000200"


@pytest.mark.parametrize("losses", [(2.0, 1.0, 1.5, 3.0), (2.0, 1.0, None, float("inf"))])
def test_prune_keeps_the_newest_the_latest_and_the_best(
    tmp_path: Path, losses: tuple[float | None, ...]
):
    """The lowest validation loss is kept, of checkpoints that have one."""
    for step, loss in enumerate(losses, start=1):
        saved(tmp_path, step, **({} if loss is None else {"validation": loss}))
    assert folders.best_in(tmp_path) == tmp_path / "step-000002"
    removed = prune(str(tmp_path), 1, best=True)
    assert [path.name for path in removed] == ["step-000001", "step-000003"]
    assert names(tmp_path) == ["step-000002", "step-000004"]
    prune(tmp_path, 1)
    assert folders.best_in(tmp_path) is None or losses[-1] == 3.0
    saved(tmp_path, 1)  # now the latest
    prune(tmp_path, 1)
    assert names(tmp_path) == ["step-000001", "step-000004"]
    with pytest.raises(InputError, match=r"keep=0.*a whole number from 1 up"):
        prune(tmp_path, 0)


# --- engines ------------------------------------------------------------------------------------


def extra() -> dict[Any, Any]:
    """Every kind of value that a program may save along; `"/"` and keys 1 and "1" are names too."""
    numbers = [0, -(2**70), 0.1, -0.0, math.inf, math.nan, 1j, True, None, "text", b"\0\xff"]
    numbers += [np.float64(0.1), np.float16(2), np.int64(3), np.bool_(True)]
    return {
        "numbers": numbers,
        "items": [(1, (2, [])), set(), {1, "1"}, frozenset({(1, 2)}), torch.Size([2, 3])],
        "dicts": [Counter({3: 2, 1: 0}), OrderedDict({2: 1, 1: 2}), defaultdict(list, {1: [2]})],
        "tensors": {1: torch.ones(2), "1": torch.zeros(0, 3), "a/b": torch.tensor(True)},
        (1, "x"): [np.arange(6, dtype=np.uint8).reshape(2, 3).T, np.array(0.5)],
        np.int64(4): random.Random(0).getstate(),
        "torch": torch.arange(3, dtype=torch.bfloat16),
    }


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert_same([*a.items()], [*b.items()])
        assert getattr(a, "default_factory", 0) is getattr(b, "default_factory", 0)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, Tensor | np.ndarray):
        assert (a.shape, a.dtype, a.tolist()) == (b.shape, b.dtype, b.tolist())
    else:
        assert a == b if isinstance(a, set | frozenset) else repr(a) == repr(b)


OWN = sw.Optim(Own, lr=0.02, groups={"*.bias": {"lr": 0.01, "betas": (0.7, 0.2)}})


def go(
    world: World, plan: str, folder: str, optimizer: Any, steps: range, save: str
) -> tuple[dict[str, Any], Any]:
    """Steps of an engine, to a checkpoint if `save` says how, else from the folder's."""
    engine = engine_of(world, f"{plan} fp64", Sum(), optimizer, least_unit_bytes=0)
    found, pending = {} if save else sw.load(engine, folder), None
    for step in steps:
        part = rows(step).tensor_split(engine.data_ranks)[engine.data_rank]
        engine.step((part, int(step >= 3)))
        if save == "async" and step == steps[-2]:
            pending = sw.async_save(engine, folder, extra())  # the last step is beside it
    engine.wait()  # parameters are gathered, states are of pieces
    if save == "save":
        sw.save(engine, folder, extra())
    if pending is not None:
        pending.result()
    return sw.full_state_dict(engine), found


def run(plan: str, *args: Any) -> tuple[dict[str, Any], Any]:
    return run_gloo(sw.Plan.parse(plan).size, go, plan, *args)[0]


@pytest.mark.parametrize(
    ("how", "at", "optimizer", "here", "there"),
    [
        ("save", 2, OWN, "dp2 zero3", "pp2 gpipe:1"),
        ("async", 4, ADAM, "pp2 gpipe:1", "dp2 zero2"),
        ("save", 0, ADAM, "pp2 gpipe:1", "dp2 zero3"),
        ("async", 2, OWN, "pp2 gpipe:1", "dp1"),
    ],
)
def test_what_is_saved_goes_on(
    tmp_path: Path, how: str, at: int, optimizer: Any, here: str, there: str
):
    """States of an optimizer and of modules, and other values; before any step or gradient too."""
    run(here, str(tmp_path), optimizer, range(at + (how == "async")), how)
    found, values = run(there, str(tmp_path), optimizer, range(at, 6), "")
    assert_same(values, extra())
    want, _ = run("dp1", str(tmp_path / "straight"), optimizer, range(6), "save")
    assert found.keys() == want.keys()
    for key, value in want.items():
        if isinstance(value, Tensor):
            assert torch.allclose(found[key], value, rtol=1e-10, atol=1e-12), key
    counts = [state["chain.0._extra_state"]["calls"] for state in (found, want)]
    assert counts[0] == counts[1] > 0


def test_the_newest_stay_and_a_program_begins_or_continues_by_one_line(tmp_path: Path):
    """`keep` counts, `missing_ok` takes none; loading leaves no state of a trained engine."""
    engine, other = engine_of(alone(), "fp64"), engine_of(alone(), "fp64")
    assert (sw.load(engine, tmp_path, missing_ok=True), engine.steps) == ({}, 0)
    sw.save(engine, tmp_path / "begin")
    losses = [steps(engine, step, 1) for step in range(3) if sw.save(engine, tmp_path, keep=2)]
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert sw.load(other, tmp_path / "step-000001") == {}
    assert [steps(other, step, 1) for step in (1, 2)] == losses[1:]
    sw.load(other, tmp_path)
    assert other.steps == 2
    sw.load(other, tmp_path / "begin")
    assert not other.optimizer.state
    assert steps(other, 0, 1) == losses[0]


def test_what_cannot_be_saved_leaves_what_was_there(tmp_path: Path):
    """No checkpoint is begun; the value that would come back as another one is named."""
    inside = [0]
    inside.append(inside)  # type: ignore[arg-type]
    kinds = [object(), len, Path, tmp_path, datetime.now(UTC), signal.SIGTERM, np.array("a")]
    kinds += [urlsplit("a"), defaultdict(lambda: 0), torch.eye(2).to_sparse(), {torch.ones(1): 1}]
    engine = engine_of(alone(), "fp64")
    steps(engine, 0, 1)
    sw.save(engine, tmp_path)
    for value in (*kinds, inside):
        with pytest.raises(InputError, match=r"extra=.* (in which 'extra\.x'|inside of itself)"):
            sw.save(engine, tmp_path, {"x": value})
    for options in ({"extra": [1]}, {"keep": 0}, {"keep": "2"}):
        with pytest.raises(InputError):
            sw.save(engine, tmp_path, **options)  # type: ignore[arg-type]
    assert names(tmp_path) == ["step-000001"]


def spoilt(world: World, folder: str) -> str:
    """What every rank says of a save after one has spoilt its piece of a weight."""
    engine = engine_of(world, "dp2 zero3 fp64")
    steps(engine, 0, 1)
    sw.save(engine, folder)
    steps(engine, 1, 1)
    engine.wait()
    if world.rank:
        engine.flats[-1].shard[0] = float("inf")
    with pytest.raises(sw.RunError) as caught:
        sw.save(engine, folder, keep=1)
    return str(caught.value)


def test_weights_that_are_not_finite_do_not_replace_good_ones(tmp_path: Path):
    """All ranks say by whose piece; the checkpoint of before is what there is."""
    first, second = run_gloo(2, spoilt, str(tmp_path))
    assert first == second and "The weights of step 2 are not saved: " in first
    assert names(tmp_path) == ["step-000001"]
