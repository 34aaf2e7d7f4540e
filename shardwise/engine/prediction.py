"""`sw.predict`: what a rank holds and sends under a plan, without starting one."""

from typing import Any

import torch
from torch import nn

from shardwise.core.errors import bad
from shardwise.core.plan import Plan
from shardwise.core.plan_check import require
from shardwise.engine import validate
from shardwise.engine.model_spec import model_spec
from shardwise.engine.parallelize import own_loss, plan_of, recipe_of, settled_options
from shardwise.engine.spec import optimizer_shape
from shardwise.engine.training import Loss
from shardwise.prediction.memory import PLAIN
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.rank_shape import activation_bytes_on, shape_on


def predict(
    model: nn.Module,
    plan: Plan | str,
    batch: Any,
    *,
    rank: int = 0,
    optimizer: Any = None,
    loss: Loss | None = None,
    **options: Any,
) -> Prediction:
    """The memory and the traffic of `rank` under `plan`; no process is started.

    `model` may be on the meta device; it stays as it is. `batch` is what this rank gives
    `engine.step`: its values are not looked at, unless the model's order of calls depends on them.
    The options are those of `parallelize`. A plan without a data axis is completed for the fewest
    ranks on which each of its words has an effect.

    Raises:
        InputError: for a plan that cannot work, a rank that it does not have, options that
            `parallelize` refuses, and a model that does not run on the meta device.
    """
    validate.model(model, "sw.predict")
    plan = plan_of(plan)
    require(plan)
    plan = plan.completed(None)
    if not 0 <= rank < plan.size:
        raise bad(f"rank {rank} of the plan '{plan}'", f"0 to {plan.size - 1}", "rank=0")
    chosen = settled_options(options)
    objective = validate.loss(own_loss if loss is None else loss)
    spec = model_spec(model, plan, rank, batch, objective, chosen)
    shape = shape_on(spec, plan, rank)
    dtypes = [getattr(torch, p.dtype) for p in shape.params if p.trainable]
    keeps = optimizer_shape(recipe_of(optimizer), dtypes[0]) if dtypes else PLAIN
    norm, notes = chosen["clip"] is not None, (spec.run.note,) if spec.run.note else ()
    kept_bytes = activation_bytes_on(spec, plan, rank)
    return Prediction(plan, rank, shape, spec, keeps, norm, kept_bytes, notes)
