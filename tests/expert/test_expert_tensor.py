"""Experts on the tensor axis: each rank has a part of the hidden features of every expert."""

from dataclasses import replace

import pytest
import torch

import shardwise as sw
from shardwise.comm.world import World, traced
from shardwise.core.errors import InputError
from shardwise.engine.tensor_plan import table_of
from shardwise.parallel.expert.gate import GATES
from tests.engine.cases import CONFIG, Case, build
from tests.expert import moe
from tests.pool import run_gloo


@pytest.mark.crossed
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("plan", ["dp2 tp2 ep2 sp", "tp2"])
def test_gates(name: str, plan: str):
    """So they are under each gate: partial gradients of routers are summed over the ranks."""
    moe.holds(moe.task(name, 1.25), plan)


def shapes(world: World) -> dict[str, tuple[int, ...]]:
    engine = build(world, moe.task("topk"), Case("dp2 tp2 ep2"))
    return {
        name: tuple(box.sizes)
        for box in engine.boxes()
        if (name := box.name).startswith("model/blocks.0.moe.experts")
    }


def test_matrices_are_cut_twice():
    """A rank holds half of the experts, and of each a part of the hidden features."""
    found, hidden, width = run_gloo(4, shapes), CONFIG.hidden, CONFIG.width
    for tp, each in enumerate((found[0], found[1])):
        part = hidden // 2 + hidden % 2 * tp
        assert each["model/blocks.0.moe.experts.up"] == (2, part, width)
        assert each["model/blocks.0.moe.experts.down"] == (2, width, part)


def test_sp_needs_the_whole_sequence():
    """A table without "gather" for a layer of experts is refused, with the entry to add."""
    model = moe.model("switch")
    table = table_of(model)
    lacks = replace(table, sequence=tuple(e for e in table.sequence if e[1] != "gather"))
    with pytest.raises(InputError, match=r"blocks\.\*\.moe.*gather"):
        sw.parallelize(model, "tp2 sp", traced(0, 2), table=lacks)
    assert model.get_parameter("blocks.0.moe.experts.up").shape[1] == CONFIG.hidden
    assert torch.isfinite(model.get_parameter("head.weight")).all()
