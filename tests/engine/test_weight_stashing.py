"""PipeDream and 2BW at run time: the stale weights of the paper, to the last digit, and no more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import RankError
from shardwise.core.plan.plan import Plan
from shardwise.core.schedule import live_tokens as memory
from shardwise.core.schedule.asynchronous import pipedream, two_buffered
from shardwise.core.schedule.library import build
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.schedule import Schedule
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.options import EngineOptions
from shardwise.engine.predict import Predictor
from shardwise.techniques.pipeline import stage_module, weight_stashing
from shardwise.techniques.pipeline.pipelined import Pipelined
from shardwise.verify.comparison import compare
from shardwise.verify.costs import Theory
from shardwise.verify.finding import Finding
from shardwise.verify.oracles.async_oracle import AsyncOracle
from shardwise.verify.oracles.oracles import Oracles, oracles_of
from shardwise.verify.report import largest as largest_of
from tests.engine.cases import settled
from tests.pool import run_threads

RECIPE = sw.AdamW(lr=1e-2, eps=1e-4)
WIDTH = 7


def stack() -> nn.Module:
    """Layers of both kinds: linear saves a transposed view of its weight, norm the weight."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4)]
    return settled(nn.Sequential(*layers).double())


def loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(torch.tanh(model(part[0])), part[1])


def batch(rows: int, seed: int, device: Any) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, rows, WIDTH, generator=own, dtype=torch.float64, device=device)
    return x, y


def engine(world: World, plan: str, recipe: OptimizerSpec = RECIPE, **options: Any) -> Engine:
    return sw.parallelize(stack(), f"{plan} fp64", world, optimizer=recipe, loss=loss, **options)


def proved(world: World, plan: str, recipe: OptimizerSpec = RECIPE) -> Finding:
    """Three steps beside the simulation."""
    torch.set_num_threads(1)
    run, oracles = engine(world, plan, recipe), simulated(plan, recipe)
    return compare(run, oracles, theory(world, plan, recipe), batch, 3)


def theory(
    world: World,
    plan: str,
    recipe: OptimizerSpec = RECIPE,
    make: Callable[[], nn.Module] = stack,
) -> Theory:
    """The predictions of this rank."""
    options = EngineOptions(optimizer=recipe, loss=loss)
    return Predictor(make(), f"{plan} fp64", options, rank=world.rank, ranks=world.size).of


def simulated(plan: str, recipe: OptimizerSpec = RECIPE, **how: Any) -> Oracles:
    """The oracle of a plan, whose order of updates may be another."""
    oracles = oracles_of(stack, Plan.parse(f"{plan} fp64"), recipe, loss)
    assert isinstance(oracles.exact, AsyncOracle)
    oracles.exact.how = replace(oracles.exact.how, **how)
    return oracles


def largest(findings: list[Finding]) -> float:
    return max(map(largest_of, findings))


