"""Control numbers do not depend on the program's default dtype and device, and stay exact."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.plan.plan import Plan
from tests.engine.cases import regression, settled, share, vectors
from tests.pool import run_threads

DTYPES = (torch.bfloat16, torch.float16, torch.float64)
PLANS = ("dp2 zero3", "pp2 gpipe:2", "tp2")
STEPS = 60


def net() -> nn.Module:
    one, other = (nn.Linear(6, 6, dtype=torch.float32) for _ in range(2))
    return settled(nn.Sequential(one, nn.Tanh(), other))


def plain(world: World, how: str, device: str | None) -> float:
    """A plain loop; the last loss."""
    model = {"DDP": sw.DDP, "FSDP": sw.FSDP, "Pipe": partial(sw.Pipe, chunks=2)}[how](
        net(), world=world
    )
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (t.float() for t in vectors(0, 4))
    with torch.device(device or "cpu"):
        for _ in range(STEPS):
            loss = (model(x) - y).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
    sw.full_state_dict(model)
    return loss.item()


def planned(world: World, plan: str, device: str | None) -> float:
    """An engine's steps; the last loss."""
    engine = sw.parallelize(
        net(), plan, world, loss=regression, optimizer=sw.SGD(lr=0.1), clip=1.0, table=TABLE
    )
    x, y = (t.float() for t in vectors(0, 8))
    batch = share((x, y), engine.data_rank, engine.data_ranks)
    with torch.device(device or "cpu"):
        for _ in range(STEPS):
            loss = engine.step(batch).loss
        engine.evaluate(batch)
    sw.full_state_dict(engine)
    return loss


TABLE = {"0": "colwise", "2": "rowwise"}
CASES = [
    *((plain, how, 2) for how in ("DDP", "FSDP", "Pipe")),
    *((planned, plan, Plan.parse(plan).size) for plan in PLANS),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("body", "how", "ranks"), CASES)
def test_no_default_changes_a_step(body: Callable[..., float], how: str, ranks: int) -> None:
    """Sixty steps under each default dtype, and on each default device, end with the same loss."""
    expected = run_threads(ranks, body, how, None)
    assert expected[0] < 1
    for dtype in DTYPES:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            assert run_threads(ranks, body, how, None) == expected
        finally:
            torch.set_default_dtype(before)
    assert run_threads(ranks, body, how, "meta") == expected
