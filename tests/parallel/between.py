"""Blocks one after the other, with what a model does between them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.techniques.pipeline.staged_model import Stages
from shardwise.techniques.pipeline.trace.placeholders import StageLayers, twin
from tests.engine import cases, zoo

WIDTH, LENGTH = 6, 5


def settled(model: nn.Module) -> nn.Module:
    return cases.settled(model.double())


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(seed)
    x, y = torch.randn((2, count, LENGTH, WIDTH), generator=own, dtype=torch.float64)
    return x, y


def cut(model: nn.Module, begins: tuple[str, ...], mine: list[int], twins: Any = None) -> Stages:
    """The stages `mine` of a model, of which each but the first begins at a name."""
    layers = StageLayers(model, twins or twin(model), begins, mine)
    return Stages(layers, torch.device("cpu"))


def ran(
    stages: Stages, stage: int, batch: Any, trace: Any = None, loss: Any = cases.regression
) -> Any:
    """What a stage makes of zeros, where it has inputs."""
    trace = trace or stages.trace(lambda m: loss(m, batch))
    specs = trace.bundles[stage - 1] if stage else ()
    given = [torch.zeros(s.shape, dtype=s.dtype, requires_grad=s.requires_grad) for s in specs]
    return stages.run(stage, trace, given, lambda m: loss(m, batch))


class Block(zoo.Block):
    """x + a little network of x, with an attribute that is no tensor."""

    kind = "full"


class Stack(nn.Module):
    """Four blocks, and modules that are defined before and after them; `glue(model, x)` calls them.
    Without it they are called one after the other.
    """

    def __init__(
        self,
        before: nn.Module | None = None,
        after: nn.Module | None = None,
        glue: Callable[[Any, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if before is not None:
            self.before = before
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        if after is not None:
            self.after = after
        self.glue = glue

    def forward(self, x: Tensor) -> Tensor:
        return through(self, x) if self.glue is None else self.glue(self, x)


def through(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


class Experts(nn.Module):
    """Each row goes to one of two networks; how many rows each has is in the numbers."""

    def __init__(self, out: int = WIDTH) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(WIDTH, out), nn.Linear(WIDTH, out), out

    def forward(self, x: Tensor) -> Tensor:
        out, first = x.new_zeros(*x.shape[:-1], self.out), x[..., 0] > 0
        out[first] = self.a(x[first])
        if (~first).any():
            out[~first] = self.b(x[~first])
        return out


class LateNorm(Stack):
    def __init__(self) -> None:
        super().__init__(before=nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.before(super().forward(x))
