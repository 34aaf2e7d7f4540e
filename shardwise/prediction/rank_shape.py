"""What one rank of a plan holds of a model, from the whole model as numbers.

axis pp    the parameters and buffers of the rank's stages; tied ones are on several ranks
axis dp    a share of each unit, and how often the unit is gathered (gathers.py; unit_gathers.py)
"""

from dataclasses import replace

from shardwise.core.layout import R
from shardwise.core.model_spec import (
    ModelShape,
    ModelSpec,
    ParamShape,
    StageSpec,
    UnitModules,
    UnitShape,
)
from shardwise.core.param_layout import AxisLayout
from shardwise.core.plan import Plan
from shardwise.core.schedule.library import build
from shardwise.core.schedule.lower import lower
from shardwise.core.schedule.memory import peaks, sizes
from shardwise.core.schedule.schedule import Schedule
from shardwise.prediction.gathers import gathers, order_of
from shardwise.prediction.group import layout_of
from shardwise.prediction.tensor_moves import TENSOR, held_parts
from shardwise.prediction.unit_gathers import Gather, UnitPath, unit_gathers

PIPELINE = "pp"


def schedule_of(plan: Plan) -> Schedule | None:
    """The schedule of a plan with its transfers; None where it has no pipeline."""
    if plan.pipeline is None:
        return None
    return lower(build(plan.pipeline, plan.mesh.size_of(PIPELINE)))


def shape_on(spec: ModelSpec, plan: Plan, rank: int) -> ModelShape:
    """The units as `rank` holds them, and how often it gathers each."""
    spec = _on_tensor_axis(spec, plan, rank)
    schedule, stages = schedule_of(plan), spec.stages
    if schedule is None or stages is None:
        times = gathers(spec.modules, spec.run)
        units = tuple(
            replace(unit, uses=uses, again=again)
            for unit, (uses, again) in zip(spec.shape.units, times, strict=True)
        )
        return ModelShape(units, spec.shape.buffers)
    place = plan.mesh.coordinate(rank).get(PIPELINE, 0)
    units = [_staged(unit, plan, stages, schedule, place) for unit in spec.shape.units]
    row = schedule.actions(place)
    found = unit_gathers(row, {s: _path(spec, stages, s) for s in schedule.stages(place)})
    units = [
        replace(unit, uses=found[Gather(n, "forward")], again=found[Gather(n, "backward")])
        for n, unit in enumerate(units)
    ]
    mine = set(schedule.stages(place))
    every = [(buffer, stages.of(buffer.name)) for buffer in spec.shape.buffers]
    buffers = tuple(buffer for buffer, at in every if not at or mine & {*at})
    return ModelShape(tuple(unit for unit in units if unit.params), buffers)


def _on_tensor_axis(spec: ModelSpec, plan: Plan, rank: int) -> ModelSpec:
    """The model with this rank's parts of the parameters that its tensor ranks share."""
    if spec.tensors is None:
        return spec
    place = plan.mesh.coordinate(rank).get(TENSOR, 0)
    part = held_parts(spec.tensors, plan, place, plan.mesh.size_of(TENSOR))
    units = (replace(unit, params=tuple(map(part, unit.params))) for unit in spec.shape.units)
    return replace(spec, shape=replace(spec.shape, units=tuple(units)))


def _staged(
    unit: UnitShape, plan: Plan, stages: StageSpec, schedule: Schedule, place: int
) -> UnitShape:
    """What the rank at `place` of the pipeline holds of a unit."""
    mine = set(schedule.stages(place))
    params = tuple(
        _held(plan, param, {schedule.home[stage] for stage in stages.params[param.name]})
        for param in unit.params
        if mine & {*stages.params[param.name]}
    )
    return replace(unit, params=params)


def _path(spec: ModelSpec, stages: StageSpec, stage: int) -> UnitPath:
    """The units of a stage, in the order in which its layers use them.

    A unit with a module outside of the layers is whole while its stage is computed.
    """
    units = spec.shape.units
    own = [n for n, u in enumerate(units) if any(stage in stages.params[p.name] for p in u.params)]
    around = {n for n in own if _around(spec.modules[n], stages)}
    path, reached = order_of(spec.modules, spec.run, [n for n in own if n not in around])
    back = [n for n in dict.fromkeys(path) if n in reached][::-1]
    return UnitPath(
        around=tuple(n for n in own if n in around),
        forward=path,
        backward=tuple(None if spec.modules[n].looks_up else n for n in back),
        graded=stage > 0 and any(x.trained for x in stages.bundles[0][stage - 1]),
    )


def _around(unit: UnitModules, stages: StageSpec) -> bool:
    return unit.encloses or any(not stages.of(module) for module in unit.modules)


def _held(plan: Plan, param: ParamShape, ranks: set[int]) -> ParamShape:
    """A parameter held by these ranks of the pipeline."""
    layout = layout_of(plan, param)
    on = AxisLayout(R, plan.mesh.size_of(PIPELINE), holders=tuple(sorted(ranks)))
    return replace(param, layout=replace(layout, axes=(*layout.axes, (PIPELINE, on))))


def activation_bytes_on(spec: ModelSpec, plan: Plan, rank: int) -> int:
    """The most bytes of activations that `rank` keeps at once.

    A stage keeps those of its layers, and the last one also those of the loss.
    """
    schedule, stages = schedule_of(plan), spec.stages
    if schedule is None or stages is None:
        return sum(stored_bytes for _, stored_bytes in spec.run.saved)
    of_stage = [0.0] * len(schedule.home)
    for name, stored_bytes in spec.run.saved:
        of_stage[min(stages.of(name), default=len(of_stage) - 1)] += stored_bytes
    place = plan.mesh.coordinate(rank).get(PIPELINE, 0)
    return round(peaks(schedule, sizes(tape=tuple(of_stage), rest=tuple(of_stage)))[place])
