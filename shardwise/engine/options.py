"""The options of `sw.parallelize` and `sw.predict`: names, types, defaults and checks."""

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.world import World
from shardwise.core.applied import Fill
from shardwise.core.errors import bad
from shardwise.core.layouts.tensor_table import Table
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.arguments import (
    CHECK_EVERY,
    MOST_SEED,
    CheckEvery,
    choice,
    flag,
    integer,
    on_nonfinite,
    positive,
    short_repr,
)
from shardwise.engine.batch import Count, Tokens
from shardwise.engine.checks import validate
from shardwise.engine.optimizer.optimizer_spec import AdamW, OptimizerSpec
from shardwise.observe.work import KERNELS, Kernels
from shardwise.techniques.layers.plans import LayerPlans
from shardwise.techniques.recompute.apply import Recomputation
from shardwise.wrap.wrap_policy import Rule

# --- the arguments as dataclasses -----------------------------------------------------------------

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Build:
    """How an engine shards and trains its model: its options, and what follows from them.

    options           with checked functions `tokens` and `rows`, and without `fill`, which may hold
                      the weights
    starts            the names of the modules that begin the stages after the first
    calls             the places of the calls of modules, under a pipeline (call_order.py)
    recompute         modules that are recomputed, and how (recomputation.py)
    missing           tensors that rank 0 alone has (rank_zero_weights.py)
    """

    plan: Plan
    world: World
    options: "EngineOptions"
    loss: Loss
    fill: Fill
    table: Table | None
    starts: tuple[str, ...] = ()
    calls: Mapping[str, tuple[int, ...]] | None = None
    recompute: Recomputation = field(default_factory=lambda: Recomputation({}))
    layers: LayerPlans = field(default_factory=LayerPlans)
    missing: tuple[str, ...] = ()


__all__ = ["EngineOptions", "own_loss"]

#: Those that must be equal on all ranks.
SHARED = (
    *("clip", "units", "least_unit_bytes", "prefetch", "stages"),
    *("on_nonfinite", "check_every", "seed", "broadcast_buffers"),
    *("loss", "tokens", "rows", "fill"),
)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of an engine; those of a technique that the plan does not use have no effect.

    optimizer          sw.AdamW(...), sw.SGD(...) and others, without parameters; None:
                       sw.AdamW(lr=3e-4)
    loss               loss(model, batch), the mean over the rows or tokens of the batch; None: the
                       output of the model, or its `.loss`
    tokens             tokens(batch), the number of elements that the loss is the mean over, or the
                       sum of their weights; it may change at every step and differ between ranks;
                       None: the rows
    rows               rows(batch), the number of rows of a batch; None: dim 0 of its tensors
    clip               the largest norm of all gradients together; None: no clipping
    on_nonfinite       a step whose loss or gradient is not finite: "raise" raises sw.RunError on
                       all ranks before any update, "skip" skips the update; "skip:6" also that of
                       a gradient whose norm is over 6 deviations above the mean of recent steps
    check_every        steps between two comparisons of the ranks: along tensor and pipeline axes
                       batch, loss and gradients, along data axes the replicated weights and
                       optimizer states; 0: only in the first step, and no weights.  With
                       "rerun:20", or "100 rerun:20", in every 20th step the next data rank
                       computes a microbatch of each again, and they compare loss and gradients
    units              what is gathered, freed and reduced together: "auto" (the repeated block), a
                       class or several, a pattern of module names, a size in bytes, or
                       f(name, module) -> bool
    least_unit_bytes   smaller units are merged with their neighbours; None: 2 MiB, 0: merge none
    prefetch           the number of units to gather ahead of their use under `zero3`
    fill               fill(name, tensor) writes initial weights of a model on the meta device;
                       None: its own initialisation, by `seed`
    seed               the seed of initial weights without `fill`
    table              the styles of tensor parallelism; None: the model's own table
    stages             the names of the modules that begin each pipeline stage except the first;
                       None: balanced by parameters
    broadcast_buffers  every step and evaluation begins with rank 0's buffers; False: with what
                       each rank has
    offload_folder     a folder on a local disk, for states that rest there (`offload:optim@disk`)
    kernels            of a prediction alone: the kernels "cpu" or "cuda", which save other tensors
                       for the backward pass

    Raises InputError for a wrong value.
    """

    optimizer: OptimizerSpec | None = None
    loss: Loss | None = None
    tokens: Tokens | None = None
    rows: Count | None = None
    clip: float | None = None
    on_nonfinite: str = "raise"
    check_every: int | str = CHECK_EVERY
    units: Rule = "auto"
    least_unit_bytes: int | None = None
    prefetch: int = 1
    fill: Callable[[str, Tensor], Any] | None = None
    seed: int = 0
    table: Table | Mapping[str, str] | None = None
    stages: Sequence[str] | None = None
    broadcast_buffers: bool = True
    offload_folder: str | None = None
    kernels: Kernels = "cpu"

    def __post_init__(self) -> None:
        positive("clip", self.clip)
        on_nonfinite(self.on_nonfinite)
        choice("device", self.kernels, KERNELS)
        integer("seed", self.seed, 0, 0, MOST_SEED)
        flag("broadcast_buffers", self.broadcast_buffers)
        integer("prefetch", self.prefetch, 0, 1)
        CheckEvery.parse(self.check_every)
        if self.least_unit_bytes is not None:
            integer("least_unit_bytes", self.least_unit_bytes, 0, 2**21)

    @property
    def checks(self) -> CheckEvery:
        return CheckEvery.parse(self.check_every)

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer. An instance of torch's is refused: it has the unsharded parameters."""
        optimizer: Any = self.optimizer
        if optimizer is None:
            return AdamW(lr=3e-4)
        if isinstance(optimizer, OptimizerSpec):
            return optimizer
        found = type(optimizer) if isinstance(optimizer, Optimizer) else optimizer
        shown: Any = optimizer
        if isinstance(found, type):  # in full: sw.AdamW has the name of torch's
            own = issubclass(found, Optimizer) and found.__module__.startswith("torch.optim.")
            shown = f"{'torch.optim' if own else found.__module__}.{found.__qualname__}"
        allowed = "sw.AdamW, sw.Adam, sw.SGD, sw.Lion or sw.Optim with options, without parameters"
        instead = "optimizer=sw.AdamW(lr=3e-4), or sw.Optim(torch.optim.RMSprop, lr=3e-4)"
        raise bad(f"optimizer={short_repr(shown)}", allowed, instead)

    @property
    def objective(self) -> Loss:
        return validate.loss(own_loss if self.loss is None else self.loss)

    @property
    def shared(self) -> dict[str, object]:
        return {f"the option {name}": getattr(self, name) for name in SHARED}


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The default loss: the model's own output, a scalar or an object with `.loss`."""
    out = model(**batch) if isinstance(batch, dict | UserDict) else model(batch)
    found = out if isinstance(out, Tensor) else getattr(out, "loss", None)
    if found is None:
        raise bad(
            f"a model ({type(model).__name__}) that returns a {type(out).__name__} without a loss, "
            "and no loss= argument",
            "a model that returns its loss (transformers: with labels in the batch), or loss=",
            validate.LOSS,
        )
    return found