@contextmanager
def scheduled(schedule: Schedule) -> Iterator[None]:
    """Every plan has this schedule."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_module, "schedule_of", lambda _: lower(schedule))
        yield


#: A schedule, and the order that the oracle is to follow: how many updates a microbatch has seen.
NOT_BY_WORD: dict[str, tuple[Schedule, dict[str, Any]]] = {
    "vertical": (pipedream(3, 6, vertical=True), {"version": lambda _, i: max(0, i - 2)}),
    "three batches": (
        two_buffered(2, 4, batches=3),
        {"microbatches": 12, "update": 4, "version": lambda _, i: max(0, i // 4 - 1)},
    ),
}


def proved_by(world: World, name: str) -> Finding:
    """Three steps of a schedule without a word, beside the oracle that is told its order."""
    schedule, how = NOT_BY_WORD[name]
    plan = f"pp{schedule.ranks} {'2bw:4' if name != 'vertical' else 'pipedream:6'}"
    return compare(engine(world, plan), simulated(plan, **how), theory(world, plan), batch, 3)


@pytest.mark.parametrize("name", NOT_BY_WORD)
def test_schedules_without_a_word(name: str):
    """Vertical sync, and batches of 2BW with no drain between them, are the simulation too."""
    schedule, _ = NOT_BY_WORD[name]
    with scheduled(schedule):
        assert largest(run_threads(schedule.ranks, proved_by, name)) <= 1e-10


@dataclass
class Counted:
    """A watch that counts the buffers of flat parameters that are in memory."""

    buffers: list[Any]
    most: int = 0

    def now(self) -> float:
        return 0.0

    def __call__(self, step: Any, start_s: float, end_s: float) -> None:
        gone = torch.UntypedStorage._expired
        self.most = max(self.most, sum(not gone(one) for one in self.buffers))


def alive(world: World, plan: str) -> tuple[int, int]:
    """The most buffers of one flat group at once in a step, and how many are left after it."""
    run = engine(world, plan)
    flat = run.flats[0]
    seen = Counted([flat.full.untyped_storage()._weak_ref()])
    renew = flat.renew

    def renewed() -> None:
        renew()
        seen.buffers.append(flat.full.untyped_storage()._weak_ref())

    flat.renew = renewed
    assert isinstance(run.passes, Pipelined)
    run.passes.watch = seen
    for step in range(2):
        run.step(batch(16, step, "cpu"))
    left = sum(not torch.UntypedStorage._expired(one) for one in seen.buffers)
    return seen.most, left


@pytest.mark.parametrize("plan", ["pp2 pipedream:8", "pp3 pipedream:8", "pp4 pipedream:8"])
def test_versions_in_memory(plan: str):
    """As many versions are in memory at once as the formula says, p-s, and one after the step."""
    p = Plan.parse(plan).size
    formula = memory.versions(build("pipedream:8", p))
    assert formula == tuple(p - s for s in range(p))
    assert run_threads(p, alive, plan) == [(count, 1) for count in formula]


def test_updates_are_no_writes_to_autograd(monkeypatch: pytest.MonkeyPatch):
    """Counted as writes, updates make autograd refuse backward passes through other versions."""
    recipe = sw.SGD(lr=0.1, momentum=0.9, foreach=True)
    assert largest(run_threads(2, proved, "pp2 pipedream:4", recipe)) <= 1e-10
    monkeypatch.setattr(weight_stashing, "_uncounted", lambda _: nullcontext())
    with pytest.raises(RankError, match="modified by an inplace operation"):
        run_threads(2, proved, "pp2 pipedream:4", recipe)


def broken(world: World) -> list[Tensor]:
    """Weights after a step whose third microbatch raises on its way, and one more."""
    seen: list[int] = []

    def failing(model: nn.Module, part: Any) -> Tensor:
        seen.append(0)
        if len(seen) == fails:
            raise ZeroDivisionError
        return loss(model, part)

    fails = 0
    run = sw.parallelize(stack(), "pipedream:4 fp64", world, optimizer=sw.SGD(lr=0.1), loss=failing)
    run.step(batch(8, 0, "cpu"))
    fails, before = len(seen) + 1, [p.detach().clone() for p in run.model.parameters()]
    with pytest.raises(ZeroDivisionError):
        run.step(batch(8, 1, "cpu"))
    after = [p.detach().clone() for p in run.model.parameters()]
    run.step(batch(8, 1, "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return [p.detach().clone() for p in run.model.parameters()]


def test_a_step_that_breaks_off():
    """Parameters are the newest version after it, and the next step goes on from there."""
    [found] = run_threads(1, broken)
    oracle = simulated("pipedream:4", sw.SGD(lr=0.1)).exact
    for step in range(2):
        oracle.step(batch(8, step, "cpu"))
    for own, whole in zip(found, oracle.model.parameters(), strict=True):
        torch.testing.assert_close(own, whole.detach(), rtol=1e-12, atol=1e-12)


def test_a_norm_that_nobody_knows():
    """Clipping is refused with the lines to write; an infinite bound is none."""

    def clipped(world: World, clip: float) -> float | None:
        return engine(world, "pipedream:2", clip=clip).step(batch(4, 0, "cpu")).grad_norm

    with pytest.raises(RankError, match=r"clip=1.0 with pipedream:2.*1f1b:2"):
        run_threads(1, clipped, 1.0)
    assert run_threads(1, clipped, float("inf")) == [None]
