"""What a spec of the plain model says besides its passes, and where passes are recorded."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwise.comm.world import World, traced
from shardwise.core.errors import bad
from shardwise.core.mesh import TENSOR, Mesh
from shardwise.core.model_spec import (
    BufferShape,
    ExpertLayer,
    Facts,
    ModelPass,
    ModelShape,
    ModelSpec,
    ParamShape,
    UnitModules,
    UnitShape,
)
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.tree import leaves
from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec

V = TypeVar("V")


def without_passes(
    plain: nn.Module,
    specs: Sequence[Any],
    facts: Facts,
    expert_layers: Mapping[str, ExpertLayer],
) -> ModelSpec:
    """A ModelSpec without passes, stages and recomputed modules."""
    return ModelSpec(
        ModelShape(tuple(map(_unit_shape, specs)), buffer_shapes(plain)),
        _modules(plain, specs),
        ModelPass((), ()),
        tensors=facts.tensors.get(0),
        experts=facts.experts,
        expert_layers=expert_layers,
        layers={number: own for number, own in facts.tensors.items() if number},
        tiles=facts.tiles,
    )


def _unit_shape(spec: Any) -> UnitShape:
    params = (
        ParamShape(name, tuple(p.shape), dtype_name(p.dtype), p.requires_grad)
        for name, p in spec.params
    )
    return UnitShape(spec.name, tuple(params))


def _modules(model: nn.Module, specs: Sequence[Any]) -> tuple[UnitModules, ...]:
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


def tensor_world(plan: Plan, rank: int) -> World:
    ranks = plan.mesh.size_of(TENSOR)
    place = plan.mesh.coordinate(rank).get(TENSOR, 0)
    return traced(place, ranks).on(Mesh(((TENSOR, ranks),)))


def shapes_of(part: Any) -> tuple[Any, ...]:
    return tuple((x.shape, x.dtype) for x in leaves(part, Tensor, objects=True))


def valueless(model: nn.Module) -> Exception:
    return bad(
        f"a {type(model).__name__} on the meta device whose forward reads values",
        "a model that computes tensors from tensors, or one with its weights",
        "the model built on the CPU",
    )


# --- shapes of buffers and states -----------------------------------------------------------------


def buffer_shapes(model: nn.Module) -> tuple[BufferShape, ...]:
    return tuple(
        BufferShape(name, tuple(b.shape), dtype_name(b.dtype)) for name, b in model.named_buffers()
    )


def state_tensors(spec: OptimizerSpec) -> int:
    """The optimizer states of the size of a parameter, of the first group."""
    state = spec.first_state(0, (2, 3), torch.float32).values()
    return sum(isinstance(x, Tensor) and x.shape == (2, 3) for x in state)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
