"""Lion on shards and Adafactor on whole parameters: both train as in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.comm.world import traced
from shardwise.core.errors import InputError
from shardwise.engine.lion import Lion
from shardwise.models import gpt
from tests.engine.cases import Case, ranks_of, small_gpt, text
from tests.engine.tensors import assert_counted, assert_parity, gpt_task, train, whole_run
from tests.engine.test_state import assembled, resumed, saved, straight
from tests.pool import run_gloo, run_threads

LION: dict[str, Any] = {"kind": Lion, "options": {"lr": 1e-3, "weight_decay": 0.1}}
ADAFACTOR: dict[str, Any] = {
    "kind": torch.optim.Adafactor,
    "options": {"lr": 0.01, "weight_decay": 0.1},
}
SHARDED = [f"{dp} {row}" for dp in ("dp2", "dp4") for row in ("ddp", "zero1", "zero2", "zero3")]


def test_lion_is_the_papers():
    """Three steps of algorithm 2 of arXiv 2302.06675, written out for one element."""
    p, m, lr, decay, first, second = 0.5, 0.0, 0.1, 0.2, 0.9, 0.99
    weight = torch.tensor([p], dtype=torch.float64, requires_grad=True)
    optimizer = Lion([weight], lr=lr, betas=(first, second), weight_decay=decay)
    for g in (1.0, -0.5, -3.0):
        weight.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        mean = first * m + (1 - first) * g
        p -= lr * ((mean > 0) - (mean < 0) + decay * p)
        m = second * m + (1 - second) * g
        assert weight.item() == pytest.approx(p, rel=1e-12)
    assert p == pytest.approx(0.5 * 0.98**3 - 0.1 * 0.98**2 + 0.1 * 0.98 + 0.1)


@pytest.mark.parametrize("plan", [*SHARDED, "tp2", "dp2 tp2 zero1", "pp2 dp2 zero3 1f1b:2"])
def test_lion_on_shards(plan: str):
    """Parity within 1e-10 on processes; bytes and memory are as predicted."""
    work, case = gpt_task(rows=8), Case(f"{plan} fp64", clip=0.5, **LION)
    ranks = run_gloo(ranks_of(plan), train, work, case)
    assert_parity(ranks, whole_run(work, case), 1e-10)
    assert_counted(ranks)


@pytest.mark.parametrize(
    "plan", ["dp2", "dp4", "dp2 accumulate:2", "dp1 zero3", "pp2 1f1b:2", "pp2 dp2 gpipe:2"]
)
def test_adafactor_where_parameters_are_whole(plan: str):
    """Parity within 1e-10 on processes; memory counts the means of rows and columns."""
    work, case = gpt_task(rows=8), Case(f"{plan} fp64", clip=0.5, **ADAFACTOR)
    ranks = run_gloo(ranks_of(plan), train, work, case)
    assert_parity(ranks, whole_run(work, case), 1e-10)
    assert_counted(ranks)


@pytest.mark.parametrize(("plan", "optimizer"), [("dp2 zero3 bf16", LION), ("dp2 bf16", ADAFACTOR)])
def test_masters(plan: str, optimizer: dict[str, Any]):
    """In 16 bits the states are those of fp32 masters, as predicted."""
    assert_counted(run_threads(2, train, gpt_task(), Case(plan, **optimizer)))


@pytest.mark.parametrize(
    ("optimizer", "here", "there"),
    [
        (LION, "dp2 zero3", "dp2 tp2 zero1"),
        (LION, "dp2 tp2 zero1", "dp4 zero2"),
        (LION, "pp2 1f1b:2", "zero3"),
        (ADAFACTOR, "dp2", "pp2 1f1b:2"),
        (ADAFACTOR, "pp2 dp2 1f1b:2", "dp1"),
        (ADAFACTOR, "dp1", "dp4"),
    ],
)
def test_any_plan_continues_what_another_saved(optimizer: dict[str, Any], here: str, there: str):
    """Two steps under one plan and three under another lose what five in one process do."""
    work = gpt_task(rows=8)
    losses, _ = run_threads(1, straight, work, Case("fp64", **optimizer), 5)[0]
    kept = run_threads(ranks_of(here), saved, work, Case(f"{here} fp64", **optimizer), 2)
    arrays, scalars = assembled(kept), kept[0][1]
    two = Case(f"{there} fp64", **optimizer)
    for own, _, counted in run_threads(
        ranks_of(there), resumed, work, two, arrays, scalars, range(2, 5)
    ):
        assert counted == 5
        assert own == pytest.approx(losses[2:], rel=1e-10)


@pytest.mark.parametrize("plan", ["dp2 zero1", "dp2 zero3", "tp2", "dp_replicate2 dp_shard2 zero2"])
def test_adafactor_over_parts_of_parameters_is_refused(plan: str):
    """By parallelize and by predict, before anything is changed, with two ways on."""
    model, world = small_gpt(), traced(0, ranks_of(plan))
    match = rf"Adafactor under the plan '{plan}'.*sw\.Lion\(lr=1e-4\) with '{plan}'"
    with pytest.raises(InputError, match=match):
        sw.parallelize(model, plan, world, optimizer=sw.Adafactor(), loss=gpt.loss)
    with pytest.raises(InputError, match=match):
        sw.predict(model, plan, text(0), optimizer=sw.Adafactor(), loss=gpt.loss)
    assert all(isinstance(p, Tensor) and p.dim() for p in model.parameters())
