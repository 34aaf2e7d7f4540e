"""The part of a model that one rank of a plan holds, computed from the full model's shapes.

axis tp    its parts of the parameters that a style shards
axis ep    its experts, on the data ranks that hold the same ones
axis pp    the parameters and buffers of the rank's stages; tied ones are on several ranks
axis dp    a share of each unit, and how often the unit is gathered (gathers.py; unit_gathers.py)
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from shardwise.core.layout import R
from shardwise.core.model_spec import (
    Call,
    ModelShape,
    ModelSpec,
    ParamShape,
    StageSpec,
    UnitModules,
    UnitShape,
)
from shardwise.core.param_layout import AxisLayout, Layout
from shardwise.core.plan import Plan
from shardwise.core.plan_schedule import schedule_of
from shardwise.core.schedule.action import Action
from shardwise.core.schedule.memory import most_alive
from shardwise.core.schedule.schedule import Schedule
from shardwise.core.zero import Tier
from shardwise.prediction.gathers import gathers, order_of
from shardwise.prediction.group import groups, layout_of
from shardwise.prediction.recompute import added_flops
from shardwise.prediction.tensor_moves import TENSOR, held_parts
from shardwise.prediction.unit_gathers import Gather, UnitPath, unit_gathers, whole_bytes

PIPELINE = "pp"
#: The axis of experts, and the data ranks that hold the same ones.
EXPERTS, REST = "ep", "edp"


def shape_on(spec: ModelSpec, plan: Plan, rank: int, *, trains: bool = True) -> ModelShape:
    """The units as `rank` holds them, and how often it gathers each.

    In a training step; in an evaluation if not `trains`.
    """
    shape, offload = _shape_on(spec, plan, rank, trains), plan.offloaded
    if offload is None or not offload.by_unit:
        return shape
    numels = [sum(p.numel for p in unit.params if p.trainable) for unit in shape.units]
    tiers = zip(shape.units, offload.tiers(numels), strict=True)
    return replace(shape, units=tuple(_offloaded(unit, plan, tier) for unit, tier in tiers))


def _offloaded(unit: UnitShape, plan: Plan, tier: Tier) -> UnitShape:
    """The unit with its optimizer's states on `tier`."""
    row = replace(plan.states, optim_tier=tier)
    params = [replace(p, layout=replace(layout_of(plan, p), row=row)) for p in unit.params]
    return replace(unit, params=tuple(params))


def _shape_on(spec: ModelSpec, plan: Plan, rank: int, trains: bool) -> ModelShape:
    spec = _on_tensor_axis(_under_layers(spec, plan), plan, rank)
    spec = _on_expert_axis(spec, plan, rank)
    schedule, stages = schedule_of(plan), spec.stages
    if schedule is None or stages is None:
        times = gathers(spec.modules, spec.run, _sharded(spec, plan))
        units = tuple(
            replace(unit, uses=uses, again=again)
            for unit, (uses, again) in zip(spec.shape.units, times, strict=True)
        )
        return ModelShape(units, spec.shape.buffers)
    place = plan.mesh.coordinate(rank).get(PIPELINE, 0)
    units = [_staged(unit, plan, stages, schedule, place) for unit in spec.shape.units]
    paths = _paths(spec, plan, stages, schedule.stages(place))
    evaluates = [Action("F", stage, 0) for stage in schedule.stages(place)]
    found = unit_gathers(schedule.actions(place) if trains else evaluates, paths)
    units = [
        replace(unit, uses=found[Gather(n, "forward")], again=found[Gather(n, "backward")])
        for n, unit in enumerate(units)
    ]
    mine = set(schedule.stages(place))
    every = [(buffer, stages.of(buffer.name)) for buffer in spec.shape.buffers]
    buffers = tuple(buffer for buffer, at in every if not at or mine & {*at})
    return ModelShape(tuple(unit for unit in units if unit.params), buffers)


def _under_layers(spec: ModelSpec, plan: Plan) -> ModelSpec:
    """The model with the row and the data axes of each layer that has a plan of its own."""
    if not plan.layers:
        return spec
    layouts: dict[int, Layout] = {}
    for number, layer in enumerate(plan.layers, 1):
        own, suffix = plan.of_layers(number), f".{number}" if layer.has_axes else ""
        shard, replicate = (
            f"{axis}{suffix}" if axis else "none" for axis in (own.shard_axis, own.replicate_axis)
        )
        layouts[number] = Layout(own.offloaded_states, shard, replicate)

    def under(param: ParamShape) -> ParamShape:
        """The parameter with the layout of its layer."""
        number = plan.layer_of(param.name)
        return replace(param, layout=layouts[number]) if number else param

    units = (replace(unit, params=tuple(map(under, unit.params))) for unit in spec.shape.units)
    return replace(spec, shape=replace(spec.shape, units=tuple(units)))


