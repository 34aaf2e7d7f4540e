"""Shards a model: the techniques of `APPLY` in their order, then the pipeline, then the data axes.

Each axis shards the result of the previous one: the tensor axis shards parameters, the pipeline
axis keeps those of a rank's stages, and the data axes flatten these.  Stages and units are chosen
before, by the sizes of full parameters, so that all ranks make the same choice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, TypeVar

from torch import nn

from shardwise.comm.tiers.disk import Disk
from shardwise.comm.world import Axis, World
from shardwise.core.applied import Applied
from shardwise.core.buffer_sizes import Slots, gradient_slots
from shardwise.core.layouts.layouts import layouts, norm_axes
from shardwise.core.layouts.param_layout import Groups
from shardwise.core.layouts.tensor_table import Table
from shardwise.core.mesh import PIPELINE, TENSOR
from shardwise.core.model_spec import Facts, TiledParam
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.hook import Hook, nothing
from shardwise.engine.batch import data_axes
from shardwise.engine.checks.reads import guard_shards
from shardwise.engine.optimizer.elementwise import require_whole
from shardwise.engine.options import Build
from shardwise.engine.rank_zero_weights import RankZeroWeights
from shardwise.flat.flat_parameter import Flat
from shardwise.techniques.context import apply as context
from shardwise.techniques.data.apply import (
    Held,
    Sharding,
    agreed,
    flats_of,
    hooked,
    shard,
    sizes,
    units_of,
)
from shardwise.techniques.data.unit_hooks import Data
from shardwise.techniques.data.units import Pace, StagedUnits, Unit, Units
from shardwise.techniques.data.weight_gradient import take_over
from shardwise.techniques.expert import apply as expert
from shardwise.techniques.layers import apply as layers
from shardwise.techniques.layers.plans import LayerPlans, require_units
from shardwise.techniques.pipeline import stage_module
from shardwise.techniques.pipeline.stage_module import Staging
from shardwise.techniques.recompute import apply as recompute
from shardwise.techniques.tensor import apply as tensor
from shardwise.techniques.tile.apply import Tiling, tile
from shardwise.wrap.wrap_policy import UnitSpec

Technique = TypeVar("Technique")


@dataclass(frozen=True)
class ShardedModel:
    """A sharded model: its axes, units and flat groups, its stages, and what was applied.
    `norms` has, for each plan of layers, the flat groups and the axes over which the squares of
    their gradients are summed; over the pipeline's axis they are summed in addition.
    """

    axes: tuple[Axis, Axis]
    tensor: Axis
    staging: Staging | None
    data: Data
    flats: list[Flat]
    applied: Sequence[Applied]
    norms: list[tuple[list[Flat], tuple[Axis, ...]]]

    def of(self, technique: type[Technique]) -> Technique:
        return next(each for each in self.applied if isinstance(each, technique))

    def copy(self, name: str) -> int:
        """The index of this rank among the holders of the buffer or module of that name."""
        copy = self.place + self.tensor.rank
        return copy + (self.staging.copy(name) if self.staging else 0)

    @property
    def place(self) -> int:
        return self.axes[1].rank * self.axes[0].size + self.axes[0].rank


def lay_out(
    model: nn.Module,
    build: Build,
    weights: RankZeroWeights,
    disk: Disk | None = None,
) -> ShardedModel:
    """Shard `model` in place.  All ranks of the world call it.
    Raises InputError if the optimizer needs a whole parameter that an axis cuts.
    """
    world, plan = build.world, build.plan
    tiling = tile(model, plan, build.options.units)
    how = _sharding(model, build, weights, disk, tiling)
    schedule = stage_module.schedule_of(plan)
    at = stage_module.stages_of(model, build.starts, build.calls) if schedule else {}

    def unit_key(spec: UnitSpec) -> object:
        return {(at.get(name), plan.layer_of(name)) for name, _ in spec.params}

    specs = units_of(model, how, world.axis(TENSOR).size, unit_key)
    names = {spec.name: [name for name, _ in spec.params] for spec in specs}
    facts = facts_of(model, names, plan, build.table, build.layers, at, tiling.params)
    found = layouts(chain.from_iterable(names.values()), facts, plan)
    trained = [pair for spec in specs for pair in spec.params if pair[1].requires_grad]
    require_whole(build.options.spec, [(name, p.dim(), found[name]) for name, p in trained])
    twins = None
    if schedule is not None:
        twins = stage_module.twin(model, world, plan, build.table)
        stage_module.agree(model, world.axis(PIPELINE), world.device)
    applied = [each for apply in APPLY if (each := apply(model, build)) is not None]
    pace, staged = Pace(ahead=build.options.prefetch, by_hand=False), None
    if schedule is not None and twins is not None:
        staged = stage_module.lay_out(model, twins, world, schedule, build.starts, build.calls)
        for each in applied:
            each.divided(model)
        specs = staged.own_units(specs)
    held = Held(found, _axes(world, applied), _sums(applied, staged))
    units = shard(how, specs, held)
    if staged is None:
        data = hooked(model, how, units, pace)
    else:
        data = _driven(model, how, units, staged, pace)
    if plan.arenas and staged is None:
        world.arenas.gradients.reserve(_gradient_slots(units, data.pace), world.storage)
    if plan.accumulate > 1 or staged is not None:
        take_over(model, data, sizes(units))
    for each in applied:
        each.install(model)
    guard_shards(model, data, together=any(each.mixes for each in applied))
    if staged is not None:
        model.register_forward_pre_hook(Hook(data, nothing))  # refuses copies of a sharded model
    flats = flats_of(units)
    norms = _norms(flats, plan, held)
    return ShardedModel(how.axes, world.axis(TENSOR), staged, data, flats, applied, norms)


def _axes(world: World, applied: Sequence[Applied]) -> dict[str, Axis]:
    found = [*world.axes, *chain.from_iterable(each.axes() for each in applied)]
    return {axis.name: axis for axis in found}


def _sums(applied: Sequence[Applied], staged: Staging | None) -> dict[tuple[str, Groups], Axis]:
    sums = {key: axis for each in applied for key, axis in each.sums().items()}
    if staged is not None:
        sums |= {(PIPELINE, groups): axis for groups, axis in staged.sums.items()}
    return sums


def _norms(
    flats: Sequence[Flat], plan: Plan, held: Held
) -> list[tuple[list[Flat], tuple[Axis, ...]]]:
    """For each plan of layers, its flat groups and the axes of the sum of their squares."""
    found = [list[Flat]() for _ in range(len(plan.layers) + 1)]
    for flat in flats:
        found[plan.layer_of(flat.names[0])].append(flat)
    every = [tuple(map(held.axis, axes)) for axes in norm_axes(plan)]
    return list(zip(found, every, strict=True))


def _sharding(
    model: nn.Module, build: Build, weights: RankZeroWeights, disk: Disk | None, tiling: Tiling
) -> Sharding:
    world, plan, offload = build.world, build.plan, build.plan.offloaded
    shard, replicate = data_axes(world, plan)
    return Sharding(
        row=plan.states,
        shard=shard,
        replicate=replicate,
        units=build.options.units,
        bucket_bytes=plan.bucket_bytes,
        fill=build.fill,
        device=world.storage,
        numbers=world.device,
        broadcast_buffers=build.options.broadcast_buffers,
        least_unit_bytes=build.options.least_unit_bytes,
        tiers=world.tiers,
        late=offload is not None and offload.undelayed is not None,
        arena=world.arenas.gradients,
        disk=disk,
        tiling=tiling,
        gathers=plan.gathers,
        alone=tuple(build.layers.alone(model, build.options.units)),
        weights=weights,
        number=world.number,
    )


def _gradient_slots(units: Sequence[Unit], pace: Pace) -> Slots:
    flats = [[flat.grads for flat in unit.trained if flat.moves.shards_gradient] for unit in units]
    bytes_of = [[g.views.plan.padded * g.like.element_size() for g in unit] for unit in flats]
    return gradient_slots(bytes_of, pace.in_flight)


def _driven(
    model: nn.Module, how: Sharding, units: Sequence[Unit], staged: Staging, pace: Pace
) -> Data:
    """Hook the units, by the stages that use them; units with tied parameters are reduced last."""
    names = [[name for group in unit.groups for name in group.names] for unit in units]
    stages = {
        stage: [u for u, own in zip(units, names, strict=True) if stage in staged.stages_using(own)]
        for stage in staged.own_stages
    }
    tied = [
        (min(own), unit)
        for unit, own in zip(units, names, strict=True)
        if staged.ties.keys() & set(own)
    ]
    last = [unit for _, unit in sorted(tied, key=lambda pair: pair[0])]
    inside = {m for layer in staged.stages.layers.real for m in layer.modules()}
    by_stage = StagedUnits(stages, last, inside)
    return Data(model, Units(units), pace, agreed(model, how, units), by_stage)


# --- the techniques, in the order of application: a new one is one line here ----------------------

#: Each changes the model in place, and is called by all ranks.
APPLY: Final[tuple[Callable[[nn.Module, Build], Applied | None], ...]] = (
    tensor.applied,
    expert.applied,
    layers.applied,
    recompute.applied,
    context.applied,
)


def facts_of(
    model: nn.Module,
    units: Mapping[str, Sequence[str]],
    plan: Plan,
    table: Table | None,
    layers: LayerPlans,
    at: Mapping[str, tuple[int, ...]],
    tiles: Mapping[str, TiledParam],
) -> Facts:
    """What the layouts of a model's parameters follow from, before it is cut. `units` are the names
    of the parameters of each unit, `tiles` those of tiles, `at` the stages of each parameter, none
    without a pipeline.  Raises InputError for a unit of layers with different plans.
    """
    require_units(units, plan)
    tables = {0: (table, plan)} | {each.number: (each.table, each.plan) for each in layers.meshes}
    tensors = {
        number: tensor.tensor_spec(model, of, own.sp, own.mesh.size_of(TENSOR), layers=number > 0)
        for number, (of, own) in tables.items()
        if of is not None
    }
    return Facts(tensors, expert.layouts_of(model, plan.ep), at, tiles)
