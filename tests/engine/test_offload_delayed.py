"""`offload:optim-delayed`: updates are made beside the next step, and used one step late."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.plan.plan import Plan
from shardwise.engine.engine import Engine
from shardwise.verify.oracles.oracle import Oracle
from shardwise.verify.oracles.oracles import oracles_of
from tests.engine.cases import Case, Task, build, difference
from tests.engine.tensors import full_parameters, mine
from tests.pool import run_threads

TASK = Task()
STEPS, SAVED, EVALUATED = 7, 3, 5


def step_of(engine: Engine, task: Task, step: int) -> Any:
    """One step on this rank's rows."""
    return engine.step(mine(engine, task.batch(step)))


def trained(world: World, task: Task, case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a run that saves before a step, and evaluates before another."""
    engine, losses = build(world, task, case), []
    for step in range(case.steps):
        if step == SAVED:
            engine.boxes()
        if step == EVALUATED:
            engine.evaluate(mine(engine, task.batch(step)))
        losses.append(step_of(engine, task, step).loss)
    engine.flush()
    return losses, full_parameters(engine.flats)


def test_a_checkpoint_and_an_evaluation_apply_the_update_that_waits():
    """A run with both in the middle is a simulation that uses the waiting gradient there."""
    case = Case("dp2 zero2 fp64 offload:optim-delayed=1", steps=STEPS)
    recipe, plan = sw.Optim(case.kind, **case.options), Plan.parse(case.plan)
    one, expected = oracles_of(TASK.make, plan, recipe, TASK.loss, TASK.tokens).exact, []
    assert isinstance(one, Oracle)
    for step in range(STEPS):
        if step in (SAVED, EVALUATED):
            one.finish()
        expected.append(one.step(TASK.batch(step)))
    for losses, weights in run_threads(2, trained, TASK, case):
        assert losses == pytest.approx(expected, rel=1e-10)
        for name, weight in one.weights.values().items():
            assert difference(weights[name], weight) <= 1e-10, name


def rates(world: World, case: Case) -> dict[str, Tensor]:
    """The weights of a run whose rate changes between steps."""
    engine = build(world, TASK, case)
    engine.updates.updater.late = True
    for step in range(4):
        engine.set_lr(0.02 / (step + 1))
        step_of(engine, TASK, step)
        engine.set_lr(5.0)  # must be no rate of any update
    engine.flush()
    return full_parameters(engine.flats)


def test_an_update_has_the_rate_of_its_own_step():
    """What a scheduler sets after a step is not what the update of that step uses, however late."""
    weights = run_threads(1, rates, Case("dp1 fp64 offload:optim-delayed=0"))[0]
    model = TASK.make().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    waiting: list[Any] = []
    for step in range(4):
        TASK.loss(model, TASK.batch(step)).backward()
        waiting.append(([p.grad for p in model.parameters()], 0.02 / (step + 1)))
        for p in model.parameters():
            p.grad = None
        while len(waiting) > (step < 3):
            gradients, rate = waiting.pop(0)
            optimizer.param_groups[0]["lr"] = rate
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
    for name, p in model.named_parameters():
        assert difference(weights[name], p.detach()) <= 1e-10, name


def test_a_load_drops_the_update_that_waits(tmp_path: Path):
    """What has been loaded goes on as what was saved, to the last bit."""
    engine = build(alone(), TASK, Case("fp64 offload:optim-delayed=0"))
    engine.updates.updater.late = True
    step_of(engine, TASK, 0)
    sw.save(engine, tmp_path)
    saved = [step_of(engine, TASK, step).loss for step in (1, 2)]
    sw.load(engine, tmp_path)
    assert [step_of(engine, TASK, step).loss for step in (1, 2)] == saved


def late_overflow(world: World) -> tuple[list[bool], list[bool]]:
    """Of five delayed steps, which were skipped, and after which an update was pending."""
    words = "dp2 zero2 fp16 offload:optim-delayed=0"
    engine = build(world, TASK, Case(words, options={"lr": 0.01, "eps": 1e-4}))
    skipped, pending = list[bool](), list[bool]()
    for step in range(5):
        before = [box.tensor.clone() for box in engine.boxes()] if step == 2 else []
        if step == 2:
            engine.scale.value = 2.0**60
        skipped.append(step_of(engine, TASK, step).skipped)
        pending.append(engine.updates.updater.pending)
        if step == 2:
            engine.scale.value = 2.0**10
            after = [box.tensor for box in engine.boxes()]
            assert all(map(torch.equal, before, after))
    return skipped, pending


def test_an_overflow_of_a_delayed_step_is_skipped():
    """The update of an overflowing step is never made, neither then nor one step later."""
    for skipped, pending in run_threads(2, late_overflow):
        assert skipped == [False, False, True, False, False]
        assert pending == [True, True, False, True, True]
