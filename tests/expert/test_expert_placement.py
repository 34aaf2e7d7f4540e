"""Experts that move between ranks: the training is the same, with the bytes of their new places."""

from dataclasses import replace
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.techniques.expert.apply import ExpertLayout
from shardwise.techniques.expert.expert_moves import Loads
from shardwise.techniques.expert.placement import balanced
from tests.engine.cases import Case, Task, build, foreseen, oracle, ranks_of
from tests.engine.tensors import (
    ADAMW,
    Held,
    assert_counted,
    assert_parity,
    mine,
    pieces,
    sent,
    train,
    whole_run,
)
from tests.expert import moe
from tests.pool import run_gloo


def test_busy_experts_are_on_different_ranks():
    """The busiest expert goes to the rank with the least load that has room."""
    assert balanced([9, 8, 1, 2], 2) == ((0, 2), (1, 3))
    assert balanced([5, 5, 5, 5], 2) == ((0, 2), (1, 3))
    assert balanced([9, 1, 1, 1], 2) == ((0, 3), (1, 2))


def trained(world: World, task: Task, case: Case, folder: str = "") -> Held:
    """Three steps; the experts are placed anew before the second and before the third."""
    engine, held, theory = build(world, task, case), Held(), foreseen(world, task, case)
    loads, order = oracle(task, case).loads, dict[str, tuple[int, ...]]()
    for step in range(3):
        own = mine(engine, task.batch(step))
        metrics = engine.step(own)
        held.losses.append(metrics.loss)
        held.norms.append(metrics.grad_norm)
        held.grads.append(pieces(engine.gradients(), "grad/"))
        told = theory.of(own).in_step(step, loads=[_placed(each, order) for each in loads[step]])
        held.bytes.append((sent(engine), told))
        if step == 0:
            swapped = {f"blocks.{n}.moe": _odd(engine.plan.ep) for n in range(2)}
            own_layers = engine.sharded.of(ExpertLayout).loads
            placed = sw.place_experts(engine, {n: p for n, p in swapped.items() if n in own_layers})
        else:
            placed = sw.place_experts(engine)
        order = {name: sum(by_rank, ()) for name, by_rank in placed.items()}
    held.memory = engine.memory(), theory.of(mine(engine, task.batch(2))).memory
    held.weights = pieces(engine.boxes(), "model/")
    if folder:
        sw.save(engine, folder)
    return held


def _odd(ranks: int) -> list[list[int]]:
    """Four experts: every rank gets others than at first."""
    return [list(range(r, 4, ranks)) for r in range(ranks)][::-1]


def _placed(loads: Loads, order: dict[str, tuple[int, ...]]) -> Loads:
    """The loads in the order of the ranks that have the experts."""
    choices = {
        name: tuple(tuple(row[e] for e in order.get(name, range(len(row)))) for row in by_rank)
        for name, by_rank in loads.choices.items()
    }
    return replace(loads, choices=choices)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("topk", "dp4 ep2 zero2 accumulate:2"),
        ("sigmoid", "dp2 ep2 pp2 1f1b:2"),
        ("expert-choice", "dp2 tp2 ep2 zero3 sp"),
        ("topk", "dp2 ep2 zero3 offload:optim recompute:full"),
        ("sigmoid", "dp4 ep4 zero1"),
    ],
)
def test_training_does_not_change(name: str, plan: str):
    """Losses, norms, gradients and weights are one process's, wherever the experts are."""
    task, case = moe.task(name, 1.25, rows=9), Case(f"{plan} fp64", clip=0.5, seeds=True, **ADAMW)
    found = run_gloo(ranks_of(plan), trained, task, case)
    assert_parity(found, whole_run(task, case), 1e-10)
    assert_counted(found)


@pytest.mark.full
def test_masters_move_in_bf16():
    """In bf16 the fp32 weights and moments move too: the losses are bit for bit the same."""
    task, case = moe.task("topk"), Case("dp4 ep2 zero3 bf16", clip=0.5, **ADAMW)
    moved, stayed = (run_gloo(4, run, task, case) for run in (trained, train))
    assert [held.losses for held in moved] == [held.losses for held in stayed]


def reloaded(world: World, task: Task, plan: str, folder: str) -> Held:
    engine, held = build(world, task, Case(f"{plan} fp64", **ADAMW)), Held()
    sw.place_experts(engine, {"blocks.1.moe": [[3, 0], [2, 1]]})
    sw.load(engine, folder)
    held.losses.append(engine.step(mine(engine, task.batch(3))).loss)
    return held


@pytest.mark.full
def test_checkpoints_name_experts_by_their_numbers(tmp_path: Path):
    """A checkpoint of one placement is continued under another, and under none."""
    task, plan = moe.task("topk"), "dp4 ep2 zero3"
    run_gloo(4, trained, task, Case(f"{plan} fp64", clip=0.5, **ADAMW), str(tmp_path))
    expected = whole_run(task, Case("dp2 fp64", clip=0.5, steps=4, **ADAMW)).losses[3]
    for after in ("dp2 ep2", "dp4 ep2 zero1"):
        for held in run_gloo(ranks_of(after), reloaded, task, after, str(tmp_path)):
            assert held.losses == [pytest.approx(expected, rel=1e-10)]


@pytest.mark.parametrize(
    ("placement", "allowed"),
    [
        (None, "the loads of a step"),
        ({"blocks.0.moe": [[0, 1, 2, 2]]}, "1 lists of 4, with every expert once"),
        ({"blocks.0.moe": [[0, 1], [2, 3]]}, "1 lists of 4"),
    ],
)
def test_refused(placement: dict[str, list[list[int]]] | None, allowed: str):
    """What is no placement of the experts is refused."""
    engine = build(alone(), moe.task("topk"), Case("dp1 fp64"))
    with pytest.raises(InputError, match=allowed):
        sw.place_experts(engine, placement)
