"""Models that only a pipeline meets, what stages share, ranks without rows, the order of calls."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_schedule import schedule_of
from shardwise.engine.engine import Engine
from tests.engine.cases import Case, Task, oracle, settled, text
from tests.engine.pipelines import ADAMW, MODELS, SGD, task
from tests.engine.tensors import assert_counted, assert_parity, gpt_task, holds, train
from tests.pool import run_threads

SHARED = [
    *("pp2 1f1b:3", "pp4 gpipe:2", "pp2 zb-v:4", "pp2 interleaved:4x2", "pp2 dp2 zero3 1f1b:2"),
    *("pp2 dp2 zero3 zb-v:4", "pp2 dp2 zero2 zb-h1:4", "pp2 dp2 zero3 interleaved:2x2"),
]


def stages_of(plan: str) -> int:
    """How many stages the plan's schedule has."""
    schedule = schedule_of(Plan.parse(plan))
    return len(schedule.home) if schedule else 1


def untold(step: int) -> dict[str, Tensor]:
    """Text of which the first and the last rows have no target that counts."""
    batch = text(step, rows=8)
    batch["targets"][:2] = -100
    batch["targets"][-1] = -100
    return batch


CASES = [
    *((f"pp4 {word}:8", "deep", ADAMW) for word in ("gpipe", "1f1b", "dapple", "zb-h1")),
    *((f"pp4 {word}:8", "deep", ADAMW) for word in ("zb-v", "dualpipe-v")),
    *((f"pp4 {word}:8x2", "deep", ADAMW) for word in ("interleaved", "bfs")),
    *(
        (plan, name, SGD)
        for plan in ("pp2 1f1b:3", "pp4 gpipe:2", "pp2 dp2 zero3 zb-h1:4")
        for name in ("half frozen", "late frozen", "tuples", "dicts", "skips", "idle")
    ),
    *((plan, name, ADAMW) for plan in SHARED for name in ("ends", "outside")),
    # two blocks are two layers, however often they are gone through: two stages at most
    *((plan, "repeated", ADAMW) for plan in SHARED if stages_of(plan) == 2),
    *(("pp2 1f1b:3", f"used {end}", ADAMW) for end in ("first", "last")),
    *(
        (plan, "no tokens", ADAMW)
        for plan in ("pp2 1f1b:4", "pp2 zb-h1:8", "pp2 dp2 zero2 gpipe:4")
    ),
]


@pytest.mark.cases(12)
@pytest.mark.parametrize(("plan", "name", "options"), CASES)
def test_models(plan: str, name: str, options: dict[str, Any]):
    """Frozen stages, tuples, dicts, skips, parameters that nobody or several stages use.

    fp64: 3 steps are one process's, 1e-10; bytes and memory as predicted. Nine rows, which eight
    microbatches do not divide; gradients are clipped.
    """
    work = task(name) if name in MODELS else Task(gpt_task("tied").make, untold)
    holds(run_threads, work, Case(f"{plan} fp64", clip=0.5, **options))


def lopsided(engine: Engine, batch: Any) -> Any:
    """All rows are the first data rank's."""
    return batch if engine.data_rank == 0 else tree_map(lambda x: x[:0], batch)


@pytest.mark.parametrize("plan", ["pp2 dp2 zero3 1f1b:3", "pp2 dp2 zb-v:4"])
def test_a_data_rank_without_rows(plan: str):
    """It takes part with weight zero, in every stage."""
    case = Case(f"{plan} fp64", clip=0.5, **ADAMW)
    ranks = run_threads(4, train, task(), case, lopsided)
    assert_parity(ranks, oracle(task(), case), 1e-10)
    assert_counted(ranks)


# --- modules that are called in another order than they are defined in ----------------------------


class Turned(nn.Module):
    """Its norm is defined first and called last; a value of its input decides what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape
        if columns != 4 or rows > 64:
            raise ValueError("another input")
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


class Towers(nn.Module):
    """Two encoders, called by the loss, the last one first, and what joins them, defined first."""

    def __init__(self) -> None:
        super().__init__()
        self.joins = nn.Linear(4, 4)
        self.image, self.text = Turned(), Turned()

    def forward(self, x: Tensor) -> Tensor:
        return self.joins(self.text(x)) * self.image(x.flip(1))


class Twice(Turned):
    """Its first block is called once more after all others."""

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](super().forward(x))


def by_towers(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Their outputs meet in the loss."""
    x = batch["x"]
    texts = model.get_submodule("joins")(model.get_submodule("text")(x))
    return (texts - model.get_submodule("image")(x.flip(1))).square().mean()


def by_output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def by_two_passes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Towards the outputs of a pass without a gradient."""
    with torch.no_grad():
        target = model(batch["x"].flip(0))
    return (model(batch["x"]) - target.tanh()).square().mean()


def turned(world: World, kind: type[nn.Module], loss: Any, plan: str) -> list[float]:
    """The losses of three steps."""
    plan = f"{plan} fp64" if world.size > 1 else "fp64"
    made = sw.parallelize(settled(kind()), plan, world, loss=loss, optimizer=sw.SGD(lr=0.1))
    x = torch.arange(16.0, dtype=torch.float64).view(4, 4).sin()
    return [made.step({"x": x}).loss for _ in range(3)]


ORDERS = [
    (Turned, by_output, "pp2 1f1b:2"),
    (Towers, by_output, "pp2 gpipe:2"),
    (Towers, by_towers, "pp2 1f1b:2"),
    (Towers, by_towers, "pp2 interleaved:2x2"),
    (Twice, by_output, "pp2 1f1b:2"),
    (Turned, by_two_passes, "pp2 1f1b:1"),
]


@pytest.mark.parametrize(("kind", "loss", "plan"), ORDERS)
def test_a_pipeline_is_cut_in_the_order_of_calls(kind: type[nn.Module], loss: Any, plan: str):
    """The order in which the loss calls modules decides, not that of their definition."""
    [expected] = run_threads(1, turned, kind, loss, plan)
    for losses in run_threads(2, turned, kind, loss, plan):
        assert losses == pytest.approx(expected, rel=1e-12)
