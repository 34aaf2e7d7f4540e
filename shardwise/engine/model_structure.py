"""What a spec of the plain model says besides its passes, and where passes are recorded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from shardwise.prediction.stored_bytes import HALF, PLAIN, OptimizerShape

V = TypeVar("V")


def without_passes(
    plain: nn.Module,
    plan: Plan,
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
        arenas=plan.arenas,
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


def by_shape(parts: Sequence[Any], make: Callable[[Any], V]) -> tuple[V, ...]:
    """The result of `make` for each microbatch; computed once for equal shapes."""
    known: dict[Any, V] = {}
    for part in parts:
        if shapes_of(part) not in known:
            known[shapes_of(part)] = make(part)
    return tuple(known[shapes_of(part)] for part in parts)


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


def optimizer_shape(spec: OptimizerSpec, params: Sequence[ParamShape]) -> OptimizerShape:
    """The states of the optimizer for trained parameters of `params`, for any class and options.

    (Assumes that groups of one class keep the same.)
    """
    if not params:
        return PLAIN
    members, default = spec.members, params[0].dtype

    def shape_of(number: int) -> OptimizerShape:
        first = next(k for k, member in enumerate(members) if member[1] is members[number][1])
        found = _shape(spec, first, default, whole=not members[number][1].by_element)
        return replace(found, group=number)

    own = {p.name: spec.number(p.name, len(p.shape)) for p in params}
    shapes = {number: shape_of(number) for number in {0, *own.values()}}
    others = {name: shapes[n] for name, n in own.items() if shapes[n] != shapes[0]}
    return replace(shapes[0], others=tuple(others.items()))


def _shape(spec: OptimizerSpec, group: int, dtype: str, *, whole: bool) -> OptimizerShape:
    wide = torch.float32 if dtype in HALF else getattr(torch, dtype)
    state = spec.first_state(group, (2, 3), wide)
    kept = [value for value in state.values() if isinstance(value, Tensor)]
    scalars = [value for value in kept if value.dim() == 0]
    like = [value for value in kept if value.shape == (2, 3)]
    factored = len(like) + len(scalars) < len(kept)
    return OptimizerShape(len(like), sum(value.nbytes for value in scalars), factored, whole)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
