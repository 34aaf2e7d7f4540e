"""What engines save, as whole arrays, and trainings that go on from it under another plan."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adafactor, Muon

import shardwise as sw
from shardwise.comm.world import World
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer.lion import Lion
from tests.engine import pipelines
from tests.engine.cases import Case, Task, build, difference, ranks_of, rows_task, settled, share
from tests.engine.tensors import ADAMW, full_parameters, gpt_task
from tests.engine.zoo import Gated, dims, gated
from tests.parallel import layers
from tests.pool import run_threads

Saved = dict[str, np.ndarray]


def steps(engine: Engine, task: Task, first: int, last: int) -> list[float]:
    """The losses of steps on this rank's shares."""
    return [
        engine.step(share(task.batch(s), engine.data_rank, engine.data_ranks)).loss
        for s in range(first, last)
    ]


def saved(world: World, task: Task, case: Case, at: int) -> tuple[list[Any], dict[str, Any]]:
    """Boxes as arrays, with their places, and the scalars, after `at` steps."""
    engine = build(world, task, case)
    steps(engine, task, 0, at)
    scalars = engine.scalars()
    boxes = [
        (b.name, b.shape, b.offsets, b.sizes, b.replica, b.tensor.detach().clone().numpy())
        for b in engine.boxes()
    ]
    return boxes, scalars


def assembled(ranks: list[tuple[list[Any], dict[str, Any]]]) -> Saved:
    """Whole arrays from the boxes whose replica is 0, each element written exactly once."""
    out: Saved = {}
    times: dict[str, np.ndarray] = {}
    for boxes, _ in ranks:
        for name, shape, offsets, sizes, replica, data in boxes:
            whole_array = out.setdefault(name, np.zeros(shape, data.dtype))
            count = times.setdefault(name, np.zeros(shape, int))
            at = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            if replica == 0:
                whole_array[at] = data
                count[at] += 1
    assert all((count == 1).all() for count in times.values())
    return out


