"""Under a pipeline, as without one, zero3 gathers unit by unit, and frees what is not in use."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World
from shardwise.engine.engine import Engine
from shardwise.engine.options import EngineOptions
from shardwise.engine.predict import Predictor
from shardwise.models import gpt
from shardwise.models.initial import fill
from shardwise.observe.meter import Meter
from shardwise.prediction.rank_shape import gathered_bytes_on
from tests.engine.cases import (
    Case,
    Task,
    build,
    foreseen,
    ranks_of,
    rows_task,
    settled,
    text,
    vectors,
)
from tests.engine.pipelines import ADAMW, WIDTH
from tests.engine.tensors import SHAPES, holds, mine
from tests.engine.zoo import Stack
from tests.pool import run_threads

LAYERS = 8


OPTIONS: dict[str, Any] = {"loss": gpt.loss, "least_unit_bytes": 0}


def model_of(tied: bool) -> nn.Module:
    """A GPT of eight blocks, each of them a unit."""
    model = gpt.GPT(replace(SHAPES["tied" if tied else "untied"], layers=LAYERS))
    fill(model, seed=3)
    return model


def both(world: World, plan: str, tied: bool) -> tuple[Engine, Predictor]:
    """An engine, and the predictions of its rank."""
    engine = sw.parallelize(model_of(tied), plan, world, tokens=gpt.tokens, **OPTIONS)
    return engine, Predictor(model_of(tied), plan, EngineOptions(**OPTIONS), rank=world.rank)


def peaks(world: World, plan: str, tied: bool) -> list[tuple[int, int]]:
    """Of two steps the most bytes of gathered units, measured and predicted."""
    return peaks_of(*both(world, plan, tied), partial(text, rows=8))


def peaks_of(
    engine: Engine, theory: Predictor, batch: Callable[[int], Any]
) -> list[tuple[int, int]]:
    """The same of any engine."""
    found: list[tuple[int, int]] = []
    for step in range(2):
        with Meter(engine) as meter:
            engine.step(own := mine(engine, batch(step)))
        measured = meter.most["parameters"] - engine.memory()["parameters"]
        told = theory.of(own)
        found.append((measured, gathered_bytes_on(told.spec, told.plan, told.model, told.rank)))
    return found


def sizes(world: World, plan: str, tied: bool) -> tuple[int, dict[str, int], dict[str, int]]:
    """The predicted peak; the bytes of each unit, and of those that are whole in all of a stage."""
    engine, theory = both(world, plan, tied)
    told = theory.of(mine(engine, text(0, rows=8)))
    whole = {
        unit.name: sum(group.plan.padded * group.dtype.itemsize for group in unit.groups)
        for unit in engine.data.units.order
    }
    kept = [unit.name for unit in engine.data.units.order if unit.state.stays]
    predicted = gathered_bytes_on(told.spec, told.plan, told.model, told.rank)
    return predicted, whole, {name: whole[name] for name in kept}


CASES = [("1f1b:4", False), ("zb-h1:2", True), ("interleaved:2x2", True)]


@pytest.mark.full
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


class Siblings(nn.Module):
    """A block of three units: two read one input, and each is called twice, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.tanh(self.a(x)), torch.tanh(self.b(x))
        both = torch.tanh(self.a(left + right))
        return x + self.c(torch.tanh(self.b(both)) * left)


def siblings() -> Task:
    return rows_task(
        lambda: settled(Stack(*(Siblings() for _ in range(4)))), partial(vectors, rows=9)
    )


def peaks_of_siblings(world: World, plan: str) -> list[tuple[int, int]]:
    task, case = siblings(), Case(plan, **ADAMW)
    return peaks_of(build(world, task, case), foreseen(world, task, case), task.batch)


@pytest.mark.full
@pytest.mark.cases(1)
@pytest.mark.parametrize("word", ["1f1b:4", "zb-h1:4", "zb-v:4"])
def test_units_that_read_one_input(word: str):
    """A unit is freed after its last use in a backward pass or in a half of one, and not before:
    it is gathered as often as predicted, and no more bytes are gathered at once than predicted.
    """
    case = Case(f"pp2 dp2 zero3 {word} fp64", **ADAMW)
    holds(run_threads, siblings(), case)
    for _, (measured, predicted) in run_threads(4, peaks_of_siblings, case.plan):
        assert measured == predicted
