"""The plain model as numbers, before any rank holds a part of it.

Two copies of the model are made on the meta device. One does a forward and a backward pass
(meta_pass.py). Where the plan has a pipeline, the other is cut into its stages, and a forward tells
what crosses each cut (parallel/pipeline/tracer.py).
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.model_spec import (
    Bundles,
    ModelShape,
    ModelSpec,
    ParamShape,
    StageSpec,
    StageTensor,
    UnitModules,
    UnitShape,
)
from shardwise.core.plan import Plan
from shardwise.core.zero import row_of
from shardwise.engine import meta_pass, recomputation, stage_module, validate
from shardwise.engine.batch import cast, filled, split
from shardwise.engine.partition import misplaced
from shardwise.engine.shard import Sharding, cast_whole, units_of
from shardwise.engine.spec import buffer_shapes, dtype_name
from shardwise.engine.staged_model import Stages
from shardwise.engine.training import DTYPES, Loss
from shardwise.parallel.data.wrap_policy import UnitSpec
from shardwise.parallel.pipeline.placeholders import layers, twin
from shardwise.predict.recompute import recomputed

Call = Callable[[nn.Module, Any], Tensor]


def model_spec(
    model: nn.Module, plan: Plan, batch: Any, objective: Loss, options: dict[str, Any]
) -> ModelSpec:
    """The plain model as numbers, in the units, the stages and the precision of `plan`."""
    plain, dtype = meta_pass.meta_copy(model), DTYPES[plan.precision]
    _cast(plain, dtype)
    parts = [filled(part) for part in split(batch, plan.microbatches, plan.cut)]

    def call(whole: nn.Module, rows: Any) -> Tensor:
        return objective(whole, cast(rows, dtype))

    def real() -> nn.Module:
        if any(p.is_meta for p in model.parameters()):
            raise _valueless(model)
        copied = copy.deepcopy(model)
        cast_whole(copied, dtype, torch.device("cpu"))
        return copied

    beside = validate.beside(options["beside"])
    begin = stage_module.fitting(plain, plan, options["stages"], beside)
    at = stage_module.stages_of(plain, begin, beside) if plan.pipeline else {}
    how, tensor_ranks = _sharding(plan, options), plan.mesh.size_of("tp")

    def apart(spec: UnitSpec) -> object:
        return {at.get(name) for name, _ in spec.params}

    specs = units_of(plain, how, tensor_ranks, apart)
    modules = _modules(plain, specs)
    shape = ModelShape(tuple(map(_unit_shape, specs)), buffer_shapes(plain))
    stages = None
    if plan.pipeline:
        within = layers(plain, begin, misplaced(plain) | dict(beside))
        known = {name: layer.stages for layer in within.values() for name in layer.names}
        stages = StageSpec(at, known, _bundles(plain, begin, beside, call, parts))
    kinds = recomputation.fitting(plain, plan, options["units"], begin)
    run = recomputed(meta_pass.run(plain, real, call, parts[0]), kinds)
    return ModelSpec(shape, modules, run, stages)


def _bundles(
    plain: nn.Module, begin: Sequence[str], beside: Any, call: Call, parts: Sequence[Any]
) -> tuple[Bundles, ...]:
    """What crosses each cut, for each microbatch; a forward of each shape is followed once."""
    ours = copy.deepcopy(plain)
    every = range(len(begin) + 1)
    stages = Stages(ours, twin(ours), begin, every, torch.device("cpu"), beside)
    known: dict[Any, Bundles] = {}
    for part in parts:
        shape = _shapes(part)
        if shape not in known:
            trace = stages.follow(lambda model, part=part: call(model, part))
            known[shape] = tuple(
                tuple(
                    StageTensor(math.prod(spec.shape), spec.dtype.itemsize, spec.requires_grad)
                    for spec in bundle
                )
                for bundle in trace.bundles
            )
    return tuple(known[_shapes(part)] for part in parts)


def _shapes(part: Any) -> Any:
    return tuple((x.shape, x.dtype) for x in tree_leaves(part) if isinstance(x, Tensor))


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
        row=row_of(plan.row),
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
