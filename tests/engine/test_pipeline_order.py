"""A module that is called in another order than it is defined in, in the stage it belongs to."""

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World
from shardwise.core.errors import RankError
from tests.engine.cases import settled
from tests.pool import run_threads


class Turned(nn.Module):
    """Its norm is defined first and called last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


def turned(world: World, beside: dict[str, str] | None) -> list[float]:
    """The losses of three steps."""
    made = sw.parallelize(
        settled(Turned()),
        "pp2 1f1b:2 fp64" if world.size > 1 else "fp64",
        world,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        optimizer=sw.SGD(lr=0.1),
        beside=beside,
    )
    x = torch.arange(16.0, dtype=torch.float64).view(4, 4).sin()
    return [made.step({"x": x}).loss for _ in range(3)]


def test_a_module_is_put_in_the_stage_it_is_called_in():
    """What is called later than it is defined runs beside= the module named, and only there."""
    [expected] = run_threads(1, turned, None)
    for losses in run_threads(2, turned, {"norm": "blocks.3"}):
        assert losses == pytest.approx(expected, rel=1e-12)
    with pytest.raises(RankError, match=r'beside=\{"norm": "blocks\.3"\}'):
        run_threads(2, turned, None)
    with pytest.raises(RankError, match=r"Given: beside=3.*Write instead: beside="):
        run_threads(2, turned, 3)
