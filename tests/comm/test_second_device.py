"""Every number that ranks exchange is made on the world's device, in a dtype of its own.

The device is that of tests/second_device.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import shardwise as sw
from shardwise.comm.tiers.host_memory import HostNumbers
from shardwise.comm.world import World, world_of
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.models import gpt
from shardwise.techniques.data.apply import driver_of
from tests.engine.cases import share, small_gpt, text
from tests.engine.loops import rows, wrap
from tests.engine.zoo import make
from tests.pool import run_gloo
from tests.second_device import DEVICE, SecondDevice, run_on_device

PLANS = (
    *("dp2 zero1 fp16", "dp2 zero2 bf16", "dp_replicate2 dp_shard2 zero3", "tp2 dp2 sp zero3"),
    *("pp2 zb-h1:2", "pp2 dp2 zero1 gpipe:2", "pp2 2bw:2", "dp2 zero3 tile:2"),
    "dp2 tp2 | blocks.0: dp4 zero3",
)


def on_device(batch: Any, world: World) -> Any:
    return tree_map(lambda x: x.to(world.device, non_blocking=True), batch)


def looped(mode: SecondDevice, world: World, how: str) -> list[list[str]]:
    """A loop that clips, evaluates, and takes the state; the reads in each step."""
    model = wrap(how, make("stack").double(), world)
    optim, reads = torch.optim.Adam(model.parameters(), lr=0.05, foreach=False), []
    for step in range(3):
        mode.reads.clear()
        x = on_device(rows(step, world.rank), world)
        model(x).square().mean().backward()
        reads.append(list(mode.reads))
        with sw.no_sync(model):
            model(x).square().mean().backward()
        model(x).square().mean().backward()
        sw.clip_grad_norm(model, 1.0)
        optim.step()
        optim.zero_grad()
    with torch.no_grad():
        model.eval()(x)
    sw.full_state_dict(model)
    sw.unwrap(model)(x)
    return reads


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are not on the host when their sum has been begun, as on a GPU."""
    monkeypatch.setattr(HostNumbers, "ready", False)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("how", ["DDP", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
def test_a_plain_loop_sends_tensors_of_its_device(how: str) -> None:
    """A backward pass ends without a wait: each reads, where it begins, what the one before summed.
    So do clipping, evaluation, the state and unwrapping.
    """
    ranks = 4 if "HYBRID" in how else 2
    assert run_on_device(ranks, looped, how) == [[[], ["tolist"], ["tolist"]]] * ranks


def differs(mode: SecondDevice, world: World, what: str) -> None:
    """Rank 1 is a step ahead, and does `what` next."""
    model = sw.FSDP(make("stack").double(), world=world)
    driver = driver_of(model)
    assert driver is not None
    driver.consensus.rounds += world.rank
    x = on_device(rows(0, world.rank), world)
    model(x).square().mean().backward()
    acts: dict[str, Callable[[], Any]] = {
        "train": lambda: model(x).sum().backward(),
        "state_dict": model.state_dict,
        "full_state_dict": lambda: sw.full_state_dict(model),
        "unwrap": lambda: sw.unwrap(model),
        "evaluate": lambda: torch.no_grad()(model)(x),
    }
    with pytest.raises(InputError, match="in which data ranks differ"):
        acts[what]()


@pytest.mark.cases(5)
@pytest.mark.parametrize("what", ["train", "state_dict", "full_state_dict", "unwrap", "evaluate"])
@pytest.mark.usefixtures("late")
def test_ranks_that_differ_are_found_before_weights_are_used(what: str) -> None:
    """Where a device would have to be waited for, at the next use of the weights."""
    run_on_device(2, differs, what)


def skips(mode: SecondDevice, world: World) -> list[bool]:
    """Rank 1 uses one of two layers; whether each has a gradient."""
    both: Any = sw.DDP(nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), world)
    both.forward = lambda x: sum(layer(x).sum() for layer in list(both)[: 2 - world.rank])
    both(on_device(torch.ones(2, 3), world)).backward()
    return [layer.weight.grad is not None for layer in both]


@pytest.mark.usefixtures("late")
def test_a_parameter_that_another_rank_uses_has_a_gradient_at_once() -> None:
    """A rank without a gradient waits for the others', so that all update the same."""
    assert run_on_device(2, skips) == [[True, True, False]] * 2


def piped(mode: SecondDevice, world: World) -> None:
    """Two steps of a pipe, its state, and the module again."""
    model = sw.Pipe(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)), 2, world=world)
    x = on_device(torch.ones(4, 6), world)
    for _ in range(2):
        model(x).square().mean().backward()
    sw.full_state_dict(model)
    sw.unwrap(model)(x)


def test_a_pipe_sends_tensors_of_its_device() -> None:
    """So do the stages of a plain loop."""
    run_on_device(2, piped)


def stepped(mode: SecondDevice, world: World, plan: str) -> list[list[str]]:
    """Steps, evaluation, and the state; the reads of each step."""
    optimizer, clip = sw.AdamW(lr=0.01, foreach=False), None if "2bw" in plan else 1.0
    engine = sw.parallelize(small_gpt(), plan, world, optimizer=optimizer, loss=gpt.loss, clip=clip)
    reads = []
    for step in range(3):
        mode.reads.clear()
        batch = share(text(step, 8), engine.data_rank, engine.data_ranks)
        engine.step(on_device(batch, world))
        reads.append(list(mode.reads))
    engine.evaluate(on_device(batch, world))
    sw.full_state_dict(engine)
    return reads


@pytest.mark.parametrize("plan", PLANS)
def test_an_engine_sends_tensors_of_its_device(plan: str) -> None:
    """Under every technique: start, steps with clipping, evaluation, state; one read in a step."""
    for reads in run_on_device(Plan.parse(plan).size, stepped, plan):
        # the others look at tokens, and at each update
        if not any(word in plan for word in ("tp", "tile", "2bw")):
            assert reads[1:] == [["tolist"]] * 2


def saved(world: World, folder: str) -> list[str]:
    with SecondDevice():
        own = world_of(world.rank, world.size, DEVICE, world.links)
        engine = sw.parallelize(small_gpt(), "dp2 zero3", own, loss=gpt.loss)
        engine.step(on_device(share(text(0, 8), own.rank, own.size), own))
        sw.save(engine, folder)
        return sorted(sw.load(engine, folder, missing_ok=True))


def test_checkpoints_send_tensors_of_the_device(tmp_path: Path) -> None:
    """What ranks tell each other to save and to load."""
    assert run_gloo(2, saved, str(tmp_path)) == [[], []]
