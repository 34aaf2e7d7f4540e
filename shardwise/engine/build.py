"""Shards a model on all axes: tensor, then experts, then pipeline, then data.

Each axis shards the result of the previous one: the tensor axis shards parameters, the pipeline
axis keeps those of a rank's stages, and the data axes flatten these.  Stages and units are chosen
before, by the sizes of full parameters, so that all ranks make the same choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.comm.disk import Disk
from shardwise.comm.world import Axis
from shardwise.core.arena_slots import Slots, gradient_slots
from shardwise.core.hook import Hook, nothing
from shardwise.engine import expert_parallel, stage_module, tensor_parallel
from shardwise.engine.expert_parallel import ExpertLayout
from shardwise.engine.layer_plans import require_units
from shardwise.engine.rank_zero_weights import RankZeroWeights
from shardwise.engine.reads import guard_shards
from shardwise.engine.regions import Regions
from shardwise.engine.shard import (
    Sharding,
    agreed,
    flats_of,
    gathers,
    hooked,
    sizes,
    sums_of,
    units_of,
)
from shardwise.engine.stage_module import Staging
from shardwise.engine.tensor_layout import Tensors
from shardwise.engine.tiling import tile
from shardwise.engine.training import Build
from shardwise.parallel.data.flat_parameter import Flat
from shardwise.parallel.data.hooks import Data
from shardwise.parallel.data.pace import Pace
from shardwise.parallel.data.staged_hooks import StagedUnits
from shardwise.parallel.data.units import Unit, Units
from shardwise.parallel.data.weight_gradient import take_over
from shardwise.parallel.data.wrap_policy import UnitSpec
from shardwise.parallel.redistribute.exchange import RowExchange


@dataclass(frozen=True)
class ShardedModel:
    """A sharded model: its data axes, units and flat groups, and its state on the other axes.

    `own` has the flat groups of layers with a plan of their own, and the axes of their norm.
    """

    axes: tuple[Axis, Axis]
    tensors: Tensors
    experts: ExpertLayout
    staging: Staging | None
    data: Data
    flats: list[Flat]
    rows: RowExchange
    own: list[tuple[list[Flat], tuple[Axis, ...]]]

    @property
    def norms(self) -> list[tuple[list[Flat], tuple[Axis, ...]]]:
        """Flat groups, and the axes whose ranks hold different parts of their gradients.

        The pipeline's axis apart.
        """
        shard, own = self.axes[0], {id(flat) for flats, _ in self.own for flat in flats}
        axes = shard, *((self.experts.axis,) if shard.size == 1 else ()), self.tensors.axis
        return [([flat for flat in self.flats if id(flat) not in own], axes), *self.own]

    @property
    def rows_of_others(self) -> bool:
        """Whether this rank computes rows of other ranks, in experts or in layers of a mesh."""
        return self.experts.routes or bool(self.rows.axes)

    def begin(self, parts: Sequence[Any], *, trains: bool = False) -> list[Any]:
        """A pass over these parts of a batch begins; returns the parts to compute."""
        found = self.experts.begin(parts) if trains else self.experts.with_stand_ins(parts)
        self.rows.begin(found)
        return found

    def enter(self, part: Any) -> None:
        """The forward of this part begins."""
        self.experts.enter(part)
        self.rows.enter(part)

    def end(self) -> None:
        """All passes of a training step, or that of an evaluation, have run."""
        self.experts.end()
        self.rows.forget()

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
    schedule, tensor_ranks = stage_module.schedule_of(plan), world.axis(tensor_parallel.AXIS).size
    regions = Regions.open(build, how)
    if schedule is None:
        specs = units_of(model, how, tensor_ranks, regions.unit_key)
        require_units(specs, plan)
        tensors = tensor_parallel.lay_out(model, world, plan.sp, build.table)
        tensors.others = regions.lay_out(model)
        experts = expert_parallel.lay_out(model, world, plan, how.axes, build.rows)
        build.recompute.apply(model, world, tensors)
        units = regions.shard(how, specs, tensors, experts=experts)
        data = hooked(model, how, units, Pace(ahead=build.prefetch, by_hand=False))
        if plan.arenas:
            world.arenas.gradients.reserve(_gradient_slots(units, data.pace), world.device)
        if plan.accumulate > 1:
            take_over(model, data, sizes(units))
        regions.install(model, build.recompute.kinds)
        guard_shards(model, data)
        return ShardedModel(
            *(how.axes, tensors, experts, None, data, flats_of(units)),
            *(regions.exchange, regions.norms(units, experts)),
        )
    at = stage_module.stages_of(model, build.starts, build.beside)

    def unit_key(spec: UnitSpec) -> object:
        return {at[name] for name, _ in spec.params}, regions.unit_key(spec)

    specs = units_of(model, how, tensor_ranks, unit_key)
    require_units(specs, plan)
    twins = stage_module.twin(model, world, plan, build.table)
    stage_module.agree(model, world.axis(stage_module.AXIS), world.device)
    tensors = tensor_parallel.lay_out(model, world, plan.sp, build.table)
    tensors.others = regions.lay_out(model)
    experts = expert_parallel.lay_out(model, world, plan, how.axes, build.rows)
    build.recompute.apply(model, world, tensors)
    staged = stage_module.lay_out(model, twins, world, schedule, build.starts, build.beside)
    build.recompute.release(model)
    units = regions.shard(how, staged.own_units(specs), tensors, staged, experts)
    data = _driven(model, how, units, staged, Pace(ahead=build.prefetch, by_hand=False))
    take_over(model, data, sizes(units))
    regions.install(model, build.recompute.kinds)
    model.register_forward_pre_hook(Hook(data, nothing))  # refuses copies of a sharded model
    return ShardedModel(
        *(how.axes, tensors, experts, staged, data, flats_of(units)),
        *(regions.exchange, regions.norms(units, experts)),
    )


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
        offload=offload if offload is not None and offload.by_unit else None,
        arena=world.arenas.gradients,
        disk=disk,
        tiling=tile(model, plan, build.units),
        gathers=gathers(plan),
        alone=tuple(build.layers.alone(model, build.units)),
        weights=weights,
    )


def _gradient_slots(units: Sequence[Unit], pace: Pace) -> Slots:
    """The slots for gradients that are freed in each backward pass."""
    flats = [[flat.grads for flat in unit.trained if flat.moves.each_backward] for unit in units]
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
    sums = sums_of(units, in_flight=len(units))
    inside = {m for layer in staged.stages.layers.real for m in layer.modules()}
    by_stage = StagedUnits(stages, last, inside, sums)
    return Data(model, Units(units), pace, sums, agreed(model, how, units), by_stage)
