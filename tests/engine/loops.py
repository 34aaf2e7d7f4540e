"""Plain PyTorch loops, for a wrapped module and, the ranks' losses averaged, a plain one."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload

import shardwise as sw
from shardwise.comm.world import World
from tests.engine.cases import settled

Loop = Callable[["Side"], None]


@dataclass
class Side:
    """One of the two: the module, this rank's share of a step's rows, and what may differ.
    `backward(loss_of)` runs the loss of every share this side is responsible for.
    """

    model: nn.Module
    shares: list[int]
    ranks: int
    wrapped: bool
    seen: list[float] = field(default_factory=list)

    def backward(self, step: int, again: bool = False) -> None:
        """Forward and backward on the shares of `step`; gradients are the mean over all ranks."""
        for rank in self.shares:
            scale = 1.0 if self.wrapped else 1.0 / self.ranks
            loss = self.model(rows(step, rank)).square().mean()
            (loss * scale).backward(retain_graph=again)
            if again:
                (loss * scale).backward()

    def steps(self, count: int = 3, optim: torch.optim.Optimizer | None = None) -> Iterator[int]:
        """So many steps of an optimizer, Adam if none is given."""
        return steps(optim or adam(self.model), count)

    def clip(self, norm: float, power: float = 2.0) -> None:
        clipped = sw.clip_grad_norm if self.wrapped else torch_clip
        self.seen.append(float(clipped(self.model, norm, power)))


def torch_clip(model: nn.Module, norm: float, power: float) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), norm, power)


def rows(step: int, rank: int) -> Tensor:
    own = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 6, generator=own, dtype=torch.float64)


def wrap(how: str, model: nn.Module, world: World) -> nn.Module:
    """DDP, a pipe of one chunk, or FSDP under a strategy; hybrid with two ranks a group; "offload"
    after it.
    """
    if how == "DDP":
        return sw.DDP(model, world)
    if how == "Pipe":
        return sw.Pipe(model, 1, world=world)
    strategy, _, offload = how.partition(" ")
    options: dict[str, Any] = {"shard_size": 2 if "HYBRID" in how else None}
    options["cpu_offload"] = CPUOffload(offload_params=bool(offload))
    return sw.FSDP(model, strategy, units=1, world=world, **options)


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05, **options)


def steps(optim: torch.optim.Optimizer, count: int = 3) -> Iterator[int]:
    """The numbers of so many steps; after each the weights are updated, and gradients dropped."""
    for step in range(count):
        yield step
        optim.step()
        optim.zero_grad()


def as_written(side: Side) -> None:
    """The loop of the first page."""
    for step in side.steps():
        side.backward(step)


def zeroing(side: Side) -> None:
    """zero_grad before the forward pass, in place or not, by the optimizer and by the module."""
    optim = adam(side.model)
    for step in range(4):
        (optim if step < 2 else side.model).zero_grad(set_to_none=step % 2 == 1)
        side.backward(step)
        optim.step()


def accumulating(side: Side) -> None:
    """Three backward passes a step without zero_grad, and a step that keeps the gradients."""
    optim = adam(side.model)
    for step in range(3):
        for micro in range(3):
            side.backward(3 * step + micro)
        optim.step()
        if step != 1:
            optim.zero_grad()


def unsynced(side: Side) -> None:
    """Two backward passes under no_sync and one that reduces."""
    for step in side.steps():
        with sw.no_sync(side.model) if side.wrapped else nullcontext():
            side.backward(3 * step)
            side.backward(3 * step + 1)
        side.backward(3 * step + 2)


def clipping(side: Side) -> None:
    """Clipping by several norms, weight decay, a schedule."""
    optim = torch.optim.AdamW(side.model.parameters(), lr=0.05, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=0.1, total_steps=5)
    for step, power in enumerate((2.0, math.inf, 1.0, 3.0)):
        side.backward(step)
        side.clip(0.3 if power > 1 else 3.0, power)
        optim.step()
        schedule.step()
        optim.zero_grad()


def twice_backward(side: Side) -> None:
    """retain_graph and a second backward through the same graph."""
    for step in side.steps(2):
        side.backward(step, again=True)


def replacing(side: Side) -> None:
    """Gradients replaced by the user's own tensors between two backward passes."""
    for step in side.steps():
        side.backward(2 * step)
        for p in side.model.parameters():
            p.grad = None if p.grad is None else p.grad * 0.25
        side.backward(2 * step + 1)


def looking(side: Side) -> None:
    """Evaluation between backward and step, state_dict there too, a loss that is thrown away."""
    optim = adam(side.model)
    for step in range(3):
        side.backward(step)
        side.model.eval()
        with torch.no_grad():
            side.seen.append(float(side.model(rows(9, 9)).sum()))
        side.model.train()
        side.seen.append(float(sum(v.sum() for v in side.model.state_dict().values())))
        optim.step()
        optim.zero_grad()
        side.seen.append(float(side.model(rows(8, 8)).detach().sum()))


def gradient_norms(side: Side) -> None:
    """torch.autograd.grad in between, which accumulates nothing."""
    for step in side.steps(2):
        x = rows(step + 20, 0).requires_grad_()
        (gradient,) = torch.autograd.grad(side.model(x).square().sum(), x)
        side.seen.append(float(gradient.norm()))
        side.backward(step)


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        *(as_written, zeroing, accumulating, unsynced, clipping, twice_backward),
        *(replacing, looking, gradient_norms),
    )
}


# --- a model of a program -------------------------------------------------------------------------


class Coder(nn.Module):
    """Used through methods; the root has a parameter, and a copy follows a part by averages."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.leave = nn.Linear(3, 6)
        self.scale = nn.Parameter(torch.full((3,), 0.9))
        self.follower = deepcopy(self.enter).requires_grad_(False)
        self.how = ""

    def encode(self, x: Tensor) -> Tensor:
        return self.enter(x) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "follows":
            code = self.encode(x)
            with torch.no_grad():  # its units are in another state than those just used
                pairs = zip(self.enter.parameters(), self.follower.parameters(), strict=True)
                for ours, its in pairs:
                    its.data = its.data * 0.9 + ours.data * 0.1
                target = self.follower(x)
            return code - target
        if self.how == "limits":
            self.scale.data.clamp_(max=0.5)
            with torch.no_grad():
                self.scale.mul_(0.97)
        out = self.leave(self.encode(x))
        if self.how == "weighs":
            with torch.no_grad():
                out = out * sum(p.norm() for p in self.parameters())
            out = out + self.leave(self.encode(x)) * sum(p.norm() for p in self.enter.parameters())
        return out


def coder(how: str = "") -> nn.Module:
    model: Any = settled(Coder()).double()
    model.how = how
    return model
