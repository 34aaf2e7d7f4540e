"""A checkpoint does not know which activations were recomputed, or where they rested."""

from pathlib import Path

import pytest

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.models import gpt
from tests.engine.cases import small_gpt, text
from tests.engine.tensors import mine
from tests.pool import run_gloo

PAIRS = [
    ("dp2 zero3 recompute:full", "dp2 zero1"),
    ("dp2 zero1", "dp2 zero3 recompute:selective"),
    ("tp2 recompute:partitioned", "dp2 zero3 activations:host"),
    ("dp2 activations:host", "tp2 sp recompute:partitioned-host"),
    ("pp2 zb-v:4 recompute:every2", "dp2 zero2 recompute:60KiB"),
    ("dp2 zero2 recompute:60KiB", "pp2 1f1b:2 activations:host recompute:full"),
    ("tp2 recompute:partitioned-host", "tp2"),
]


def engine_of(world: World, plan: str) -> sw.Engine:
    """A small GPT under the plan."""
    optimizer = sw.AdamW(lr=0.01, eps=1e-4)
    model, names = small_gpt(), {"loss": gpt.loss, "tokens": gpt.tokens}
    return sw.parallelize(model, f"{plan} fp64", world, optimizer=optimizer, clip=1.0, **names)


def steps(engine: sw.Engine, first: int) -> list[float]:
    """The losses of two steps."""
    return [engine.step(mine(engine, text(first + k, rows=8))).loss for k in range(2)]


def interrupted(world: World, folder: str, plan: str, then: str) -> list[float]:
    """Two steps under a plan, and two under another that goes on from its checkpoint."""
    before = engine_of(world, plan)
    losses = steps(before, 0)
    sw.save(before, folder)
    engine = engine_of(world, then)
    sw.load(engine, folder)
    return losses + steps(engine, 2)


def straight() -> list[float]:
    engine = engine_of(alone(), "ddp")
    return steps(engine, 0) + steps(engine, 2)


@pytest.mark.parametrize(("plan", "then"), PAIRS)
def test_a_run_goes_on_with_other_activations(tmp_path: Path, plan: str, then: str):
    """As if there had been no break and one plan: weights and the optimizer's moments are there."""
    expected = straight()
    for losses in run_gloo(2, interrupted, str(tmp_path), plan, then):
        assert losses == pytest.approx(expected, rel=1e-10)
