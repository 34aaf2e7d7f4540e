"""`sw.save` and `sw.load`: an engine goes on from where another was, under any plan."""

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.folder import all_in
from shardwise.checkpoint.save import save as save_boxes
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from tests.checkpoint.own import Own
from tests.checkpoint.test_plain_loops import Sum
from tests.engine.cases import regression, vectors
from tests.engine.loops import rows
from tests.engine.tensors import mine
from tests.engine.zoo import make
from tests.pool import run_gloo


class Event(IntEnum):
    A = 1


class Point(NamedTuple):
    x: int
    y: int


def engine_of(world: World, plan: str, model: nn.Module | None = None) -> sw.Engine:
    """The model on this world."""
    optimizer = sw.AdamW(lr=0.01)
    return sw.parallelize(
        model or make("stack"), plan, world, optimizer=optimizer, loss=regression, clip=1.0
    )


def steps(engine: sw.Engine, first: int, count: int = 3) -> list[float]:
    """Losses of these steps."""
    return [engine.step(mine(engine, vectors(first + k, rows=8))).loss for k in range(count)]


def extra() -> dict[Any, Any]:
    """Every kind of value that a program may save along; `"/"` and keys 1 and "1" are names too."""
    numbers = [0, -(2**70), 0.1, -0.0, math.inf, math.nan, 1j, True, None, "text", b"\0\xff"]
    numbers += [np.float64(0.1), np.float16(2), np.int64(3), np.bool_(True)]
    found: dict[Any, Any] = {
        "numbers": numbers,
        "items": [(1, (2, [])), set(), {1, "1"}, frozenset({(1, 2)}), torch.Size([2, 3])],
        "dicts": [Counter({3: 2, 1: 0}), OrderedDict({2: 1, 1: 2}), defaultdict(list, {1: [2]})],
        "tensors": {1: torch.ones(2), "1": torch.zeros(0, 3), "a/b": torch.tensor(True)},
        (1, "x"): [np.arange(6, dtype=np.uint8).reshape(2, 3).T, np.array(0.5)],
        np.int64(4): random.Random(0).getstate(),
        "torch": torch.arange(3, dtype=torch.bfloat16),
    }
    return found


