"""The arguments of an engine as dataclasses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shardwise.comm.world import World
from shardwise.core.check_every import USUAL, CheckEvery
from shardwise.core.plan.plan import Plan
from shardwise.engine.batch import Count
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.techniques.data.flat.flat_parameter import Fill
from shardwise.techniques.data.wrap_policy import Rule
from shardwise.techniques.layers.plans import LayerPlans
from shardwise.techniques.recompute.apply import Recomputation
from shardwise.techniques.tensor.tensor_table import Table

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Training:
    """How an engine trains (options.py)."""

    optimizer: OptimizerSpec
    loss: Loss
    tokens: Count | None = None
    clip: float | None = None
    on_nonfinite: str = "raise"
    check_every: CheckEvery = USUAL
    offload_folder: str | None = None


@dataclass(frozen=True)
class Build:
    """How an engine shards its model.

    units             the wrap policy; see techniques/data/wrap_policy.py
    fill              writes initial weights
    prefetch          units gathered ahead of their use
    table             the styles of tensor parallelism
    starts            the names of the modules that begin the stages after the first
    calls             the places of the calls of modules, under a pipeline (call_order.py)
    least_unit_bytes  smaller units are merged with their neighbours; None: 2 MiB
    recompute         modules that are recomputed, and how (recomputation.py)
    layers            the plans of single layers (layer_plans.py)
    rows              rows(batch) is the number of rows of a batch; None: batch.py counts
    missing           tensors that rank 0 alone has (rank_zero_weights.py)
    broadcast_buffers every step and evaluation begins with rank 0's buffers
    kernels           those of the device: "cpu" or "cuda"
    """

    plan: Plan
    world: World
    units: Rule
    fill: Fill
    prefetch: int
    table: Table | None
    starts: tuple[str, ...] = ()
    calls: Mapping[str, tuple[int, ...]] | None = None
    least_unit_bytes: int | None = None
    recompute: Recomputation = field(default_factory=lambda: Recomputation({}))
    layers: LayerPlans = field(default_factory=LayerPlans)
    rows: Count | None = None
    missing: tuple[str, ...] = ()
    broadcast_buffers: bool = True
    kernels: str = "cpu"
