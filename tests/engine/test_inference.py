"""torch.inference_mode around what is wrapped: the same outputs, and nothing left that it made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World, alone
from tests.engine.cases import settled, squares
from tests.pool import run_gloo, run_threads


class Normed(nn.Module):
    """A buffer that its layers change in place, and one that the forward replaces."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        x.add_(0)  # an input of this mode may only be written to in this mode
        return self.leave(torch.relu(self.norm(self.enter(x)))) + self.seen


def vectors(seed: int) -> Tensor:
    own = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=own, dtype=torch.float64)


WRAPS: dict[str, Callable[[nn.Module, World], nn.Module]] = {
    "plain": lambda module, _: module,
    "ddp": lambda module, world: sw.DDP(module, world=world),
    "zero2": lambda module, world: sw.FSDP(module, "SHARD_GRAD_OP", world=world),
    "zero3": lambda module, world: sw.FSDP(module, units=1, world=world),
    "pipe": lambda module, world: sw.Pipe(module, 1, world=world),
}


def loop(world: World, wrap: str, inside: bool) -> list[float]:
    """Inference before and between steps, in both modes; wrapped inside of the mode or outside."""
    torch.set_num_threads(1)
    plain = settled(Normed().double())
    with torch.inference_mode(inside):
        model = WRAPS[wrap](plain, world)
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    found: list[float] = []
    for step in range(3):
        with torch.inference_mode():
            found.append(model.train(step != 1)(vectors(step).clone()).sum().item())
        loss = model.train()(vectors(step)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("wrap", [name for name in WRAPS if name != "plain"])
def test_a_plain_loop(wrap: str, inside: bool):
    """Wrapped modules train after inference as the plain module does."""
    expected = pytest.approx(loop(alone(), "plain", inside=False), rel=1e-12)
    for found in run_threads(2, loop, wrap, inside):
        assert found == expected


def test_between_processes():
    """The buffers of messages, which are made in the first call, are no tensors of the mode."""
    expected = loop(alone(), "plain", inside=False)
    for wrap in ("zero3", "pipe"):
        assert run_gloo(2, loop, wrap, False)[1] == pytest.approx(expected, rel=1e-12)


def engine_loop(world: World, plan: str, inside: bool) -> list[float]:
    torch.set_num_threads(1)
    model = settled(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double())
    with torch.inference_mode(inside):
        engine = sw.parallelize(model, plan, world, optimizer=sw.AdamW(lr=0.05), loss=squares)
    found: list[float] = []
    for step in range(2):
        mine = vectors(step).chunk(engine.data_ranks)[engine.data_rank]
        with torch.inference_mode(inside):
            found.append(engine.evaluate(mine)[0])
            out = engine.outputs(lambda m: m(vectors(9)), torch.zeros(8, 6, dtype=torch.float64))
        found += [out.sum().item(), engine.step(mine).loss]
    return found


@pytest.mark.parametrize("plan", ["dp2 zero1 fp64", "dp2 zero3 fp64", "pp2 1f1b:2 fp64"])
def test_an_engine(plan: str):
    """`parallelize`, `evaluate` and `outputs` in the mode change no number of later steps."""
    expected = pytest.approx(engine_loop(alone(), "fp64", False), rel=1e-12)
    for found in run_threads(2, engine_loop, plan, True):
        assert found == expected


def unwrapped(world: World, wrap: str) -> Any:
    model = WRAPS[wrap](settled(Normed().double()), world)
    with torch.inference_mode():
        state = sw.full_state_dict(model)
        model = sw.unwrap(model)
    model(vectors(0)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return any(x.is_inference() for x in state.values())


@pytest.mark.parametrize("wrap", ["ddp", "zero3", "pipe"])
def test_unwrapped_in_the_mode(wrap: str):
    """`unwrap` and `full_state_dict` return tensors that may be trained."""
    assert run_threads(2, unwrapped, wrap) == [False, False]