def assert_same(a: Any, b: Any) -> None:
    """The same values of the same types, in the same order."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert_same([*a.items()], [*b.items()])
        assert getattr(a, "default_factory", 0) is getattr(b, "default_factory", 0)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, Tensor | np.ndarray):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tolist() == b.tolist()
    else:
        assert a == b if isinstance(a, set | frozenset) else repr(a) == repr(b)


def interrupted(
    world: World, folder: str, plan: str, then: str, asynchronous: bool
) -> tuple[list[float], object]:
    """Three steps under a plan, and three under another that goes on from its checkpoint."""
    before = engine_of(world, plan)
    losses = steps(before, 0)
    if asynchronous:  # sw.load waits
        pending = sw.async_save(before, folder, extra())
        steps(before, 3)
        assert pending.path.name == "step-000003"
    else:
        assert sw.save(before, folder, extra()).name == "step-000003"
    engine = engine_of(world, then)
    found = sw.load(engine, folder)
    assert engine.steps == 3
    return losses + steps(engine, 3), found


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("plan", "then"),
    [("dp2 zero3 fp64", "pp2 1f1b:2 fp64"), ("pp2 1f1b:2 fp64", "dp2 fp64")],
)
def test_a_run_goes_on_under_another_plan(tmp_path: Path, plan: str, then: str, asynchronous: bool):
    """As if there had been no break, and with what else was saved, value by value and type."""
    straight = steps(engine_of(alone(), "fp64"), 0, 6)
    for losses, found in run_gloo(2, interrupted, str(tmp_path), plan, then, asynchronous):
        assert losses == pytest.approx(straight, rel=1e-10)
        assert_same(found, extra())


def test_the_newest_stay(tmp_path: Path):
    """`keep` counts them, and `load` of one that is named takes that one."""
    engine = engine_of(alone(), "fp64")
    for step in range(4):
        steps(engine, step, 1)
        sw.save(engine, tmp_path, keep=2)
    assert [path.name for path in all_in(tmp_path)] == ["step-000003", "step-000004"]
    other = engine_of(alone(), "fp64")
    assert sw.load(other, tmp_path / "step-000003") == {}
    assert other.steps == 3
    assert steps(other, 3, 1) != steps(engine, 4, 1)
    sw.load(other, tmp_path)
    assert other.steps == 4


def test_what_cannot_be_saved_leaves_what_was_there(tmp_path: Path):
    """No checkpoint is begun; the value that would come back as another one is named."""
    inside = [0]
    inside.append(inside)  # type: ignore[arg-type]
    kinds = [object(), len, Path("a"), tmp_path, datetime.now(UTC), Event.A, IntEnum, np.array("a")]
    kinds += [Point(1, 2), defaultdict(lambda: 0), torch.eye(2).to_sparse(), {torch.ones(1): 1}]
    engine = engine_of(alone(), "fp64")
    steps(engine, 0, 1)
    sw.save(engine, tmp_path)
    for value in (*kinds, inside):
        with pytest.raises(InputError, match=r"extra=.* (in which 'extra\.x'|inside of itself)"):
            sw.save(engine, tmp_path, {"x": value})
    for options in ({"extra": [1]}, {"keep": 0}, {"keep": "2"}):
        with pytest.raises(InputError):
            sw.save(engine, tmp_path, **options)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-000001"]


@pytest.mark.parametrize(
    "what", ["tensors alone", "numbers of nothing", "another model", "less of it"]
)
def test_what_cannot_be_loaded_leaves_the_engine_alone(tmp_path: Path, what: str):
    """Weights and numbers are those of before."""
    engine, other = engine_of(alone(), "fp64"), engine_of(alone(), "fp64", nn.Linear(6, 6))
    steps(engine, 0, 1)
    if what == "less of it":
        engine = engine_of(alone(), "fp64", nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
        other = engine_of(alone(), "fp64", nn.Sequential(nn.Linear(6, 6)))
        steps(engine, 0, 1)
    if what == "tensors alone":
        save_boxes(tmp_path, engine.boxes(), {"step": 1}, alone())
        other = engine_of(alone(), "fp64")
    else:
        path = sw.save(engine, tmp_path) / "scalars.json"
        if what == "numbers of nothing":
            said = json.loads(path.read_text())
            said["scalars"]["engine"]["step"] = None
            path.write_text(json.dumps(said))
            other = engine_of(alone(), "fp64")
    before = [p.clone() for p in other.model.parameters()]
    with pytest.raises(InputError):
        sw.load(other, tmp_path)
    assert other.steps == 0
    assert all(torch.equal(p, q) for p, q in zip(before, other.model.parameters(), strict=True))


def begins(world: World, folder: str) -> tuple[object, int, object, int]:
    """A load where there may be none, before a checkpoint and after it: what it gives, the step."""
    engine, other = engine_of(world, "dp2 fp64"), engine_of(world, "dp2 fp64")
    nothing = sw.load(engine, folder, missing_ok=True)
    at = engine.steps
    steps(engine, 0, 2)
    sw.save(engine, folder, {"epoch": 1})
    return nothing, at, sw.load(other, folder, missing_ok=True), other.steps


def test_a_program_begins_or_continues_by_one_line(tmp_path: Path):
    """`missing_ok`: nothing is loaded where there is no checkpoint, and it is where there is."""
    assert run_gloo(2, begins, str(tmp_path)) == [({}, 0, {"epoch": 1}, 2)] * 2


def spoilt(world: World, folder: str) -> str:
    """What every rank is told of a save after one has spoilt its piece of a weight."""
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
    """All ranks are told by whose piece; the checkpoint of before is what there is."""
    first, second = run_gloo(2, spoilt, str(tmp_path))
    assert first == second and "The weights of step 2 are not saved: " in first
    assert [path.name for path in all_in(tmp_path)] == ["step-000001"]


OWN = sw.Optim(Own, lr=0.02, groups={"*.bias": {"lr": 0.01, "betas": (0.7, 0.2)}})
ADAM = sw.AdamW(lr=0.02, weight_decay=0.1)


def loss(model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(batch["x"], batch["late"]).square().mean()


def go(
    world: World, folder: str, plan: str, optimizer: Any, steps: range, load: bool
) -> dict[str, Any]:
    """Steps of an engine, from the folder's checkpoint if `load`, else to one."""
    engine = sw.parallelize(
        Sum(), f"{plan} fp64", world, optimizer=optimizer, loss=loss, least_unit_bytes=0
    )
    if load:
        sw.load(engine, folder)
    for step in steps:
        x = torch.cat([rows(2 * step, 0), rows(2 * step, 1)])[:4]
        part = x.tensor_split(engine.data_ranks)[engine.data_rank]
        engine.step({"x": part, "late": int(step >= 3)})
    engine.wait()  # parameters are gathered, states are of pieces
    if not load:
        sw.save(engine, folder)
    return sw.full_state_dict(engine)


