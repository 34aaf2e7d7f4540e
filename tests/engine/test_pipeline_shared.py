"""What several stages hold or use: weights, whole blocks, parameters outside of all layers."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.plan import Plan
from shardwise.core.plan_schedule import schedule_of
from tests.engine.cases import Case, ranks_of, rows_task, settled, vectors
from tests.engine.pipelines import ADAMW, WIDTH, half_frozen, task
from tests.engine.tensors import assert_counted, assert_parity, train, whole_run
from tests.engine.test_state import assembled, resumed, saved, straight
from tests.engine.zoo import Stack
from tests.pool import run_threads


class Ends(Stack):
    """The last layer has the first one's weight, and both are products, which need it backward."""

    def __init__(self) -> None:
        super().__init__(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.blocks[5].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Repeated(Stack):
    """Two blocks, gone through three times, as in ALBERT."""

    def __init__(self) -> None:
        once = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        super().__init__(*once * 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


class Outside(Stack):
    """Parameters that are no layer's: one is used at the beginning, one in each stage."""

    def __init__(self) -> None:
        super().__init__(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.place = nn.Parameter(torch.zeros(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.place
        for block in self.blocks:
            x = torch.tanh(block(x) * self.scale)
        return x


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    return settled(kind())


WORK = {
    kind.__name__.lower(): rows_task(partial(made, kind), partial(vectors, rows=9))
    for kind in (Ends, Repeated, Outside)
}
PLANS = [
    *("pp2 1f1b:3", "pp4 gpipe:2", "pp2 zb-v:4", "pp2 interleaved:4x2", "pp2 dp2 zero3 1f1b:2"),
    *("pp2 dp2 zero3 zb-v:4", "pp2 dp2 zero2 zb-h1:4", "pp2 dp2 zero3 interleaved:2x2"),
]


def stages_of(plan: str) -> int:
    """How many stages the plan's schedule has."""
    schedule = schedule_of(Plan.parse(plan))
    return len(schedule.home) if schedule else 1


#: Two blocks are two layers, however often they are gone through: two stages at most.
CASES = [
    (plan, name) for plan in PLANS for name in WORK if name != "repeated" or stages_of(plan) == 2
]


@pytest.mark.parametrize(("plan", "name"), CASES)
def test_what_stages_share(plan: str, name: str):
    """One process's losses, norms, gradients and weights, wherever the holders are."""
    case = Case(f"{plan} fp64", clip=0.5, **ADAMW)
    ranks = run_threads(ranks_of(plan), train, WORK[name], case)
    assert_parity(ranks, whole_run(WORK[name], case), 1e-10)
    assert_counted(ranks)


@pytest.mark.parametrize(("here", "there"), [("pp2 1f1b:3", "ddp"), ("zero3", "pp2 dp2 gpipe:2")])
def test_a_frozen_stage_is_saved_and_goes_on(here: str, there: str):
    """A rank without anything to train has boxes of its weights, and no state."""
    work = task("half frozen")
    assert work.make is half_frozen
    one, two = Case(f"{here} fp64", **ADAMW), Case(f"{there} fp64", **ADAMW)
    kept = run_threads(ranks_of(here), saved, work, one, 2)
    arrays = assembled(kept)
    found = run_threads(ranks_of(there), resumed, work, two, arrays, kept[0][1], range(2, 5))
    losses, _ = run_threads(1, straight, work, Case("fp64", **ADAMW), 5)[0]
    for own, _, _ in found:
        assert own == pytest.approx(losses[2:], rel=1e-10)
