"""Checkpoints on disk, from any layout on a tensor axis to any other, and to none."""

from pathlib import Path

import pytest

import shardwise as sw
from shardwise.comm.world import World, alone
from tests.engine.cases import Case, Task, build, ranks_of
from tests.engine.tensors import ADAMW, gpt_task, mine
from tests.parallel.layers import task
from tests.pool import run_gloo

PLANS = [
    *("tp2", "tp4 sp", "tp3", "dp2 tp2", "dp2 tp2 zero2", "dp2 tp2 sp zero3"),
    "dp2 zero3",
]
#: Rings in which each two of the seven follow each other once, one way or the other.
RINGS = [[PLANS[i * d % 7] for i in range(8)] for d in (1, 2, 4)]
HEADS = "6 heads, 2 for keys"


def work_of(name: str) -> Task:
    """Packed and plain weights whose heads ranks share; a vocabulary that nothing divides."""
    return gpt_task(name) if name == HEADS else task(name)


def stepped(world: World, name: str, plan: str, folder: str, first: int) -> list[float]:
    """The losses of two steps under a plan, from the newest checkpoint on; they end in another."""
    work = work_of(name)
    engine = build(world, work, Case(f"{plan} fp64", clip=0.5, **ADAMW))
    if first:
        sw.load(engine, folder)
    losses = [engine.step(mine(engine, work.batch(first + k))).loss for k in range(2)]
    sw.save(engine, folder)
    return losses


def check(name: str, plans: list[str], folder: Path) -> None:
    """Runs that take over from each other are one run of one process."""
    engine = build(alone(), work_of(name), Case("fp64", clip=0.5, **ADAMW))
    for place, plan in enumerate(plans):
        first = 2 * place
        straight = [engine.step(work_of(name).batch(first + k)).loss for k in range(2)]
        for losses in run_gloo(ranks_of(plan), stepped, name, plan, str(folder), first):
            assert losses == pytest.approx(straight, rel=1e-10), (plan, first)


@pytest.mark.full
@pytest.mark.parametrize(
    "ring",
    [RINGS[0], *(pytest.param(ring, marks=pytest.mark.full) for ring in RINGS[1:])],
    ids=" - ".join,
)
def test_a_run_goes_on_under_any_other_plan(ring: list[str], tmp_path: Path):
    """Embedding, heads that ranks share, norms: their weights and the optimizer's state."""
    check(HEADS, ring, tmp_path)


@pytest.mark.full
def test_packed_weights_go_through_files(tmp_path: Path):
    """Queries, keys and values in one weight, fewer keys than ranks; and back."""
    plans = ["tp4", "dp2 tp2 zero3", "dp2 zero1", "tp3 sp", "tp2"]
    check("packed qkv, 6 heads, 1 for keys", plans, tmp_path)
