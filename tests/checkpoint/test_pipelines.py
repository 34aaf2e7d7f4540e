"""Checkpoints from any shape of pipeline to any other, and to none."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.checkpoint.folder import find
from shardwise.checkpoint.load import load
from shardwise.checkpoint.open_checkpoint import open_checkpoint
from shardwise.comm.world import World, alone
from shardwise.engine.box import Box
from shardwise.engine.engine import Engine
from tests.checkpoint.cuts import save_by_all
from tests.engine.cases import ranks_of, settled, share, vectors
from tests.engine.pipelines import ADAMW, WIDTH
from tests.pool import run_threads

PLANS = [
    *("pp2 1f1b:4", "pp4 gpipe:4", "pp2 dp2 zero3 1f1b:2", "pp2 tp2 zero1 1f1b:2"),
    *("pp2 interleaved:4x2", "dp2 zero3", "ddp"),
]
#: Each two of the seven, one way: 1, 2 and 4 are a perfect difference set of 7.
PAIRS = [(PLANS[i], PLANS[(i + d) % 7]) for i in range(7) for d in (1, 2, 4)]
LATE = 3  # the step in which the side layers are used for the first time


class Block(nn.Module):
    """A block with a layer that is used late, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.side, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, late: int) -> Tensor:
        x = x + torch.tanh(self.up(self.norm(x)))
        return x + torch.tanh(self.side(x)) if late else x


class Net(nn.Module):
    """Four blocks between two layers that have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, late: int) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, late)
        return self.last(x)


TABLE = {"blocks.*.up": "colwise_gather_output"}


def net() -> nn.Module:
    return settled(Net())


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, and by the width of the last tensor, whether the side layers are used."""
    x, y = vectors(step, rows=9, width=WIDTH)
    return x, y, x.new_zeros(len(x), int(step >= LATE))


def loss(model: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, y, late = given
    return functional.mse_loss(model(x, late.shape[1]), y)


SIDE = {f"blocks.{i}.side.{p}" for i in range(4) for p in ("weight", "bias")}
NEVER = {f"blocks.{i}.never.{p}" for i in range(4) for p in ("weight", "bias")}


def build(world: World, plan: str) -> Engine:
    """The engine of the plan; only one with a tensor axis needs the table."""
    return sw.parallelize(
        net(),
        f"{plan} fp64",
        world,
        optimizer=sw.AdamW(**ADAMW["options"]),
        loss=loss,
        clip=0.5,
        units=1,
        table=TABLE if "tp" in plan else None,
    )


def steps(engine: Engine, first: int, last: int) -> list[float]:
    own = [share(batch(step), engine.data_rank, engine.data_ranks) for step in range(first, last)]
    return [engine.step(one).loss for one in own]


def kept(world: World, plan: str, at: int) -> tuple[list[Box], dict[str, Any], list[float]]:
    """What a rank keeps after so many steps, and five more losses of it, as without a break."""
    engine = build(world, plan)
    steps(engine, 0, at)
    scalars = engine.scalars()
    boxes = [
        Box(b.name, b.shape, b.offsets, b.sizes, b.tensor.detach().clone(), b.replica)
        for b in engine.boxes()
    ]
    return boxes, scalars, steps(engine, at, at + 3)


def continued(world: World, plan: str, folder: Path) -> tuple[list[float], set[str]]:
    """Another engine goes on from the folder; and this rank's parameters without a state."""
    engine = build(world, plan)
    opened = open_checkpoint(find(folder))
    load(folder, engine.loading(opened.tensors, opened.scalars["engine"]), alone())
    engine.load_scalars(opened.scalars["engine"])
    engine.loaded()
    pairs = zip(engine.optimizer.names, chain(*engine.optimizer.targets), strict=True)
    without = {name for name, p in pairs if not engine.optimizer.state.get(p)}
    at = opened.scalars["step"]
    return steps(engine, at, at + 3), without


@pytest.fixture(scope="module")
def straight() -> list[float]:
    """Losses of one process without a break."""
    return run_threads(1, kept, "ddp", 2)[0][2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of each plan after two steps, made when it is asked for."""
    made: dict[str, Path] = {}

    def folder(plan: str) -> Path:
        if plan not in made:
            ranks = run_threads(ranks_of(plan), kept, plan, 2)
            scalars = [scalars for _, scalars, _ in ranks]
            assert all(one == scalars[0] for one in scalars)
            made[plan] = tmp_path_factory.mktemp("saved")
            boxes = [boxes for boxes, _, _ in ranks]
            save_by_all(made[plan], boxes, {"step": 2, "engine": scalars[0]})
        return made[plan]

    return folder


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_any_plan_goes_on_where_any_other_stopped(
    here: str, there: str, folders: Callable[[str], Path], straight: list[float]
):
    """The same losses as without a break; what had no gradient yet begins afresh, in its stage.

    A weight in two stages, moments and step counts through real files; uneven microbatches.
    """
    folder = folders(here)
    found = run_threads(ranks_of(there), continued, there, folder)
    assert all(losses == pytest.approx(straight, rel=1e-10) for losses, _ in found)
    assert set[str]().union(*(without for _, without in found)) == SIDE | NEVER
