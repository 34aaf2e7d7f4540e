"""The memory and traffic of `ddp` on the same ranks, by formula, as a baseline for the report."""

from dataclasses import dataclass

import torch

from shardwise.core.model_spec import ModelShape, ParamShape, UnitShape
from shardwise.core.plan.plan import Plan
from shardwise.core.pool_size import pool_bytes
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec
from shardwise.engine.precision import DTYPES
from shardwise.engine.spec import buffer_shapes, dtype_name, optimizer_shape
from shardwise.models.decoder import Sizes, build
from shardwise.prediction.stored_bytes import ADAM, held_bytes
from shardwise.prediction.traffic import by_kind, step_bytes


@dataclass(frozen=True)
class Baseline:
    """Bytes that each rank holds between steps by category, and sends in a step by kind."""

    memory: dict[str, int]
    sent: dict[str, int]


def ddp_baseline(
    sizes: Sizes, plan: Plan, optimizer: OptimizerSpec | None = None
) -> Baseline | None:
    """The cost of `ddp` on as many ranks as `plan` has, in its precision; None: with AdamW.

    None if the plan is `ddp` already, or has one rank.
    """
    ddp = Plan(axes=(("dp", plan.size),), precision=plan.precision)
    if plan.size == 1 or (plan.axes == ddp.axes and plan.row == ddp.row):
        return None
    with torch.device("meta"):
        model = build(sizes)
    dtype = DTYPES[plan.precision] or torch.float32
    params = tuple(
        ParamShape(n, tuple(p.shape), dtype_name(dtype)) for n, p in model.named_parameters()
    )
    kept = ADAM if optimizer is None else optimizer_shape(optimizer, params)
    shape = ModelShape((UnitShape("", params),), buffer_shapes(model))
    pool = pool_bytes(ddp, shape.stored_bytes)
    return Baseline(
        held_bytes(ddp, shape, kept, pool=pool), by_kind(step_bytes(ddp, shape, norm=True))
    )
