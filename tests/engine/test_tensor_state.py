"""On a tensor axis: what a step leaves behind, what a checkpoint keeps, what is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.world import alone, traced
from shardwise.core.errors import InputError
from shardwise.models import gpt
from tests.engine.cases import Case, Task, ranks_of
from tests.engine.tensors import ADAMW, made
from tests.engine.test_state import assembled, resumed, saved, straight
from tests.parallel.layers import task
from tests.pool import run_threads


def continued(work: Task, here: str, there: str, precision: str) -> list[tuple[Any, ...]]:
    """Two steps under one plan and three under the other, on each rank of the other."""
    one, two = Case(f"{here} {precision}", **ADAMW), Case(f"{there} {precision}", **ADAMW)
    kept = run_threads(ranks_of(here), saved, work, one, 2)
    arrays, scalars = assembled(kept), kept[0][1]
    shapes = {n: tuple(p.shape) for n, p in work.make().named_parameters()}
    assert {n: arrays[f"model/{n}"].shape for n in shapes} == shapes
    assert {n: arrays[f"optim/exp_avg/{n}"].shape for n in shapes} == shapes
    return run_threads(ranks_of(there), resumed, work, two, arrays, scalars, range(2, 5))


PACKED = ["gate and up", "qkv, 6 heads, 2 for keys", "qkv, 6 heads, 1 for keys"]


@pytest.mark.full
@pytest.mark.parametrize("name", [f"packed {what}" for what in PACKED])
def test_packed_weights_are_kept_whole(name: str):
    """Parts of several ranges of one weight go back where they were; what ranks share, once."""
    work = task(name)
    losses, _ = run_threads(1, straight, work, Case("fp64", **ADAMW), 5)[0]
    for here, there in (("tp2", "dp2 zero3"), ("dp2 zero3", "tp2 sp"), ("dp2 tp2 zero3", "tp2")):
        for own, _, _ in continued(work, here, there, "fp64"):
            assert own == pytest.approx(losses[2:], rel=1e-10)


REFUSED = [
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "tp2", None, "no table of styles"),
    (partial(made, "untied"), "tp2", {}, "a table without a style.*Write instead: table={'blocks"),
    (partial(made, "untied"), "tp2", {"block.*.mlp.up": "colwise"}, r"blocks\.\*\.mlp"),
    (partial(made, "untied"), "tp2", {"embed": "vocabluary"}, '"vocabulary"'),
    (partial(made, "untied"), "tp8", None, r"tp8 for a model of 4 query heads.*tp4"),
]


@pytest.mark.parametrize(("make", "plan", "table", "phrase"), REFUSED)
def test_what_cannot_be_cut_is_refused_and_left_as_it_was(
    make: Any, plan: str, table: dict[str, str] | None, phrase: str
):
    """No table, unknown names and styles, too many ranks: told before anything is changed."""
    model = make()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    world = traced(0, ranks_of(plan))
    with pytest.raises(InputError, match=phrase):
        sw.parallelize(model, plan, world, loss=gpt.loss, table=table)
    after = dict(model.named_parameters())
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    sw.parallelize(model, "fp32", alone(), loss=gpt.loss)
