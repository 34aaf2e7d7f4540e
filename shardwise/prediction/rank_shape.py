"""The part of a model that one rank of a plan holds, computed from the full model's shapes.

axis tp    its parts of the parameters that a style shards
axis ep    its experts, on the data ranks that hold the same ones
axis pp    the parameters and buffers of the rank's stages; tied ones are on several ranks
axis dp    a share of each unit, and how often the unit is gathered (gathers.py; unit_gathers.py)
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from shardwise.core.layouts import layouts, on_tiers
from shardwise.core.mesh import PIPELINE
from shardwise.core.model_spec import (
    Call,
    ModelShape,
    ModelSpec,
    ParamShape,
    StageSpec,
    UnitModules,
    UnitShape,
)
from shardwise.core.plan import Plan
from shardwise.core.plan_schedule import schedule_of
from shardwise.core.schedule.action import Action
from shardwise.core.schedule.memory import most_alive
from shardwise.prediction.gathers import gathers, order_of
from shardwise.prediction.group import groups, layout_of
from shardwise.prediction.unit_gathers import Gather, UnitPath, unit_gathers, whole_bytes
from shardwise.techniques.recompute.price import added_flops


def shape_on(spec: ModelSpec, plan: Plan, rank: int, *, trains: bool = True) -> ModelShape:
    """The units as `rank` holds them, and how often it gathers each.

    In a training step; in an evaluation if not `trains`.
    """
    spec = _parts_on(spec, plan, rank)
    schedule, stages, units = schedule_of(plan), spec.stages, spec.shape.units
    if schedule is None or stages is None:
        times = gathers(spec.modules, spec.run, _sharded(spec, plan))
        buffers = spec.shape.buffers
    else:
        place = plan.mesh.coordinate(rank).get(PIPELINE, 0)
        paths = _paths(spec, plan, stages, schedule.stages(place))
        evaluates = [Action("F", stage, 0) for stage in schedule.stages(place)]
        found = unit_gathers(schedule.actions(place) if trains else evaluates, paths)
        times = [
            (found[Gather(n, "forward")], found[Gather(n, "backward")]) for n in range(len(units))
        ]
        mine = set(schedule.stages(place))
        every = [(buffer, stages.of(buffer.name)) for buffer in spec.shape.buffers]
        buffers = tuple(buffer for buffer, at in every if not at or mine & {*at})
    here = plan.coordinate(rank)
    units = [
        replace(unit, params=params, uses=uses, again=again)
        for unit, (uses, again) in zip(units, times, strict=True)
        if (params := tuple(p for p in unit.params if layout_of(plan, p).held(here)))
    ]
    found = {p.name: layout_of(plan, p) for unit in units for p in unit.params}
    own = [
        ([p.name for p in unit.params], sum(p.numel for p in unit.params if p.trainable))
        for unit in units
    ]
    found = on_tiers(found, own, plan)
    units = (
        replace(unit, params=tuple(replace(p, layout=found[p.name]) for p in unit.params))
        for unit in units
    )
    return ModelShape(tuple(units), buffers)


def _parts_on(spec: ModelSpec, plan: Plan, rank: int) -> ModelSpec:
    """The model with this rank's part of every parameter, as if it held all stages."""
    here, shape = plan.coordinate(rank), spec.shape
    found = layouts([p.name for p in shape.params], spec.facts, plan)

    def part(param: ParamShape) -> ParamShape:
        """This rank's part of a parameter."""
        layout = found[param.name]
        return replace(param, shape=layout.local_shape(param.shape, here), layout=layout)

    units = (replace(unit, params=tuple(map(part, unit.params))) for unit in shape.units)
    return replace(spec, shape=replace(shape, units=tuple(units)))


def gathered_bytes_on(spec: ModelSpec, plan: Plan, rank: int, ahead: int = 1) -> int:
    """The most bytes of gathered units that `rank` of a pipeline stores at once.

    `ahead` is the option `prefetch`. Zero if no parameter is sharded, or without a pipeline.
    """
    schedule, stages, stored = schedule_of(plan), spec.stages, dict[str, int]()
    if schedule is None or stages is None:
        return 0
    for group in groups(plan, shape_on(spec, plan, rank)):
        if group.moves.reshards:
            name = group.unit.name
            stored[name] = stored.get(name, 0) + group.element_bytes * group.flat.padded
    by_unit: dict[Hashable, int] = {
        n: stored.get(unit.name, 0) for n, unit in enumerate(spec.shape.units)
    }
    place = plan.mesh.coordinate(rank).get(PIPELINE, 0)
    paths = _paths(_parts_on(spec, plan, rank), plan, stages, schedule.stages(place))
    return max(whole_bytes(path, by_unit, ahead) for path in paths.values())


def _sharded(spec: ModelSpec, plan: Plan) -> frozenset[int]:
    """The units that are gathered for their use; all of them if none are.

    Others free no unit that is gathered: layers under another row, and experts that one rank alone
    holds. `spec` has the parts of this rank.
    """
    units = spec.shape.units
    found = (
        n for n, u in enumerate(units) if any(g.moves.reshards for g in groups(plan, _alone(u)))
    )
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