def resumed(
    world: World, task: Task, case: Case, arrays: Saved, scalars: dict[str, Any], span: range
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """A new engine, of weights of zeros, brought to what was saved, trained over `span`."""
    engine = build(world, task, case)
    for flat in engine.flats:
        flat.shard.zero_()
    tensors = {name: (a.shape, torch.from_numpy(a).dtype) for name, a in arrays.items()}
    boxes = engine.loading(tensors, scalars)
    assert {b.name for b in boxes} <= arrays.keys()
    for b in boxes:
        at = tuple(slice(o, o + s) for o, s in zip(b.offsets, b.sizes, strict=True))
        b.tensor.detach().copy_(torch.from_numpy(np.array(arrays[b.name][at])))
    engine.load_scalars(scalars)
    engine.loaded()
    losses = steps(engine, task, span.start, span.stop)
    return losses, full_parameters(engine.flats), engine.steps


def straight(world: World, task: Task, case: Case, until: int) -> tuple[Any, ...]:
    engine = build(world, task, case)
    return steps(engine, task, 0, until), full_parameters(engine.flats)


def continued(task: Task, options: dict[str, Any], here: str, there: str, first: int = 2) -> Saved:
    """What steps under `here` save, which steps under `there` continue as in one process."""
    alone, one, two = (Case(f"{plan} fp64", **options) for plan in ("dp1", here, there))
    kept = run_threads(ranks_of(here), saved, task, one, first)
    arrays, scalars = assembled(kept), kept[0][1]
    for name, p in task.make().named_parameters():
        assert arrays[f"model/{name}"].shape == p.shape
    losses, weights = run_threads(1, straight, task, alone, 5)[0]
    span = range(first, 5)
    for own, ended, counted in run_threads(
        ranks_of(there), resumed, task, two, arrays, scalars, span
    ):
        assert counted == 5
        assert own == pytest.approx(losses[first:], rel=1e-10)
        for name, weight in ended.items():  # whole, but on a tensor axis
            if weight.shape == weights[name].shape:
                assert difference(weight, weights[name]) <= 1e-10, name
    return arrays


@pytest.mark.parametrize("dampening", [None, 0.3])
@pytest.mark.parametrize("first", [1, 2])
def test_a_parameter_that_has_had_no_gradient_is_saved_and_begins_afresh(first, dampening):
    """`never` has none, `side` none in step 1: neither is missing, and none inherits a step count.

    With dampening, a momentum of zeros is another beginning than none.
    """
    options: dict[str, Any] = {"options": {"lr": 0.05, "weight_decay": 0.2}}
    if dampening is not None:
        options = {"kind": SGD, "options": {"lr": 0.1, "momentum": 0.9, "dampening": dampening}}
    late = rows_task(lambda: settled(Gated()), lambda step: gated(step + 1))
    arrays = continued(late, options, "dp2 zero1", "dp4 zero2", first)
    begun = {name.split("/", 2)[2] for name in arrays if name.startswith("optim/")}
    assert not any(name.startswith("never") for name in begun)
    assert any(name.startswith("side") for name in begun) == (first == 2)


LION: dict[str, Any] = {"kind": Lion, "options": {"lr": 1e-3, "weight_decay": 0.1}}
ADAFACTOR: dict[str, Any] = {
    "kind": Adafactor,
    "options": {"lr": 0.01, "weight_decay": 0.1},
}
MUON: dict[str, Any] = {
    "kind": Muon,
    "options": {"lr": 0.01, "rest": sw.Adam(lr=0.01, eps=1e-4)},
}
PACKED = ["gate and up", "qkv, 6 heads, 2 for keys", "qkv, 6 heads, 1 for keys"]
#: What the table of plans does not continue: other optimizers, stages that are frozen, parameters
#: without dims, weights of which a rank has several ranges, or shares some with others.
CONTINUED = [
    (rows_task(dims), ADAMW, "dp4 zero3", "dp2 zero1"),
    (gpt_task(rows=8), LION, "dp2 zero3", "dp2 tp2 zero1"),
    (gpt_task(rows=8), LION, "pp2 1f1b:2", "zero3"),
    (gpt_task(rows=8), ADAFACTOR, "dp2", "pp2 dp2 zero1 1f1b:2"),
    (gpt_task(rows=8), ADAFACTOR, "pp2 dp2 1f1b:2", "dp4 zero3"),
    (gpt_task(rows=8), MUON, "dp1", "dp2 zero3"),
    (gpt_task(rows=8), MUON, "dp_replicate2 dp_shard2 zero1", "dp3 zero2"),
    (gpt_task("tied"), ADAMW, "pp2 dp2 zero3 1f1b:2 stages:1,1", "pp4 1f1b:4 stages:2,1,1,1"),
    (pipelines.task("half frozen"), ADAMW, "pp2 1f1b:3", "ddp"),
    (pipelines.task("half frozen"), ADAMW, "zero3", "pp2 dp2 gpipe:2"),
    *(
        (layers.task(f"packed {what}"), ADAMW, *plans)
        for what in PACKED
        for plans in (("tp2", "dp2 zero3"), ("dp2 zero3", "tp2 sp"), ("dp2 tp2 zero3", "tp2"))
    ),
]


@pytest.mark.cases(5)
@pytest.mark.parametrize(("task", "options", "here", "there"), CONTINUED)
def test_any_plan_continues_what_another_saved(task: Task, options: Any, here: str, there: str):
    """Two steps under one plan and three under another lose what five in one process do."""
    arrays = continued(task, options, here, there)
    assert any(name.startswith("optim/") for name in arrays)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_are_what_is_saved(precision):
    """A 16-bit plan saves fp32 weights and moments, continues bit for bit, and into fp32."""
    one, two = Case(f"dp2 zero1 {precision}"), Case(f"dp2 zero3 {precision}")
    task = Task()
    kept = run_threads(2, saved, task, one, 2)
    arrays = assembled(kept)
    assert {a.dtype for n, a in arrays.items() if n.startswith("model/")} == {np.dtype("float32")}
    assert kept[0][1]["loss_scale"] == (1.0 if precision == "bf16" else 2.0**16)
    losses, weights = run_threads(2, straight, task, one, 4)[0]
    found = run_threads(2, resumed, task, two, arrays, kept[0][1], range(2, 4))
    for own, ended, _ in found:
        assert own == losses[2:]
        assert all(torch.equal(ended[name], weights[name]) for name in weights)
    wide = run_threads(1, resumed, task, Case("fp32"), arrays, kept[0][1], range(2, 4))[0]
    assert wide[0] == pytest.approx(losses[2:], rel=0.02)