def run(plan: str, *args: Any) -> dict[str, Any]:
    ranks, (folder, *more) = sw.Plan.parse(plan).size, args
    if ranks == 1:
        return go(alone(), folder, plan, *more)
    return run_gloo(ranks, go, folder, plan, *more)[0]


PAIRS = [("dp2 zero3", "pp2 gpipe:1"), ("pp2 gpipe:1", "dp2 zero2")]


@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("optimizer", [OWN, ADAM], ids=["Own", "AdamW"])
@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_what_is_saved_goes_on(tmp_path: Path, at: int, optimizer: Any, here: str, there: str):
    """Numbers, lists and counts of an optimizer, and modules' extra state, under another plan.

    Also from before the first step, and where a layer has had no gradient yet.
    """
    run(here, str(tmp_path), optimizer, range(at), False)
    found = run(there, str(tmp_path), optimizer, range(at, 6), True)
    want = run("dp1", str(tmp_path / "straight"), optimizer, range(6), False)
    assert found.keys() == want.keys()
    for key, value in want.items():
        if isinstance(value, Tensor):
            assert torch.allclose(found[key], value, rtol=1e-10, atol=1e-12), key
    counts = [state["chain.0._extra_state"]["calls"] for state in (found, want)]
    assert counts[0] == counts[1] > 0


def test_a_state_goes_into_an_engine_that_has_trained(tmp_path: Path):
    """Loading a checkpoint from before the first step begins afresh: no state is left over."""
    engine = sw.parallelize(Sum(), "fp64", alone(), optimizer=ADAM, loss=loss)
    sw.save(engine, tmp_path)
    batch = {"x": rows(0, 0), "late": 1}
    first = [engine.step(batch).loss for _ in range(2)]
    sw.load(engine, tmp_path)
    assert not engine.optimizer.state
    vars(engine.model.get_submodule("chain.0"))["calls"] = 0
    assert [engine.step(batch).loss for _ in range(2)] == first


@pytest.mark.parametrize("steps", [0, 2])
def test_another_class_of_optimizer_is_refused(tmp_path: Path, steps: int):
    """One without states cannot give any, and one with other states has not these."""
    for first, then, text in (
        (sw.SGD(lr=0.1), ADAM, "saved by SGD, without states of AdamW"),
        (sw.SGD(lr=0.1, momentum=0.9), ADAM, "exp_avg/chain" if steps else "saved by SGD"),
    ):
        folder = tmp_path / str(len(text))
        go(alone(), str(folder), "dp1", first, range(steps), False)
        engine = sw.parallelize(Sum(), "fp64", alone(), optimizer=then, loss=loss)
        with pytest.raises(InputError, match=text):
            sw.load(engine, folder)
        assert not engine.optimizer.state and engine.steps == 0