def _on_tensor_axis(spec: ModelSpec, plan: Plan, rank: int) -> ModelSpec:
    """The model with this rank's parts of the parameters that its tensor ranks share."""
    part: dict[int, Callable[[ParamShape], ParamShape]] = {}
    here = plan.coordinate(rank) if spec.layers else plan.mesh.coordinate(rank)
    for number, tensors in {0: spec.tensors, **spec.layers}.items():
        axis = f"{TENSOR}.{number}" if number else TENSOR
        if tensors is not None:
            place, ranks = here.get(axis, 0), plan.size_of(axis)
            part[number] = held_parts(tensors, plan, place, ranks, axis)
    if not part:
        return spec

    def on(param: ParamShape) -> ParamShape:
        """This rank's part, on the tensor axis of its layer."""
        number = plan.layer_of(param.name)
        number = number if number and plan.layers[number - 1].has_axes else 0
        return part[number](param) if number in part else param

    units = (replace(unit, params=tuple(map(on, unit.params))) for unit in spec.shape.units)
    return replace(spec, shape=replace(spec.shape, units=tuple(units)))


def _on_expert_axis(spec: ModelSpec, plan: Plan, rank: int) -> ModelSpec:
    """The model with this rank's experts, which `edp` holds in place of the inner data axis."""
    place = plan.coordinate(rank)[EXPERTS]

    def part(param: ParamShape) -> ParamShape:
        """This rank's part of a parameter."""
        on = spec.experts.get(param.name)
        if on is None or on.cut is None:
            return param
        layout = layout_of(plan, param)
        shard, replicate = (
            REST if axis == plan.inner_data_axis else axis
            for axis in (layout.shard, layout.replicate)
        )
        axes = (*layout.axes, (EXPERTS, on))
        layout = replace(layout, shard=shard, replicate=replicate, axes=axes)
        return replace(param, shape=on.cut.shape(param.shape, place), layout=layout)

    units = (replace(unit, params=tuple(map(part, unit.params))) for unit in spec.shape.units)
    return replace(spec, shape=replace(spec.shape, units=tuple(units)))


def _staged(
    unit: UnitShape, plan: Plan, stages: StageSpec, schedule: Schedule, place: int
) -> UnitShape:
    """The part of a unit that the rank at `place` of the pipeline holds."""
    mine = set(schedule.stages(place))
    params = tuple(
        _held(plan, param, {schedule.home[stage] for stage in stages.params[param.name]})
        for param in unit.params
        if mine & {*stages.params[param.name]}
    )
    return replace(unit, params=params)


def gathered_bytes_on(spec: ModelSpec, plan: Plan, rank: int, ahead: int = 1) -> int:
    """The most bytes of gathered units that `rank` of a pipeline stores at once.

    `ahead` is the option `prefetch`. Zero if no parameter is sharded, or without a pipeline.
    """
    schedule, stages, stored = schedule_of(plan), spec.stages, dict[str, int]()
    if schedule is None or stages is None:
        return 0
    for group in groups(plan, shape_on(spec, plan, rank)):
        if group.reshards:
            name = group.unit.name
            stored[name] = stored.get(name, 0) + group.element_bytes * group.flat.padded
    by_unit: dict[Hashable, int] = {
        n: stored.get(unit.name, 0) for n, unit in enumerate(spec.shape.units)
    }
    place = plan.mesh.coordinate(rank).get(PIPELINE, 0)
    spec = _on_expert_axis(_on_tensor_axis(_under_layers(spec, plan), plan, rank), plan, rank)
    paths = _paths(spec, plan, stages, schedule.stages(place))
    return max(whole_bytes(path, by_unit, ahead) for path in paths.values())


def _sharded(spec: ModelSpec, plan: Plan) -> frozenset[int]:
    """The units that are gathered for their use; all of them if none are.

    Others free no unit that is gathered: layers under another row, and experts that one rank alone
    holds. `spec` has the parts of this rank.
    """
    units = spec.shape.units
    found = (n for n, u in enumerate(units) if any(g.reshards for g in groups(plan, _alone(u))))
    return frozenset(found) or frozenset(range(len(units)))


