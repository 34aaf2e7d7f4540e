"""this file is what an engine is told to do, and what it tells of each step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.world import World
from shardwise.core.plan import Plan
from shardwise.core.tensor_plan import Table
from shardwise.engine.optimizer_spec import Recipe
from shardwise.parallel.data.initial_weights import Fill
from shardwise.parallel.data.wrap_policy import Rule

Loss = Callable[[nn.Module, Any], Tensor]
Count = Callable[[Any], int]

DTYPES = {
    None: None,
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Metrics:
    """What one step was: the mean loss over the global batch's tokens, their number, the norm of
    the gradient before clipping (None where nobody asked), whether there was no update because fp16
    overflowed or the step was not finite (its loss may be NaN then), the learning rate, and the
    bytes this rank sent.
    """

    loss: float
    tokens: int
    grad_norm: float | None
    skipped: bool
    lr: float
    bytes: int


@dataclass(frozen=True)
class Training:
    """How an engine trains: `loss(model, batch)` is the mean over the batch's own tokens,
    `tokens(batch)` their number (None: the rows of the batch); gradients are clipped to norm
    `clip` (None: not); a step whose loss or gradient is not finite raises, or is left out
    (`on_nonfinite`: "raise" or "skip"). Ranks that compute a step together compare it every
    `check_every` steps (0: only an engine's first).
    """

    optimizer: Recipe
    loss: Loss
    tokens: Count | None = None
    clip: float | None = None
    on_nonfinite: str = "raise"
    check_every: int = 100


@dataclass(frozen=True)
class Build:
    """What the user asked for: the plan, the world it lies on, units, initial weights, prefetch.

    Units smaller than `least_unit_bytes` (None: 2 MiB) are merged with their neighbours. `table` is
    that of the tensor axis, `starts` the modules that begin the stages of a pipeline, `beside`
    those that are not called where they are defined (staged_model.py).
    """

    plan: Plan
    world: World
    units: Rule
    fill: Fill
    prefetch: int
    table: Table | None
    starts: tuple[str, ...] = ()
    beside: dict[str, str] = field(default_factory=dict)
    least_unit_bytes: int | None = None


@dataclass(frozen=True)
class Settled:
    """What the ranks agreed on when a step was settled; `norm` only where somebody asked."""

    loss: float
    tokens: int
    norm: float | None
    skipped: bool
