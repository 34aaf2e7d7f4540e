"""Shards a model on all axes: tensor, then experts, then pipeline, then data.

Each axis shards the result of the previous one: the tensor axis shards parameters, the pipeline
axis keeps those of a rank's stages, and the data axes flatten these.  Stages and units are chosen
before, by the sizes of full parameters, so that all ranks make the same choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.comm.disk import Disk
from shardwise.comm.world import Axis, World
from shardwise.core.applied import Applied
from shardwise.core.arena_slots import Slots, gradient_slots
from shardwise.core.hook import Hook, nothing
from shardwise.core.layouts import layouts, norm_axes, on_tiers
from shardwise.core.mesh import PIPELINE, TENSOR
from shardwise.core.model_spec import Facts
from shardwise.core.param_layout import Groups
from shardwise.core.plan import Plan
from shardwise.engine.one_stage import Objective, OneStage
from shardwise.engine.rank_zero_weights import RankZeroWeights
from shardwise.engine.reads import guard_shards
from shardwise.engine.training import Build
from shardwise.techniques.data.apply import (
    Held,
    Sharding,
    agreed,
    flats_of,
    gathers,
    hooked,
    shard,
    sizes,
    units_of,
)
from shardwise.techniques.data.flat_parameter import Flat
from shardwise.techniques.data.hooks import Data
from shardwise.techniques.data.pace import Pace
from shardwise.techniques.data.staged_hooks import StagedUnits
from shardwise.techniques.data.units import Unit, Units
from shardwise.techniques.data.weight_gradient import take_over
from shardwise.techniques.data.wrap_policy import UnitSpec
from shardwise.techniques.expert import apply as expert_parallel
from shardwise.techniques.expert.apply import ExpertLayout
from shardwise.techniques.layers.apply import Regions
from shardwise.techniques.layers.exchange import RowExchange
from shardwise.techniques.layers.plans import LayerPlans, require_units
from shardwise.techniques.pipeline import stage_module
from shardwise.techniques.pipeline.pipelined import Pipelined
from shardwise.techniques.pipeline.stage_module import Staging
from shardwise.techniques.tensor import apply as tensor_parallel
from shardwise.techniques.tensor.layout import Tensors
from shardwise.techniques.tensor.table import Table
from shardwise.techniques.tile.apply import Tiling, tile


@dataclass(frozen=True)
class ShardedModel:
    """A sharded model: its data axes, units and flat groups, and its state on the other axes.

    `norms` has, for each plan of layers, the flat groups and the axes over which the squares of
    their gradients are summed; over the pipeline's axis they are summed in addition.
    """

    axes: tuple[Axis, Axis]
    tensors: Tensors
    experts: ExpertLayout
    staging: Staging | None
    data: Data
    flats: list[Flat]
    rows: RowExchange
    applied: Sequence[Applied]
    norms: list[tuple[list[Flat], tuple[Axis, ...]]]

    def passes(self, model: nn.Module, objective: Objective) -> OneStage | Pipelined:
        """The passes of a step of `model`, whose loss of a part of a batch is `objective`."""
        # whether this rank computes no rows of other ranks, in experts or in layers of a mesh
        apart = not (self.experts.routes or self.rows.axes)
        if self.staging is not None:
            staged = self.staging, self.data, self.tensors
            return Pipelined(model, *staged, objective, apart=apart)
        device = self.data.consensus.device
        return OneStage(model, self.data, self.applied, objective, device, apart=apart)

    def copy(self, name: str) -> int:
        """The index of this rank among those that hold the buffer or module of that name."""
        copy = self.data_rank + self.tensors.axis.rank
        return copy + (self.staging.copy(name) if self.staging else 0)

    @property
    def data_rank(self) -> int:
        """The index of this rank's share of the global batch."""
        return self.axes[1].rank * self.axes[0].size + self.axes[0].rank


