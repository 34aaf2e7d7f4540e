"""What a spec of the plain model says besides its passes, and where passes are recorded."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from shardwise.comm.world import World, traced
from shardwise.core.errors import bad
from shardwise.core.mesh import TENSOR, Mesh
from shardwise.core.model_spec import (
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
from shardwise.engine.spec import buffer_shapes, dtype_name

V = TypeVar("V")


class SharedParts:
    """What structures of one model under several plans have in common, computed once."""

    def __init__(self) -> None:
        self.values: dict[object, Any] = {}

    def __call__(self, key: object, make: Callable[[], V]) -> V:
        """The value of `key`, which `make` returns at the first call."""
        if key not in self.values:
            self.values[key] = make()
        return self.values[key]


def without_passes(
    plain: nn.Module,
    plan: Plan,
    specs: Sequence[Any],
    facts: Facts,
    expert_layers: Mapping[str, ExpertLayer],
) -> ModelSpec:
    """What a ModelSpec says of a model without its passes, stages and recomputed modules."""
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
    """The ranks of the tensor axis around `rank`, in a world that moves nothing."""
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
    """The shapes and the element types of the tensors in a batch."""
    return tuple((x.shape, x.dtype) for x in leaves(part, Tensor, objects=True))


def valueless(model: nn.Module) -> Exception:
    return bad(
        f"a {type(model).__name__} on the meta device whose forward reads values",
        "a model that computes tensors from tensors, or one with its weights",
        "the model built on the CPU",
    )
