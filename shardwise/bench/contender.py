"""This file is what a contender is: a name, and how it turns a model into something that steps."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.models.gpt import GPTConfig

Batch = dict[str, Tensor]

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Loop:
    """A contender ready to train.

    `step(batch)` is one whole training step on this rank's rows and gives the loss, None on a rank
    that does not learn it. `settle()` waits for communication that a step leaves to run beside the
    next: at the end of a turn it belongs on the clock, and would otherwise run beside the next
    contender. `shared_bytes()` is what this rank has sent so far that no interface sees: through
    memory it shares with others.
    """

    step: Callable[[Batch], float | None]
    settle: Callable[[], None] = lambda: None
    shared_bytes: Callable[[], int] = lambda: 0


@dataclass(frozen=True)
class Setup:
    """What every contender is given: the same for all of them."""

    loss: Callable[[nn.Module, Batch], Tensor]
    block: type[nn.Module]  # the repeated part, for those that wrap it
    ranks: int
    device: torch.device
    precision: str = "fp32"


@dataclass(frozen=True)
class Contender:
    """One line of the table.

    `row` is what it does in plan words, `zero1` or `tp sp`, and so the least it has to send. With
    `whole_batch` every rank steps on the whole global batch, else on its part of the sequences.
    `package` has to be importable. `against` names the contender its ratio is to, where that is not
    the first of the suite.
    """

    name: str
    row: str
    build: Callable[[nn.Module, Setup], Loop]
    package: str = "torch"
    note: str = ""
    whole_batch: bool = False
    against: str = ""

    @property
    def missing(self) -> bool:
        """Whether the package it needs is not installed."""
        return importlib.util.find_spec(self.package) is None


@dataclass(frozen=True)
class Task:
    """A run: what each rank is told. `interface` is whose bytes are counted."""

    size: str
    config: GPTConfig
    contenders: tuple[str, ...]
    rows: int = 8  # sequences in the global batch
    rounds: int = 8
    steps: int = 1  # steps at a stretch, between two barriers
    warm_up: int = 2
    interface: str = "lo"
    shared: bool = True  # the interface carries what all ranks send, not this one alone

    @property
    def reference(self) -> str:
        """The contender that ratios are to, but for those held against another: the first."""
        return self.contenders[0]


def adamw(parameters: Any) -> torch.optim.AdamW:
    """The optimizer everyone gets."""
    return torch.optim.AdamW(parameters, **adamw_options())


def adamw_options() -> dict[str, Any]:
    """The arguments of torch's AdamW that everyone gets."""
    return {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "fused": True}


def plain_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, setup: Setup, drop: bool = True
) -> Loop:
    """The plain loop: forward, backward, step; then gradients are dropped, or only set to zero."""

    def step(batch: Batch) -> float:
        loss = setup.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=drop)
        return loss.item()

    return Loop(step)
