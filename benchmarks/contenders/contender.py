"""The interface of a contender: a name, and a function that prepares a model for training."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from shardwise.models.gpt import GPTConfig

Batch = dict[str, Tensor]

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class TierBytes:
    """What a rank has in host memory and on a disk between steps, and copies in a step."""

    host_bytes: int = 0
    disk_bytes: int = 0
    moved_bytes: int = 0


@dataclass(frozen=True)
class Loop:
    """A contender ready to train.

    step          one training step on this rank's rows; returns the loss, None on a rank without it
    settle        waits for communication that overlaps with the next step, so that it is timed, and
                  does not disturb the next contender
    shared_bytes  the bytes sent so far through shared memory, which no interface counts
    on_host       whether a tensor rests in host memory or on disk, which is no part of the peak
    tiers         the bytes beyond the device; None: not known
    model         one with layers of experts, whose shares of a step are measured
    """

    step: Callable[[Batch], float | None]
    settle: Callable[[], None] = lambda: None
    shared_bytes: Callable[[], int] = lambda: 0
    on_host: Callable[[Tensor], bool] = lambda _: False
    tiers: Callable[[], TierBytes] | None = None
    model: nn.Module | None = None


@dataclass(frozen=True)
class Setup:
    """The settings, the same for every contender."""

    loss: Callable[[nn.Module, Batch], Tensor]
    block: type[nn.Module]  # the repeated part, for those that wrap it
    ranks: int
    device: torch.device
    precision: str = "fp32"


Built = TypeVar("Built")


@dataclass(frozen=True)
class Contender(Generic[Built]):
    """One line of a table: `build` makes of a model what the suite runs, mostly a Loop.

    row          its parallelism in plan words (`zero1`, `tp sp`), for the fewest bytes to send
    whole_batch  every rank gets the whole global batch, otherwise its part of the sequences
    package      must be importable
    against      the contender that its ratio refers to, if not the first of the suite
    alone        rank 0 trains, in threads of its own, and the other ranks wait; the meter of live
                 bytes does not see these threads
    """

    name: str
    row: str
    build: Callable[[nn.Module, Setup], Built]
    package: str = "torch"
    note: str = ""
    whole_batch: bool = False
    against: str = ""
    alone: bool = False

    @property
    def missing(self) -> bool:
        """Whether its package is not installed."""
        return importlib.util.find_spec(self.package) is None


@dataclass(frozen=True)
class Task:
    """The settings of a run. The bytes of `interface` are counted."""

    size: str
    config: GPTConfig
    contenders: tuple[str, ...]
    rows: int = 8  # sequences in the global batch
    rounds: int = 8
    steps: int = 1  # steps between two barriers
    warm_up: int = 2
    interface: str = "lo"
    shared: bool = True  # the interface carries the traffic of all ranks, not only this one's

    @property
    def reference(self) -> str:
        """The contender that ratios refer to, unless a contender names another: the first."""
        return self.contenders[0]


def adamw(parameters: Any) -> torch.optim.AdamW:
    """The optimizer of every contender."""
    return torch.optim.AdamW(parameters, **adamw_options())


def adamw_options() -> dict[str, Any]:
    """The options of the optimizer."""
    return {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "fused": True}


def plain_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, setup: Setup, drop: bool = True
) -> Loop:
    """The plain loop: forward, backward, step; gradients are then dropped or set to zero."""

    def step(batch: Batch) -> float:
        loss = setup.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=drop)
        return loss.item()

    return Loop(step)
