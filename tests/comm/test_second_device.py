"""Every number that ranks exchange is made on the world's device (tests/second_device.py)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import shardwise as sw
from shardwise.comm.host_numbers import HostNumbers
from shardwise.comm.world import World
from shardwise.core.plan import Plan
from shardwise.models import gpt
from tests.engine.cases import share, small_gpt, text
from tests.engine.loops import rows, wrap
from tests.engine.zoo import make
from tests.second_device import SecondDevice, run_on_device

PLANS = (
    *("dp2 ddp", "dp2 zero1", "dp2 zero2 bf16", "dp2 zero3", "dp_replicate2 dp_shard2 zero3"),
    *("dp2 fp16 zero1", "tp2 sp", "tp2 dp2 zero3 recompute:full", "pp2 1f1b:2", "pp2 zbh1:2"),
    *("pp2 dp2 zero1 gpipe:2", "pp2 2bw:2", "tp2 tile:2", "dp2 tp2 | blocks.0: dp4 zero3"),
)


def on_device(mode: SecondDevice, batch: Any, world: World) -> Any:
    return tree_map(lambda x: x.to(world.device, non_blocking=True), batch)


def looped(mode: SecondDevice, world: World, how: str, folder: Path) -> list[list[str]]:
    """A loop that clips, evaluates, and takes the state; the reads of each step."""
    model = wrap(how, make("stack").double(), world)
    optim, reads = torch.optim.Adam(model.parameters(), lr=0.05, foreach=False), []
    for step in range(3):
        mode.reads.clear()
        x = on_device(mode, rows(step, world.rank), world)
        with sw.no_sync(model):
            model(x).square().mean().backward()
        model(x).square().mean().backward()
        sw.clip_grad_norm(model, 1.0)
        optim.step()
        optim.zero_grad()
        reads.append(list(mode.reads))
    with torch.no_grad():
        model.eval()(x)
    sw.full_state_dict(model)
    sw.unwrap(model)(x)
    return reads


@pytest.mark.parametrize("how", ["DDP", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
def test_a_plain_loop_sends_tensors_of_its_device(how: str, tmp_path: Path) -> None:
    """Wrapping, training, clipping, evaluation, the state and unwrapping."""
    run_on_device(4 if "HYBRID" in how else 2, looped, how, tmp_path)


def piped(mode: SecondDevice, world: World) -> None:
    """Two steps of a pipe, its state, and the module again."""
    torch.manual_seed(0)
    model = sw.Pipe(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)), 2, world=world)
    x = on_device(mode, torch.ones(4, 6), world)
    for _ in range(2):
        model(x).square().mean().backward()
    sw.full_state_dict(model)
    sw.unwrap(model)(x)


def test_a_pipe_sends_tensors_of_its_device() -> None:
    """So do the stages of a plain loop."""
    run_on_device(2, piped)


def stepped(mode: SecondDevice, world: World, plan: str, folder: Path) -> list[list[str]]:
    """Steps, evaluation, the state, a checkpoint saved and loaded; the reads of each step."""
    async_update = "2bw" in plan
    engine = sw.parallelize(
        small_gpt(),
        plan,
        world,
        optimizer=sw.AdamW(lr=0.01, foreach=False),
        loss=gpt.loss,
        tokens=gpt.tokens,
        clip=None if async_update else 1.0,
    )
    reads = []
    for step in range(3):
        mode.reads.clear()
        batch = share(text(step, 8), engine.data_rank, engine.data_ranks)
        engine.step(on_device(mode, batch, world))
        reads.append(list(mode.reads))
    engine.evaluate(on_device(mode, batch, world))
    sw.full_state_dict(engine)
    sw.save(engine, folder)
    sw.load(engine, folder)
    return reads


@pytest.mark.parametrize("plan", PLANS)
def test_an_engine_sends_tensors_of_its_device(plan: str, tmp_path: Path) -> None:
    """Under every technique: the start, steps with clipping, evaluation, state and checkpoints."""
    run_on_device(Plan.parse(plan).size, stepped, plan, tmp_path)
