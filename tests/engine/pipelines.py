"""Tiny models for pipelines, and stages that break."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.cases import Task, rows_task, settled, vectors
from tests.engine.zoo import Stack

#: Eight rows and one more: of the numbers of microbatches only three divides them.
ROWS = 9
WIDTH = 6
SGD: dict[str, Any] = {"kind": torch.optim.SGD, "options": {"lr": 0.1, "momentum": 0.9}}


def stack(layers: int = 8, width: int = WIDTH) -> nn.Sequential:
    pairs = [(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*[module for pair in pairs for module in pair])


def deep() -> nn.Module:
    return settled(stack())


def half_frozen() -> nn.Module:
    """Half of the model, and every other bias of the rest, are not trained."""
    model = deep()
    for name, p in model.named_parameters():
        p.requires_grad_(int(name.split(".")[0]) >= 8 and name != "10.bias")
    return model


class Inner(nn.Module):
    """A block with another layer behind its first one; or beside it, where nothing uses it."""

    def __init__(self, layer: nn.Module, used: bool = True) -> None:
        super().__init__()
        self.up, self.layer, self.used = nn.Linear(WIDTH, WIDTH), layer, used

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(self.up(x)) if self.used else self.up(x))


def normed() -> nn.Module:
    """A block with batch norm, whose statistics are of one microbatch."""
    return Inner(nn.BatchNorm1d(WIDTH))


def with_dropout() -> nn.Module:
    return Inner(nn.Dropout(0.4))


def idle() -> nn.Module:
    """A block with a layer that is never used, as heads of other tasks are."""
    return Inner(nn.Linear(WIDTH, WIDTH), used=False)


class Dropping(Stack):
    """Dropout in blocks and between them."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = functional.dropout(block(x), 0.2, self.training)
        return x


class Half(nn.Module):
    """The last layer's weight is the first one's, and one of them has no gradient."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight, self.uses = self.first.weight, uses

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) if self.uses == "first" else self.first(x).detach()
        for layer in self.inner:
            y = torch.tanh(layer(y))
        z = self.last(y)
        return z if self.uses == "last" else y + z.detach()


def chain(kind: Callable[..., nn.Module], block: Callable[[], nn.Module]) -> Any:
    return lambda: settled(kind(*[block() for _ in range(4)]))


def plain() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class Writes(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5).add_(1.0))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "deep": deep,
    "half frozen": half_frozen,
    "idle": chain(Stack, idle),
    "used first": lambda: settled(Half("first")),
    "used last": lambda: settled(Half("last")),
    "writes to the batch": chain(Writes, plain),
}


def task(name: str = "deep", rows: int = ROWS) -> Task:
    return rows_task(MODELS[name], partial(vectors, rows=rows))
