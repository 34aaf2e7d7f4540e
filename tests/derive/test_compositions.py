"""Derived tables compose with data ranks, stages and states, and load without tensor ranks."""

from pathlib import Path

import pytest

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.plan.plan import Plan
from shardwise.verify.proof_options import Options
from tests.derive import models
from tests.derive.test_derive import HAND, derived
from tests.pool import run_gloo
from tests.verify.test_command import shortly

NAME = f"{HAND}:packed"


@pytest.mark.full
@pytest.mark.parametrize("plan", ["tp4", "dp2 tp2 zero3", "tp2 pp2 1f1b:2"])
def test_on_four_ranks(plan: str):
    """Parity, bytes and memory, and after loading a checkpoint."""
    table = derived(NAME, Plan.parse(plan).mesh.size_of("tp")).table
    assert shortly(f"{plan} fp64", NAME, Options(table=table)).holds


def step(world: World, plan: str, folder: str, table: sw.Table | None) -> float:
    """Save after a step under a table; without one, load, and evaluate."""
    model, loss, batch = models.packed()
    engine = sw.parallelize(model, plan, world, loss=loss, table=table)
    if table is None:
        sw.load(engine, folder)
    else:
        engine.step(batch(4, 0))
        sw.save(engine, folder)
    return engine.evaluate(batch(4, 1))[0]


def test_a_checkpoint_is_loaded_without_tensor_ranks(tmp_path: Path):
    """What two ranks saved under a derived table, one rank evaluates to the same loss."""
    folder = str(tmp_path / "run")
    saved = run_gloo(2, step, "tp2 fp64", folder, derived(NAME).table)
    assert run_gloo(1, step, "fp64", folder, None)[0] == pytest.approx(saved[0], rel=1e-10)
