"""`sw.save` and `sw.load` of a module in a loop of the program's own, with its optimizer."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

import shardwise as sw
from shardwise.checkpoint.contents import describe
from shardwise.checkpoint.export import export
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from tests.checkpoint.own import Own
from tests.engine.loops import rows
from tests.pool import run_gloo

KINDS: dict[str, Any] = {
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.1, amsgrad=True),
    "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "Adagrad": torch.optim.Adagrad,
    "Own": Own,
}


class Counted(nn.Module):
    """A layer with a buffer, and with Python state that it gives as its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 7), 0
        self.register_buffer("seen", torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        """The scale depends on the number of calls in training."""
        y = self.layer(x)
        if self.training:
            self.calls += 1
            self.seen += 1
        return y * (1 + 0.01 * self.calls)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "at": (torch.full((2,), self.calls), None)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        assert state["at"][1] is None and state["at"][0].eq(self.calls).all()


def build() -> nn.Module:
    torch.manual_seed(0)
    late = nn.Linear(7, 7)  # has no gradient in the first steps
    return nn.Sequential(Counted(), nn.Tanh(), late, nn.Linear(7, 5), nn.Linear(5, 3)).double()


class Sum(nn.Module):
    """A chain whose third layer is used from step 3 on."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = build()

    def forward(self, x: Tensor, late: int) -> Tensor:
        first, act, branch, second, last = self.chain
        h = act(first(x))
        return last(second(h + branch(h) if late else h))


def optimizer_of(kind: str, module: nn.Module) -> Optimizer:
    """Two groups with rates of their own."""
    named = list(module.named_parameters())
    weights = [p for n, p in named if n.endswith("weight")]
    biases = [p for n, p in named if not n.endswith("weight")]
    return KINDS[kind]([{"params": weights}, {"params": biases, "lr": 0.003}], lr=0.02)


def wrap(how: str, module: nn.Module, world: World) -> nn.Module:
    if how == "Pipe":
        return sw.Pipe(module, chunks=1, world=world)
    if how == "DDP":
        return sw.DDP(module, world)
    return sw.FSDP(module, how, units=1, world=world)


def part(
    world: World, folder: str, how: str, kind: str, steps: range, later: bool
) -> dict[str, Any]:
    """Steps of a loop, from a checkpoint if `later`, to a checkpoint if not."""
    module = wrap(how, Sum(), world)
    optim = optimizer_of(kind, module)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)
    if later:
        extra = sw.load(module, folder, optimizer=optim)
        scheduler.load_state_dict(extra["scheduler"])
        assert extra["at"] == steps.start
    for step in steps:
        x = rows(step, 0) if how == "Pipe" else rows(step, 0)[world.rank :: world.size]
        scale = 1 if how == "Pipe" else world.size
        (scale * module(x, int(step >= 3)).square().sum()).backward()
        optim.step()
        optim.zero_grad()
        scheduler.step()
    if not later:
        extra = {"at": steps.stop, "scheduler": scheduler.state_dict()}
        assert sw.save(module, folder, extra, optimizer=optim).name == "step-000001"
    found = sw.full_state_dict(module)
    return {key: value for key, value in found.items() if not key.endswith("_extra_state")}


def straight(kind: str) -> dict[str, Tensor]:
    """The same in one process without a break."""
    module = Sum()
    optim = optimizer_of(kind, module)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)
    for step in range(6):
        module(rows(step, 0), int(step >= 3)).square().sum().backward()
        optim.step()
        optim.zero_grad()
        scheduler.step()
    return dict(module.state_dict())


def run(ranks: int, *args: Any) -> dict[str, Tensor]:
    return part(alone(), *args) if ranks == 1 else run_gloo(ranks, part, *args)[0]


PAIRS = [
    ("FULL_SHARD", 2, "DDP", 1),
    ("DDP", 1, "FULL_SHARD", 3),
    ("SHARD_GRAD_OP", 3, "Pipe", 2),
    ("Pipe", 2, "FULL_SHARD", 2),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("here", "before", "there", "after"), PAIRS)
def test_a_loop_goes_on(tmp_path: Path, kind: str, here: str, before: int, there: str, after: int):
    """On other ranks, wrapped otherwise: as without a break, rates and numbers of states too."""
    run(before, str(tmp_path), here, kind, range(2), False)
    found = run(after, str(tmp_path), there, kind, range(2, 6), True)
    want = straight(kind)
    for key in (key for key in want if not key.endswith("_extra_state")):
        assert torch.allclose(found[key], want[key], rtol=1e-10, atol=1e-12), key
