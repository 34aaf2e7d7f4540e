"""What all data ranks must have alike: options of the optimizer, and replicated weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.host_numbers import HostNumbers
from shardwise.comm.world import World
from shardwise.core.errors import InputError
from shardwise.engine.prediction import Predictor
from shardwise.parallel.data import same_on_ranks
from tests.engine.cases import ranks_of
from tests.engine.tensors import sent
from tests.pool import run_gloo, run_threads

CHANGED = 3  # the step, counted from 0, before which the last rank changes something


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    return module(batch).square().mean()


def change(world: World, what: str, module: nn.Module, group: dict[str, Any]) -> None:
    """On the last rank: an option of a group, or weights."""
    if world.rank < world.size - 1:
        return
    group |= {"lr": {"lr": 0.5}, "betas": {"betas": (0.5, 0.9)}}.get(what, {})
    if what == "weights":
        with torch.no_grad():
            for p in module.parameters():
                p.add_(1.0)


def in_engine(world: World, plan: str, what: str) -> str:
    """When an engine raises what; the bytes of the steps before are those predicted."""
    theory = Predictor(model(), plan, rank=world.rank, loss=loss, check_every=2)
    options: dict[str, Any] = {"optimizer": sw.AdamW(lr=0.01), "loss": loss, "check_every": 2}
    engine = sw.parallelize(model(), plan, world, **options)
    for step in range(6):
        if step == CHANGED:
            change(world, what, engine.model, engine.optimizer.param_groups[0])
        batch = rows(step, engine.data_rank)
        try:
            engine.step(batch)
        except InputError as error:
            return f"step {step}: {error}"
        assert sent(engine) == theory.of(batch).in_step(step)
    return ""


LR = "lr of the group 'default' of engine.optimizer on data rank {}: 0.5; on data rank 0: 0.01"
BETAS = "betas of the group 'default' of engine.optimizer on data rank {}: [0.5, 0.9]; on data rank"
WEIGHT = "weight on data rank {}, whose norm is"


@pytest.mark.parametrize("plan", ["dp2", "dp2 zero1", "dp2 zero3", "dp2 fp16"])
@pytest.mark.parametrize(("what", "said"), [("lr", LR), ("betas", BETAS)])
def test_engines_compare_options_in_each_step(plan: str, what: str, said: str):
    """Option, rank and both values are named on all ranks, before the update."""
    for text in run_threads(2, in_engine, plan, what):
        assert text.startswith(f"step {CHANGED}: ") and said.format(1) in text


@pytest.mark.parametrize("plan", ["dp2 pp2 1f1b:2", "dp2 zero2 accumulate:2", "dp2 pp2 2bw:2"])
def test_ranks_that_agree_train_on(plan: str):
    """Nothing is raised, and the bytes are those of any step."""
    assert run_threads(ranks_of(plan), in_engine, plan, "") == [""] * ranks_of(plan)


@pytest.mark.parametrize("plan", ["dp2", "dp_replicate2 dp_shard2 zero3"])
def test_engines_compare_the_weights_that_ranks_replicate(plan: str):
    """In a step of `check_every`, at no byte; the parameter and the ranks are named."""
    ranks = ranks_of(plan)
    for text in run_threads(ranks, in_engine, plan, "weights"):
        assert text.startswith("step 4: ") and WEIGHT.format(ranks - 1) in text


def in_loop(world: World, how: str, what: str) -> str:
    """When a plain loop raises what."""
    size = 2 if "HYBRID" in how else None
    wrapped = sw.DDP(model(), world) if how == "DDP" else None
    wrapped = wrapped or sw.FSDP(model(), how, world=world, shard_size=size)
    optim = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    for step in range(8):
        if step == CHANGED:
            change(world, what, wrapped, optim.param_groups[0])
        try:
            loss(wrapped, rows(step, world.rank)).backward()
        except InputError as error:
            return f"step {step}: {error}"
        if what != "step" or world.rank == 0 or step != CHANGED:
            optim.step()
        optim.zero_grad()
    return ""


@pytest.fixture(params=["ready", "late"])
def numbers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether sums are on the host when they have been begun, or later, as on a GPU."""
    monkeypatch.setattr(same_on_ranks, "EVERY", 4)
    monkeypatch.setattr(HostNumbers, "ready", request.param == "ready")
    return request.param


@pytest.mark.parametrize("how", ["DDP", "FULL_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("", ""),
        ("lr", "lr of group 0 of the AdamW on data rank {}: 0.5; on data rank 0: 0.01"),
        ("step", "lr of group 0 of the AdamW on data rank 1: none: no optimizer has stepped"),
        ("weights", WEIGHT),
    ],
)
def test_plain_loops_compare_them_too(how: str, what: str, said: str, numbers: str):
    """Options of an optimizer with the next backward pass; where a GPU computes, one later."""
    ranks = 4 if "HYBRID" in how else 2
    found = run_threads(ranks, in_loop, how, what)
    if what == "weights" and how == "FULL_SHARD":  # each rank may change its own shard
        said = ""
    step = CHANGED + 1 + (numbers == "late")
    for text in found:
        assert said.format(ranks - 1) in text
        assert text.startswith(f"step {step}: ") if said else not text


def test_processes_compare_them():
    """The exchange is that of any step."""
    for text in run_gloo(2, in_engine, "dp2", "lr"):
        assert LR.format(1) in text


def rounded(world: World, factor: float) -> str:
    """What is said where weights of rank 1 are multiplied by a factor."""
    wrapped = sw.DDP(model(), world)
    with torch.no_grad():
        for p in wrapped.parameters():
            p.mul_(factor**world.rank)
    with pytest.warns(UserWarning, match=r"on data rank 1 differ .* by rounding"):
        loss(wrapped, rows(0, world.rank)).backward()
    return ""


def test_weights_that_differ_by_rounding_are_a_warning():
    """Hosts with other processors round otherwise; that is no mistake of a program."""
    run_gloo(2, rounded, 1 + 1e-6)
