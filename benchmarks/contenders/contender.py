"""The interface of a contender: a name, and a function that prepares a model for training."""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor, nn

from shardwise.core.errors import bad
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
    """

    step: Callable[[Batch], float | None]
    settle: Callable[[], None] = lambda: None
    shared_bytes: Callable[[], int] = lambda: 0
    on_host: Callable[[Tensor], bool] = lambda _: False
    tiers: Callable[[], TierBytes] | None = None


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
    """

    name: str
    row: str
    build: Callable[[nn.Module, Setup], Built]
    package: str = "torch"
    note: str = ""
    whole_batch: bool = False
    against: str = ""

    @property
    def missing(self) -> bool:
        """Whether its package is not installed."""
        return importlib.util.find_spec(self.package) is None


@dataclass(frozen=True)
class Task:
    """The settings of a run."""

    size: str
    config: GPTConfig
    contenders: tuple[str, ...]
    rows: int = 8  # sequences in the global batch
    rounds: int = 8
    steps: int = 1  # steps between two barriers
    warm_up: int = 2

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
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    setup: Setup,
    backward: Callable[[Tensor], object] = Tensor.backward,
    drop: bool = True,
) -> Loop:
    """The plain loop: forward, backward, step; gradients are then dropped or set to zero."""

    def step(batch: Batch) -> float:
        loss = setup.loss(model, batch)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=drop)
        return loss.item()

    return Loop(step)


# --- the model of the suites `disk` and `save`, which measure by its number of parameters alone ---

_WIDTH: Final = 2048
_SIZE: Final = re.compile(r"([1-9]\d*)([KM]?)")
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6}


def parameter_count(text: str, instead: str) -> int:
    """The number that "100M", "20K" or "5000" says. Raises InputError for other text."""
    found = _SIZE.fullmatch(text)
    if found is None or not 64 <= int(found[1]) * _UNITS[found[2]] <= 10**10:
        allowed = "a number of parameters from 64 to 10000M: digits, then K, M or nothing"
        raise bad(f"--size {text}", allowed, f"--size {instead}")
    return int(found[1]) * _UNITS[found[2]]


def stack(count: int) -> nn.Sequential:
    """Square layers without biases, at least 4 unless `count` is small, the same in each call."""
    width = min(_WIDTH, isqrt(max(1, count // 4)))
    layers = max(1, round(count / width**2))
    own = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for p in model.parameters():
        nn.init.normal_(p, std=0.02, generator=own)
    return model
