"""Large weights that their stage uses in other ways too, under halved backward passes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm.world import World
from tests.engine.cases import regression, settled
from tests.engine.tensors import mine
from tests.parallel.test_linear import WIDE, batch
from tests.pool import run_threads


def penalty_in(block: "Wide", x: Tensor) -> Tensor:
    return torch.tanh(block.lin(x)) + block.lin.weight.square().mean()


def decoder(block: "Wide", x: Tensor) -> Tensor:
    return torch.tanh(block.lin(x)) @ block.lin.weight


def transposed(block: "Wide", x: Tensor) -> Tensor:
    return torch.tanh(block.lin(x)) @ block.lin.weight.t()


def elementwise(block: "Wide", x: Tensor) -> Tensor:
    return torch.tanh(block.lin(x)) * block.lin.weight[0]


def twice(block: "Wide", x: Tensor) -> Tensor:
    return block.lin(torch.tanh(block.lin(x)))


def of_a_constant(block: "Wide", x: Tensor) -> Tensor:
    """Behind the fork that the constant's way leads into."""
    return block.lin(torch.tanh(x * block.lin(torch.ones_like(x))))


def looked_up(block: "Wide", x: Tensor) -> Tensor:
    """An embedding whose table is the layer's weight."""
    ids = (100 * x[:, 0].detach()).long() % WIDE
    return torch.tanh(block.lin(x)) + functional.embedding(ids, block.lin.weight)


USES = [penalty_in, decoder, transposed, elementwise, twice, of_a_constant, looked_up]


class Wide(nn.Module):
    """A large layer, whose weight is used in other ways too."""

    def __init__(self, use: Callable[["Wide", Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.use = nn.Linear(WIDE, WIDE), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def halved(world: World, plan: str, use: Callable[[Wide, Tensor], Tensor]) -> list[float]:
    """The losses of three steps on two such blocks."""
    model = settled(nn.Sequential(Wide(use), Wide(use), Wide(use), nn.Linear(WIDE, 3)))
    optimizer = sw.Optim(torch.optim.SGD, lr=1e-4)
    engine = sw.parallelize(model, plan, world, optimizer=optimizer, loss=regression)
    return [engine.step(mine(engine, batch(step))).loss for step in range(3)]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("plan", ["pp2 1f1b:2 fp64", "pp2 zb-h1:2 fp64", "pp2 zb-v:2 fp64"])
def test_a_weight_that_is_used_in_other_ways_too_is_trained_once(plan: str, use: Any):
    """Whatever half of the backward pass makes a part of its gradient."""
    expected = run_threads(1, halved, "fp64", use)[0]
    for losses in run_threads(2, halved, plan, use):
        assert losses == pytest.approx(expected, rel=1e-11)