def _alone(unit: UnitShape) -> ModelShape:
    return ModelShape((unit,), ())


def _paths(
    spec: ModelSpec, plan: Plan, stages: StageSpec, own: Sequence[int]
) -> dict[int, UnitPath]:
    """The units of each of a rank's stages, in the order in which the layers use them."""
    outside = frozenset[str]().union(*(stages.outside[stage] for stage in own))
    sharded = _sharded(spec, plan)
    return {stage: _path(spec, stages, (stage, outside), sharded) for stage in own}


def _path(
    spec: ModelSpec,
    stages: StageSpec,
    at: tuple[int, frozenset[str]],
    sharded: Collection[int],
) -> UnitPath:
    """The `sharded` units of a stage, in the order in which its layers use them.

    A unit with a module outside of the layers, or with a parameter that is read `outside` of them,
    stays gathered while its stage is computed.
    """
    units, (stage, outside) = spec.shape.units, at
    own = [n for n, u in enumerate(units) if any(stage in stages.params[p.name] for p in u.params)]
    read = {n for n in own if any(p.name in outside for p in units[n].params)}
    around = {n for n in own if n in read or _around(spec.modules[n], stages)}
    own = [n for n in own if n in sharded]
    run = spec.run._replace(calls=tuple(_calls(spec.run.calls, stages, stage)))
    path, calls, reached = order_of(spec.modules, run, [n for n in own if n not in around])
    back = [n for n in calls[::-1] if n in reached]
    return UnitPath(
        around=tuple(n for n in own if n in around),
        forward=path,
        backward=tuple(None if spec.modules[n].looks_up else n for n in back),
        graded=stage > 0 and any(x.trained for x in stages.bundles[0][stage - 1]),
    )


def _calls(calls: Iterable[Call], stages: StageSpec, stage: int) -> Iterator[Call]:
    """The calls that run in `stage`.

    The call of a layer that several stages hold runs in the earliest of them that has not ended.
    """
    reached = 0
    for call in calls:
        if call.begins and not call.recomputed:
            held_by = (s for s in stages.of(call.module) if s >= reached)
            reached = min(held_by, default=reached)
        if reached == stage:
            yield call


def _around(unit: UnitModules, stages: StageSpec) -> bool:
    return unit.encloses or any(not stages.of(module) for module in unit.modules)


def _held(plan: Plan, param: ParamShape, ranks: set[int]) -> ParamShape:
    """A parameter held by these ranks of the pipeline."""
    layout = layout_of(plan, param)
    on = AxisLayout(R, plan.mesh.size_of(PIPELINE), holders=tuple(sorted(ranks)))
    return replace(param, layout=replace(layout, axes=(*layout.axes, (PIPELINE, on))))


def stage_bytes(spec: ModelSpec, kept: Iterable[tuple[int, str]]) -> dict[int, int]:
    """The bytes that one microbatch keeps in each stage; without a pipeline there is stage 0.

    `kept` are storages and the modules that keep them. A stage keeps a storage once; the last one
    also those of the loss.
    """
    found = dict.fromkeys(range(spec.stages.number if spec.stages else 1), 0)
    for stage, storage in {(stage_of(spec, module), storage) for storage, module in kept}:
        found[stage] += spec.run.tape.storage_bytes[storage]
    return found


def stage_of(spec: ModelSpec, module: str) -> int:
    """The stage that keeps what is saved in the forward of this module."""
    if spec.stages is None:
        return 0
    return min(spec.stages.of(module), default=spec.stages.number - 1)


def stages_on(plan: Plan, rank: int) -> set[int]:
    """The stages of `rank`; without a pipeline there is stage 0."""
    place, schedule = plan.mesh.coordinate(rank).get(PIPELINE, 0), schedule_of(plan)
    return {0} if schedule is None else {*schedule.stages(place)}


def moments(plan: Plan, place: int) -> list[dict[int, int]]:
    """The microbatches that each stage keeps, at the moments at which the rank at `place` of the
    pipeline may keep most bytes.
    """
    schedule = schedule_of(plan)
    return [{0: 1}] if schedule is None else most_alive(schedule, place)


def added_flops_on(spec: ModelSpec, plan: Plan, rank: int) -> int:
    """The operations that recomputation adds to a step of `rank`, of microbatches of one size."""
    here, flops = stages_on(plan, rank), added_flops(spec.run.tape, spec.recomputed).items()
    return plan.microbatches * sum(n for name, n in flops if stage_of(spec, name) in here)
