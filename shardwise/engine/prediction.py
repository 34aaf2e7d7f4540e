"""`sw.predict`: what a rank holds and sends under a plan, without starting one."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.model_spec import ModelShape, ModelSpec, ParamShape, UnitModules, UnitShape
from shardwise.core.plan import Plan
from shardwise.core.plan_check import require
from shardwise.core.zero import ROWS
from shardwise.engine import meta_pass, validate
from shardwise.engine.batch import cast, filled, split
from shardwise.engine.parallelize import own_loss, plan_of, recipe_of, settled_options
from shardwise.engine.shard import Sharding, cast_whole, units_of
from shardwise.engine.spec import buffer_shapes, dtype_name, optimizer_shape
from shardwise.engine.training import DTYPES, Loss
from shardwise.parallel.data.wrap_policy import UnitSpec
from shardwise.predict.memory import PLAIN
from shardwise.predict.prediction import Prediction, activation_bytes_on, shape_on


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
    _require_data_axes(plan)
    chosen = settled_options(options)
    objective = validate.loss(own_loss if loss is None else loss)
    spec = model_spec(model, plan, batch, objective, chosen)
    shape = shape_on(spec, plan, rank)
    dtypes = [getattr(torch, p.dtype) for p in shape.params if p.trainable]
    keeps = optimizer_shape(recipe_of(optimizer), dtypes[0]) if dtypes else PLAIN
    norm, notes = chosen["clip"] is not None, (spec.run.note,) if spec.run.note else ()
    kept_bytes = activation_bytes_on(spec, plan, rank)
    return Prediction(plan, rank, shape, keeps, norm, kept_bytes, notes)


def _require_data_axes(plan: Plan) -> None:
    for axis in ("tp", "pp"):
        if plan.mesh.size_of(axis) > 1:
            raise bad(
                f"a prediction for the plan '{plan}', which has the axis {axis}",
                "plans of data axes alone",
                f"'{plan.row}' on dp{plan.data_size}, or shardwise verify \"{plan}\"",
            )


def model_spec(
    model: nn.Module, plan: Plan, batch: Any, objective: Loss, options: dict[str, Any]
) -> ModelSpec:
    """The plain model as numbers, in the units and the precision of `plan`."""
    twin, dtype = meta_pass.meta_copy(model), DTYPES[plan.precision]
    _cast(twin, dtype)
    part = filled(split(batch, plan.microbatches, plan.cut)[0])

    def call(whole: nn.Module, rows: Any) -> Tensor:
        return objective(whole, cast(rows, dtype))

    specs = units_of(twin, _sharding(plan, options), plan.mesh.size_of("tp"))
    modules = _modules(twin, specs)
    shape = ModelShape(tuple(map(_unit_shape, specs)), buffer_shapes(twin))

    def real() -> nn.Module:
        if any(p.is_meta for p in model.parameters()):
            raise _valueless(model)
        copied = copy.deepcopy(model)
        cast_whole(copied, dtype, torch.device("cpu"))
        return copied

    return ModelSpec(shape, modules, meta_pass.run(twin, real, call, part))


def _cast(twin: nn.Module, dtype: torch.dtype | None) -> None:
    """Bring the copy to the precision of the plan, as `cast_whole` does."""
    for x in [*twin.parameters(), *(b for b in twin.buffers() if dtype is torch.float64)]:
        if dtype is not None and x.is_floating_point():
            x.data = x.data.to(dtype)


def _valueless(model: nn.Module) -> Exception:
    return bad(
        f"a {type(model).__name__} on the meta device whose forward reads values",
        "a model that computes tensors from tensors, or one with its weights",
        "the model built on the processor",
    )


def _sharding(plan: Plan, options: dict[str, Any]) -> Sharding:
    """What the choice of units depends on; the axes take no part in it."""
    return Sharding(
        row=ROWS[plan.row],
        shard=Axis("none"),
        replicate=Axis("none"),
        units=options["units"],
        bucket_bytes=plan.bucket_bytes,
        least_unit_bytes=options["least_unit_bytes"],
    )


def _unit_shape(spec: UnitSpec) -> UnitShape:
    params = (
        ParamShape(name, tuple(p.shape), dtype_name(p.dtype), p.requires_grad)
        for name, p in spec.params
    )
    return UnitShape(spec.name, tuple(params))


def _modules(model: nn.Module, specs: list[UnitSpec]) -> tuple[UnitModules, ...]:
    names = {module: name for name, module in model.named_modules()}
    found: list[UnitModules] = []
    for spec in specs:
        inside = {m for module in spec.modules for m in module.modules()}
        others = [m for other in specs if other is not spec for m in other.modules]
        found.append(
            UnitModules(
                tuple(names[module] for module in spec.modules),
                any(m in inside for m in others),
                all(type(module) is nn.Embedding for module in spec.modules),
            )
        )
    return tuple(found)