def lay_out(
    model: nn.Module, build: Build, weights: RankZeroWeights, disk: Disk | None = None
) -> ShardedModel:
    """Shard `model` in place.  All ranks of the world call it."""
    world, plan = build.world, build.plan
    how = _sharding(model, build, weights, disk)
    schedule, regions = stage_module.schedule_of(plan), Regions.open(build)
    at = stage_module.stages_of(model, build.starts, build.beside) if schedule else {}

    def unit_key(spec: UnitSpec) -> object:
        return {(at.get(name), plan.layer_of(name)) for name, _ in spec.params}

    specs = units_of(model, how, world.axis(TENSOR).size, unit_key)
    require_units(specs, plan)
    facts = facts_of(model, plan, build.table, build.layers, at, how.tiling)
    found = layouts([name for spec in specs for name, _ in spec.params], facts, plan)
    twins = None
    if schedule is not None:
        twins = stage_module.twin(model, world, plan, build.table)
        stage_module.agree(model, world.axis(PIPELINE), world.device)
    tensors = tensor_parallel.lay_out(model, world, plan.sp, build.table)
    tensors.others = regions.lay_out(model)
    experts = expert_parallel.lay_out(model, world, plan, how.axes, build.rows)
    build.recompute.apply(model, world, tensors)
    pace, staged = Pace(ahead=build.prefetch, by_hand=False), None
    if schedule is not None and twins is not None:
        staged = stage_module.lay_out(model, twins, world, schedule, build.starts, build.beside)
        build.recompute.release(model)
        specs = staged.own_units(specs)
    names = [[name for name, _ in spec.params] for spec in specs]
    numels = [sum(p.numel() for _, p in spec.params if p.requires_grad) for spec in specs]
    found = on_tiers(found, list(zip(names, numels, strict=True)), plan)
    held = Held(found, _axes(world, regions, experts), _sums(tensors, staged))
    units = shard(how, specs, held)
    if staged is None:
        data = hooked(model, how, units, pace)
    else:
        data = _driven(model, how, units, staged, pace)
    if plan.arenas and staged is None:
        world.arenas.gradients.reserve(_gradient_slots(units, data.pace), world.device)
    if plan.accumulate > 1 or staged is not None:
        take_over(model, data, sizes(units))
    regions.install(model, build.recompute.kinds)
    if staged is None:
        guard_shards(model, data)
    else:
        model.register_forward_pre_hook(Hook(data, nothing))  # refuses copies of a sharded model
    flats = flats_of(units)
    norms = _norms(flats, plan, held)
    rows = regions.exchange
    applied = tensors, experts, build.recompute, rows
    return ShardedModel(how.axes, tensors, experts, staged, data, flats, rows, applied, norms)


def facts_of(
    model: nn.Module,
    plan: Plan,
    table: Table | None,
    layers: LayerPlans,
    at: Mapping[str, tuple[int, ...]],
    tiling: Tiling,
) -> Facts:
    """What the layouts of a model's parameters follow from, before it is cut.

    `at` are the stages of each parameter; none without a pipeline.
    """
    tables = {0: (table, plan)} | {each.number: (each.table, each.plan) for each in layers.meshes}
    tensors = {
        number: tensor_parallel.tensor_spec(
            model, of, own.sp, own.mesh.size_of(TENSOR), layers=number > 0
        )
        for number, (of, own) in tables.items()
        if of is not None
    }
    return Facts(tensors, expert_parallel.layouts_of(model, plan.ep), at, tiling.params)


def _axes(world: World, regions: Regions, experts: ExpertLayout) -> dict[str, Axis]:
    """The axes of this rank by the names that layouts have."""
    meshes = [axis for region in regions.regions for axis in region.world.axes]
    axes = [*world.axes, *meshes, experts.axis, experts.shard, experts.replicate]
    return {axis.name: axis for axis in axes}


def _sums(tensors: Tensors, staged: Staging | None) -> dict[tuple[str, Groups], Axis]:
    """The axes that sum gradients, by the axis and the groups of its ranks."""
    sums = {
        (each.axis.name, groups): axis
        for each in (tensors, *tensors.others)
        for groups, axis in each.sums.items()
    }
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
    model: nn.Module, build: Build, weights: RankZeroWeights, disk: Disk | None
) -> Sharding:
    """The storage of parameters under the model's own plan."""
    world, plan, offload = build.world, build.plan, build.plan.offloaded
    return Sharding(
        row=plan.states,
        shard=world.axis(plan.shard_axis or "none"),
        replicate=world.axis(plan.replicate_axis or "none"),
        units=build.units,
        bucket_bytes=plan.bucket_bytes,
        fill=build.fill,
        device=world.device,
        least_unit_bytes=build.least_unit_bytes,
        tiers=world.tiers,
        late=offload is not None and offload.undelayed is not None,
        arena=world.arenas.gradients,
        disk=disk,
        tiling=tile(model, plan, build.units),
        gathers=gathers(plan),
        alone=tuple(build.layers.alone(model, build.units)),
        weights=weights,
    )


def _gradient_slots(units: Sequence[Unit], pace: Pace) -> Slots:
    """The slots for gradients that are freed in each backward pass."""
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
