"""A user's file, for commands that take the name of a function in one: `small.py:build`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.models import gpt, registry

SIZES = gpt.GPTConfig(
    vocabulary=32, layers=2, hidden_size=16, heads=4, kv_heads=2, intermediate_size=24, sequence=8
)
Made = tuple[nn.Module, Callable[..., Any], Callable[..., Any]]


def build() -> Made:
    """A GPT of two narrow blocks."""
    found = registry.of_sizes("small", SIZES)
    return found.build(), found.loss, found.batch


class Asks(nn.Module):
    """Reads a number of what its first layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden) * hidden.sum().item()


def mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean()


def ones(rows: int, _: int) -> Tensor:
    return torch.ones(rows, 6)


def asks() -> Made:
    return Asks(), mean, ones


def narrow() -> Made:
    return Asks(), mean, lambda rows, _: torch.ones(rows, 7)


def norm() -> Made:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)), mean, ones


def drop() -> Made:
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)), mean, ones
