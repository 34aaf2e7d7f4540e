"""Ranks that raise or go other ways than the others: all of them end, with an error."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.comm.start.launch import spawn
from shardwise.comm.world import World, init
from shardwise.core.errors import InputError, RankError
from tests.engine import pipelines
from tests.engine.cases import Case, build, ranks_of, rows_task, settled, share, vectors
from tests.engine.tensors import mine
from tests.engine.test_step import Fragile
from tests.pool import run_gloo


def fragile() -> torch.nn.Module:
    return settled(Fragile())


def trains(folder: Path, plan: str) -> None:
    """Rank 1 raises in the second step: in a backward pass, or in a stage."""
    world = init("cpu")
    (folder / f"{world.rank}.pid").write_text(str(os.getpid()))
    staged = plan.startswith("pp")
    engine = build(world, rows_task(pipelines.fragile if staged else fragile), Case(f"{plan} fp64"))
    if staged:
        pipelines.break_in(engine, "blocks.1", 4)
    for step in range(50):
        if isinstance(engine.model, Fragile) and world.rank == 1 and step == 1:
            engine.model.goes_off, engine.model.forwards = "backward", 1
        engine.step(mine(engine, vectors(step)))


class Skips(torch.nn.Module):
    """ConsistencyCheck blocks, one of which is left out, as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        skipped, x = int(x[0, 0]), self.enter(x)
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = x + block(x).tanh()
        return self.leave(x)


def skips(plan: str) -> str:
    """What ranks that leave out different blocks are told."""
    world = init("cpu")
    task = rows_task(lambda: settled(Skips()))
    engine = build(world, task, Case(f"{plan} fp64"))
    x, y = vectors(0)
    x[0, 0] = 1 + world.rank
    try:
        engine.step((x, y))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "plan", ["dp2 zero3", *(pytest.param(p, marks=pytest.mark.full) for p in ("dp2", "dp2 zero2"))]
)
def test_ranks_that_gather_other_units_are_told(plan: str):
    """Blocks are alike, and one's weights in another's place are no error of shapes."""
    for said in spawn(skips, 2, (plan,)):
        assert ("in the units that they gathered" in said) == ("zero3" in plan)


def goes_on(world: World) -> str:
    """What ranks are told of which one has caught an error of its own, and gone on."""
    engine = build(world, rows_task(lambda: settled(torch.nn.Linear(6, 6))), Case("dp2 fp64"))
    for step in range(4):
        x, y = share(vectors(step), engine.data_rank, engine.data_ranks)
        try:
            engine.step((x[:, :3] if world.rank and step == 1 else x, y))
        except RuntimeError:
            continue
        except InputError as error:
            return str(error)
    return ""


def test_a_rank_that_goes_on_after_an_error_of_its_own_is_told():
    """It is a step ahead of the others from then on, and their gradients are of other batches."""
    for said in run_gloo(2, goes_on):
        assert "in the number of steps so far" in said


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


BREAKS = [
    ("dp3 zero3", "in the middle of backward"),
    pytest.param("pp4 1f1b:3", "(?s)in the middle of a stage.*>>F1.0<<", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("plan", "said"), BREAKS)
def test_a_process_that_raises_ends_the_others(tmp_path: Path, plan: str, said: str):
    """Those that wait for it are ended, and its own error, with the place, is the one raised."""
    with pytest.raises(RankError, match=said) as caught:
        spawn(partial(trains, tmp_path, plan), ranks_of(plan))
    assert caught.value.rank == 1
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == ranks_of(plan) and not any(is_alive(pid) for pid in pids)
