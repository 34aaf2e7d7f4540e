from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.comm.world import World
from shardwise.engine.engine import Engine
from shardwise.engine.state_dict import full_parameters
from tests.engine.cases import Case, Task, build, difference, rows_task, settled, share
from tests.engine.test_zoo import gated
from tests.engine.zoo import Gated, make
from tests.pool import run_threads

Saved = dict[str, np.ndarray]
SGD: dict[str, Any] = {
    "kind": torch.optim.SGD,
    "options": {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
}
ADAMW: dict[str, Any] = {"options": {"lr": 0.05, "weight_decay": 0.2}}
TASKS = {
    "gpt": Task(),
    "batch of vectors": rows_task(partial(make, "twice")),
}


def steps(engine: Engine, task: Task, first: int, last: int) -> list[float]:
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
    """A new engine brought to what was saved, trained over the steps of `span`."""
    engine = build(world, task, case)
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


@pytest.mark.parametrize("options", [ADAMW, SGD], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("first", [1, 2])
def test_a_parameter_that_has_had_no_gradient_is_saved_and_begins_afresh(first, options):
    """`never` has none, `side` none in step 1: neither is missing, and none inherits a step count.

    With dampening, a momentum of zeros is another beginning than none.
    """
    late = rows_task(lambda: settled(Gated()), lambda step: gated(step + 1))
    one = Case("dp2 zero1 fp64", **options)
    two = Case("dp4 zero2 fp64", **options)
    kept = run_threads(2, saved, late, one, first)
    arrays = assembled(kept)
    begun = {name.split("/", 2)[2] for name in arrays if name.startswith("optim/")}
    assert not any(name.startswith("never") for name in begun)
    assert any(name.startswith("side") for name in begun) == (first == 2)
    found = run_threads(4, resumed, late, two, arrays, kept[0][1], range(first, 4))
    losses, weights = run_threads(1, straight, late, Case("fp64", **options), 4)[0]
    for own, ended, _ in found:
        assert own == pytest.approx(losses[first:], rel=1e-11)
        assert all(difference(ended[name], weights[name]) <= 1e-11 for name in weights)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_are_what_is_saved(precision):
    """A 16-bit plan saves fp32 weights and moments, continues bit for bit, and into fp32."""
    one, two = Case(f"dp2 zero1 {precision}"), Case(f"dp2 zero3 {precision}")
    task = TASKS["gpt"]
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
