"""`offload:param` and `sw.FSDP(cpu_offload=True)`: parameters rest in host memory too."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload

import shardwise as sw
from shardwise.comm.tiers import Tiers
from shardwise.comm.world import World
from shardwise.core.plan import Plan
from shardwise.engine import shard
from shardwise.engine.meter import Meter
from shardwise.engine.shard import driver_of, flats_of
from tests.engine.cases import Case, Task, build, difference, settled, share
from tests.pool import run_threads

TASK = Task()


def measured(world: World, plan: str) -> tuple[int, int, list[Any], list[int]]:
    """Of the last of three steps: the most bytes of parameters on the device, the leaks."""
    engine = build(world, TASK, Case(plan))
    meter = Meter(engine)
    for step in range(3):
        with meter:
            engine.step(share(TASK.batch(step), engine.data_rank, engine.data_ranks))
    units = [
        sum(group.plan.padded * group.full.element_size() for group in unit.groups)
        for unit in engine.data.units.order
    ]
    device = engine.memory()
    world.barrier()  # until then the other thread may hold a message of this one
    gc.collect()
    return meter.most["parameters"], device["parameters"], meter.leaks(), units


@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", ["dp1", "dp2 zero3"])
def test_the_device_has_few_parameters_at_once(plan: str):
    """At most three units are on the device in a step, none between steps; nothing leaks."""
    ranks = Plan.parse(plan).size
    for most, between, leaks, units in run_threads(ranks, measured, f"{plan} fp32 offload:param"):
        assert 0 < most <= sum(sorted(units)[-3:]) < sum(units)
        assert between == 0
        assert leaks == []


# --- a plain loop -----------------------------------------------------------------------------


def perceptron() -> nn.Module:
    layers = nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 5), nn.Tanh(), nn.Linear(5, 3)
    return settled(nn.Sequential(*layers))


def rows(step: int, rank: int, ranks: int) -> Tensor:
    drawn = torch.randn(12, 6, generator=torch.Generator().manual_seed(step)).double()
    return drawn.tensor_split(ranks)[rank]


def plain_loop(world: World, backwards: int, how: dict[str, Any]) -> tuple[Any, ...]:
    """Four steps of `backwards` backward passes each: weights, norms, tiers, bytes gathered."""
    model = perceptron().double()
    if how:
        sw.FSDP(model, world=world, units=1, **how)
    data = driver_of(model)
    flats = flats_of(data.units.order) if data else []
    tiers = flats[0].tiers if flats else Tiers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    places, norms = set[str](), list[float]()
    for step in range(4):
        for k in range(backwards):
            x = rows(4 * step + k, world.rank, world.size)
            model(x).square().sum(1).mean().backward()
        norms.append(float(sw.clip_grad_norm(model, 0.3)))
        for p in model.parameters():
            assert p.grad is not None
            places |= {tiers.of(p.detach()), tiers.of(p.grad)}
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    whole = sum(flat.full.untyped_storage().nbytes() for flat in flats)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    return state, norms, places, whole, {key.kind for key in tiers.ledger.copy()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("asked", [True, CPUOffload(offload_params=True)])
def test_fsdp_in_a_plain_loop(ranks: int, backwards: int, asked: Any):
    """Adam in a user's loop updates shards in host memory, also of accumulated gradients."""
    ((wanted, norms, *_),) = run_threads(1, plain_loop, backwards, {})
    runs = run_threads(ranks, plain_loop, backwards, {"cpu_offload": asked})
    for state, found, places, whole, kinds in runs:
        for name, value in wanted.items():
            assert difference(state[name], value) <= 1e-10, name
        assert found == pytest.approx(norms, rel=1e-10)
        assert places == {"host"}
        assert whole == 0
        assert {"device_to_host", "host_to_device"} <= kinds


@pytest.mark.parametrize("plan", ["offload:param", "dp2 zero3 offload:param", "tp2 offload:param"])
def test_weights_go_to_the_device_unit_by_unit(plan: str, monkeypatch: pytest.MonkeyPatch):
    """Real weights stay where the program made them until their unit is laid out."""

    def cast(model: nn.Module, dtype: Any, _: Any, fill: Any = None, **options: Any) -> None:
        shard.cast_whole(model, dtype, torch.device("meta"), fill, **options)
        assert not any(p.is_meta for p in model.parameters())  # none has gone there

    def losses(world: World) -> list[float]:
        engine = build(world, TASK, Case(f"{plan} fp64"))
        return [engine.step(share(TASK.batch(0), engine.data_rank, engine.data_ranks)).loss]

    ranks = Plan.parse(plan).completed(2 if "2" in plan else 1).size
    want = run_threads(ranks, losses)
    monkeypatch.setattr("shardwise.engine.engine.cast_whole", cast)
    assert run_threads(ranks, losses) == want
