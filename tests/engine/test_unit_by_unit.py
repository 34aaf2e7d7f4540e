"""Under a pipeline, as without one, zero3 gathers unit by unit, and frees what is not in use."""

from dataclasses import replace
from typing import Any

import pytest

import shardwise as sw
from shardwise.comm.world import World
from shardwise.engine.engine import Engine
from shardwise.engine.meter import Meter
from shardwise.engine.pipelined import Pipelined
from shardwise.models import gpt
from shardwise.models.initial import fill
from tests.engine.cases import ranks_of, text
from tests.engine.tensors import SHAPES, mine
from tests.pool import run_threads

LAYERS = 8


def engine_of(world: World, plan: str, tied: bool) -> Engine:
    """A GPT of eight blocks, each of them a unit."""
    model = gpt.GPT(replace(SHAPES["tied" if tied else "untied"], layers=LAYERS))
    fill(model, seed=3)
    options: dict[str, Any] = {"loss": gpt.loss, "tokens": gpt.tokens, "least_unit_bytes": 0}
    return sw.parallelize(model, plan, world, **options)


def peaks(world: World, plan: str, tied: bool) -> list[tuple[int, int]]:
    """Of two steps the most bytes of gathered units, measured and predicted."""
    engine = engine_of(world, plan, tied)
    assert isinstance(engine.passes, Pipelined)
    found: list[tuple[int, int]] = []
    for step in range(2):
        with Meter(engine) as meter:
            engine.step(mine(engine, text(step, rows=8)))
        measured = meter.most["parameters"] - engine.memory()["parameters"]
        found.append((measured, engine.passes.whole_bytes()))
    return found


def sizes(world: World, plan: str, tied: bool) -> tuple[int, dict[str, int], dict[str, int]]:
    """The predicted peak; the bytes of each unit, and of those that are whole in all of a stage."""
    engine = engine_of(world, plan, tied)
    assert isinstance(engine.passes, Pipelined)
    whole = {
        unit.name: sum(group.plan.padded * group.dtype.itemsize for group in unit.groups)
        for unit in engine.data.units.order
    }
    kept = [unit.name for unit in engine.data.units.order if unit.keep]
    return engine.passes.whole_bytes(), whole, {name: whole[name] for name in kept}


CASES = [
    ("1f1b:4", False),
    pytest.param("zb-h1:2", True, marks=pytest.mark.full),
    pytest.param("interleaved:2x2", True, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("schedule", "tied"), CASES)
def test_the_peak_of_gathered_parameters(schedule: str, tied: bool):
    """At most two units are whole at once beside what several stages hold, as predicted."""
    plan = f"pp2 dp2 zero3 {schedule} fp32"
    for rank in run_threads(ranks_of(plan), peaks, plan, tied):
        (first, _), (measured, predicted) = rank
        assert measured == predicted
        assert first <= predicted  # the first pass does not yet know which unit comes next


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_peak_is_two_blocks_and_the_root(tied: bool):
    """Of a stage of four blocks two are whole at once, and the embedding where it is tied."""
    plan = "pp2 dp2 zero3 1f1b:4 fp32"
    predicted, whole, around = run_threads(4, sizes, plan, tied)[0]
    others = {name: count for name, count in whole.items() if name not in around}
    assert predicted == sum(sorted(others.values())[-2:]) + sum(around.values())
    assert 1.5 * predicted < sum(whole.values())
    assert bool(around) == tied
