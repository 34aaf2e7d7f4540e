"""Hooks of the program on parameters, registered before or after wrapping: as under torch's DDP."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from tests.engine.cases import difference
from tests.engine.loops import rows, wrap
from tests.engine.zoo import make
from tests.pool import run_threads

Seen = list[list[float]]
State = dict[str, Tensor]


def hang(model: nn.Module, seen: Seen) -> None:
    """Hooks that look at gradients, scale them, and clip them after accumulation."""
    for number, p in enumerate(model.parameters()):
        if number % 2:
            p.register_hook(lambda grad: grad * 0.5)
        p.register_post_accumulate_grad_hook(partial(look_and_clip, seen))


def look_and_clip(seen: Seen, p: Tensor) -> None:
    assert p.grad is not None
    seen.append(p.grad.flatten().tolist())
    p.grad.clamp_(-1e-2, 1e-2)


def loop(model: nn.Module, share: int, reduce: Callable[[nn.Module], None], passes: int) -> State:
    """Three steps of some passes, all but the last of which are not synchronised."""
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        for micro in range(passes):
            last = micro == passes - 1
            with nullcontext() if last or reduce is not nothing else sw.no_sync(model):
                model(rows(passes * step + micro, share)).square().mean().backward()
        reduce(model)
        optim.step()
        optim.zero_grad()
    return model.state_dict()


def nothing(model: nn.Module) -> None:
    """Wrapped modules reduce by themselves."""


def on_rank(world: World, how: str, passes: int, *, early: bool) -> tuple[State, Seen]:
    model, seen = make("stack").double(), Seen()
    if early:
        hang(model, seen)
    model = wrap(how, model, world)
    if not early:
        hang(model, seen)
    return loop(model, world.rank, nothing, passes), seen


def as_torch_does(passes: int) -> list[tuple[State, Seen]]:
    """Two copies whose gradients are averaged after their own hooks."""
    copies = [make("stack").double() for _ in range(2)]
    seen: list[Seen] = [Seen(), Seen()]
    for copy, own in zip(copies, seen, strict=True):
        hang(copy, own)
    optims = [torch.optim.SGD(copy.parameters(), lr=0.5) for copy in copies]
    for step in range(3):
        for rank, copy in enumerate(copies):
            for micro in range(passes):
                copy(rows(passes * step + micro, rank)).square().mean().backward()
        for ps in zip(*(copy.parameters() for copy in copies), strict=True):
            mean = torch.stack([p.grad for p in ps if p.grad is not None]).mean(0)
            for p in ps:
                p.grad = mean.clone()
        for optim in optims:
            optim.step()
            optim.zero_grad()
    return [(copy.state_dict(), own) for copy, own in zip(copies, seen, strict=True)]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("how", "passes"), [("DDP", 1), ("DDP", 2), ("FULL_SHARD", 1), ("SHARD_GRAD_OP", 1)]
)
def test_hooks_see_and_change_the_gradients_of_their_rank(how, passes, early):
    """Of all passes since the gradients were dropped; what they change is averaged."""
    found = run_threads(2, partial(on_rank, early=early), how, passes)
    for (state, seen), (right, ours) in zip(found, as_torch_does(passes), strict=True):
        assert [len(grad) for grad in sorted(seen)] == [len(grad) for grad in sorted(ours)]
        for own, wanted in zip(sorted(seen), sorted(ours), strict=True):
            assert own == pytest.approx(wanted, rel=1e-8, abs=1e-12)
        for name, value in right.items():
            assert difference(state[name], value) <= 1e-10, name


@pytest.mark.parametrize("how", ["DDP", "FULL_SHARD"])
def test_a_hook_that_drops_the_gradient_is_refused(how):
    """As an optimizer in a hook does, which would update this rank's copy by its own gradient."""
    model = wrap(how, make("stack").double(), alone())
    p = next(model.parameters())
    p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with pytest.raises(InputError, match=r"drops the gradient of .*optim.step\(\) in the loop"):
        model(rows(0, 0)).sum().backward()


class Aside(nn.Module):
    """Its loss does not come from its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.loss: Any = None
        with torch.no_grad():  # ranks in threads share torch's generator
            for p in self.parameters():
                p.copy_(torch.linspace(-0.4, 0.4, p.numel()).view_as(p))

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.layer(x).square().mean()
        return x


def aside(world: World, how: str) -> State:
    model: Any = wrap(how, Aside().double(), world)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(rows(step, world.rank))
        model.loss.backward()
        if step % 2:
            optim.step()
            optim.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("how", ["DDP", "SHARD_GRAD_OP", "FULL_SHARD"])
def test_gradients_accumulate_if_the_loss_does_not_come_from_the_output(how):
    """Two backward passes a step, which no output announces."""
    model = Aside().double()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        for rank in range(2):
            model(rows(step, rank))
            (model.loss / 2).backward()
        if step % 2:
            optim.step()
            optim.zero_grad()
    state = run_threads(2, aside, how)[0]
    for name, value in model.state_dict().items():
        assert difference(state[name], value) <= 1e-10, name
