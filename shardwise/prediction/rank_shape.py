"""The part of a model that one rank of a plan holds, computed from the full model's shapes.

axis tp    its parts of the parameters that a style shards
axis ep    its experts, on the data ranks that hold the same ones
axis pp    the parameters of the rank's stages; tied ones are on several ranks
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from shardwise.core.layouts.layouts import layouts
from shardwise.core.mesh import PIPELINE
from shardwise.core.model_spec import ModelShape, ModelSpec, ParamShape
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import schedule_of
from shardwise.core.schedule.lower import most_alive
from shardwise.prediction.flat_groups import layout_of
from shardwise.techniques.recompute.price import Within, added_flops


def shape_on(spec: ModelSpec, plan: Plan, rank: int) -> ModelShape:
    """The units as `rank` holds them."""
    here, units = plan.coordinate(rank), parts_on(spec, plan, rank).shape.units
    held = (
        tuple(replace(p, layout=on) for p in unit.params if (on := layout_of(plan, p)).held(here))
        for unit in units
    )
    pairs = zip(units, held, strict=True)
    return ModelShape(tuple(replace(unit, params=params) for unit, params in pairs if params))


def parts_on(spec: ModelSpec, plan: Plan, rank: int) -> ModelSpec:
    """The model with this rank's part of every parameter, as if it held all stages."""
    here, shape = plan.coordinate(rank), spec.shape
    found = layouts([p.name for p in shape.params], spec.facts, plan)

    def part(param: ParamShape) -> ParamShape:
        layout = found[param.name]
        return replace(param, shape=layout.local_shape(param.shape, here), layout=layout)

    units = (replace(unit, params=tuple(map(part, unit.params))) for unit in shape.units)
    return replace(spec, shape=replace(shape, units=tuple(units)))


def stage_bytes(spec: ModelSpec, kept: Iterable[tuple[int, str]]) -> dict[int, int]:
    """The bytes that one microbatch keeps in each stage, in `kept` (storage, module) once each."""
    found = dict.fromkeys(range(spec.stages.number if spec.stages else 1), 0)
    for stage, storage in {(stage_of(spec, module), storage) for storage, module in kept}:
        found[stage] += spec.run.tape.storage_bytes[storage]
    return found


def stage_of(spec: ModelSpec, module: str) -> int:
    if spec.stages is None:
        return 0
    return min(spec.stages.of(module), default=spec.stages.number - 1)


def stages_on(plan: Plan, rank: int) -> set[int]:
    place, schedule = plan.mesh.coordinate(rank).get(PIPELINE, 0), schedule_of(plan)
    return {0} if schedule is None else {*schedule.stages(place)}


def moments(plan: Plan, place: int) -> list[dict[int, int]]:
    """Microbatches that each stage keeps, at moments when the pipeline rank may keep most bytes."""
    schedule = schedule_of(plan)
    return [{0: 1}] if schedule is None else most_alive(schedule, place)


def added_flops_on(spec: ModelSpec, plan: Plan, rank: int) -> int:
    here, flops = stages_on(plan, rank), added_flops(spec.run.tape, spec.recomputed).items()
    return plan.microbatches * sum(n for name, n in flops if stage_of(spec, name) in here)


def places(spec: ModelSpec) -> Callable[[str], int]:
    """The number of the unit that a module is in; for the model and the loss the last one's."""
    units = {name: k for k, unit in enumerate(spec.modules) for name in unit.modules if name}
    within = Within(units)
    outer = {name.rpartition(".")[0]: k for name, k in reversed(units.items()) if "." in name}

    def place(name: str) -> int:
        inner = within(name)
        return units[inner] if inner is not None else outer.get(name, len(spec.modules) - 1)

    return place
