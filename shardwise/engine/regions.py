"""Layers with a plan of their own in an engine: their meshes, their units, and their rows.

Regions.open     opens the axes of each mesh over the same ranks
.lay_out         shards the layers on their tensor axes
.shard           lays out each unit under the plan of its layers
.install         hooks the layers of other meshes, so that activations are redistributed
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor, nn

from shardwise.comm.move import broadcast
from shardwise.comm.world import Axis, World
from shardwise.core.plan import Plan
from shardwise.engine import batch, tensor_parallel
from shardwise.engine.expert_parallel import REST, ExpertLayout
from shardwise.engine.layer_plans import Layers
from shardwise.engine.rng import generators_of
from shardwise.engine.shard import Sharding, flats_of, shard
from shardwise.engine.stage_module import Staging
from shardwise.engine.tensor_layout import Tensors, nowhere
from shardwise.engine.training import Build
from shardwise.kernels.logits import Logits, Rows
from shardwise.parallel.data.flat_parameter import Flat
from shardwise.parallel.data.units import Unit
from shardwise.parallel.data.wrap_policy import UnitSpec
from shardwise.parallel.pipeline.placeholders import StandIn
from shardwise.parallel.redistribute.exchange import RowExchange, between
from shardwise.parallel.redistribute.hooks import LayerHooks, Random, hook_own_rows
from shardwise.parallel.redistribute.redistributed import Redistributed


@dataclass
class Region:
    """The layers of one plan: how their units are stored, and their tensor axis."""

    layers: Layers
    world: World
    how: Sharding
    tensors: Tensors

    @property
    def degree(self) -> int:
        """The number of ranks of the tensor axis."""
        return self.layers.plan.mesh.size_of(tensor_parallel.AXIS)


@dataclass
class Regions:
    """The layers of a model with plans of their own."""

    plan: Plan
    regions: list[Region]
    exchange: RowExchange

    @classmethod
    def open(cls, build: Build, how: Sharding) -> "Regions":
        """Open the axes of all meshes; called by all ranks of the world."""
        world, plans = build.world, build.layers
        found: list[Region] = []
        for each in plans.layers:
            own = world.beside(each.plan.mesh, f".{each.number}") if each.mesh else world
            row = each.plan.offloaded_states
            axes = (
                own.axis(name or "none")
                for name in (each.plan.shard_axis, each.plan.replicate_axis)
            )
            shard, replicate = axes
            stored = replace(how, row=row, shard=shard, replicate=replicate)
            found.append(Region(each, own, stored, nowhere()))
        return cls(build.plan, found, exchange_of(world, build.plan, build.rows))

    def unit_key(self, spec: UnitSpec) -> object:
        """The plan of a unit; units of different ones are not merged."""
        return {self.plan.layer_of(name) for name, _ in spec.params}

    def lay_out(self, model: nn.Module) -> tuple[Tensors, ...]:
        """Shard the layers of each mesh on its tensor axis, in place."""
        for region in self.regions:
            if region.layers.mesh:
                region.tensors = tensor_parallel.lay_out(
                    model,
                    region.world,
                    False,
                    region.layers.table,
                    layers=region.layers.modules,
                )
        return tuple(region.tensors for region in self.regions if region.layers.mesh)

    def shard(
        self,
        how: Sharding,
        specs: Sequence[UnitSpec],
        tensors: Tensors,
        staged: Staging | None = None,
        experts: ExpertLayout | None = None,
    ) -> list[Unit]:
        """Lay parameters flat, each unit as the plan of its layers says."""
        if not self.regions:
            return shard(how, specs, tensors, staged, experts)
        units: list[Unit] = []
        for spec in specs:
            number = self.plan.layer_of(spec.params[0][0])
            region = self.regions[number - 1] if number else None
            if region is None:
                units += shard(how, [spec], tensors, staged, experts)
            elif region.layers.mesh:
                units += shard(region.how, [spec], region.tensors, staged)
            else:
                own = experts and self._experts(experts, region.how)
                units += shard(region.how, [spec], tensors, staged, own)
        return units

    def _experts(self, experts: ExpertLayout, how: Sharding) -> ExpertLayout:
        """The experts of layers with a row of their own: `edp` takes the place of the data axis."""
        inner, known = self.plan.inner_data_axis, (experts.shard, experts.replicate)
        rest = next((axis for axis in known if axis.name == REST), None)
        shard, replicate = (rest if rest and axis.name == inner else axis for axis in how.axes)
        return replace(experts, shard=shard, replicate=replicate)

    def norms(
        self, units: Sequence[Unit], experts: ExpertLayout
    ) -> list[tuple[list[Flat], tuple[Axis, ...]]]:
        """The flat groups of each region, and the axes over which their squares are summed."""
        found: list[tuple[list[Flat], tuple[Axis, ...]]] = []
        for region in self.regions:
            own = [
                u for u in units if self.plan.layer_of(u.groups[0].names[0]) == region.layers.number
            ]
            tensor, shard = region.world.axis(tensor_parallel.AXIS), region.how.shard
            more = (experts.axis,) if shard.size == 1 and not region.layers.mesh else ()
            found.append((flats_of(own), (shard, *more, tensor)))
        return found

    def install(self, model: nn.Module, recomputed: Iterable[str]) -> None:
        """Hook the layers of other meshes; called after all other hooks are set.

        Recomputed modules get this rank's own rows, so that a recomputation does not move them.
        Layers of a pipeline's other ranks have stand-ins here, which get no hooks.
        """
        every = dict(model.named_modules(remove_duplicate=False))
        here = {name: m for name, m in every.items() if not isinstance(m, StandIn)}
        meshes = [region for region in self.regions if region.layers.mesh]
        for name in here.keys() & set(recomputed) if meshes else ():
            if not any(region.layers.holds(name) for region in meshes):
                hook_own_rows(here[name])
        for region in meshes:
            hooks = LayerHooks(self.exchange, region.degree, with_rows, self._random(region))
            for name in here.keys() & set(region.layers.modules):
                hooks.install(name, here[name])
            model.register_forward_pre_hook(partial(_begin, hooks))
            model.register_forward_hook(partial(_end, hooks), always_call=True)

    def _random(self, region: Region) -> Random:
        """Random numbers that are equal on the ranks of the region's tensor axis."""
        world = region.world
        own = [torch.initial_seed() % 2**40]
        seed = torch.tensor(own, dtype=torch.int64, device=world.device)
        tensor = world.axis(tensor_parallel.AXIS)
        first = int(broadcast(seed, tensor).item())
        place = self.exchange.place // region.degree
        generators = generators_of(world.device)
        return Random(generators, first + 1_000_003 * place + region.layers.number)


def _begin(hooks: LayerHooks, *_: object) -> None:
    hooks.begin()


def _end(hooks: LayerHooks, *_: object) -> None:
    hooks.moved.clear()


def with_rows(x: Tensor, exchange: RowExchange, degree: int, layer: str) -> Tensor | None:
    """Sharded logits whose rows are those at `degree`; None for other tensors."""
    if not isinstance(x, Logits) or isinstance(x, Redistributed):
        return None
    base = exchange.base
    rows = Rows(
        exchange.held(degree),
        exchange.held(base),
        lambda x, factor: exchange.move(x, base, degree, layer, factor),
        lambda x, factor: exchange.move(x, degree, base, layer, factor),
    )
    if x.local.shape[0] % max(1, rows.all):
        return None
    return Logits.of(x.local, x.columns, rows)


def exchange_of(world: World, plan: Plan, count: batch.Count | None = None) -> RowExchange:
    """The axes between all tensor degrees of a plan; called by all ranks.

    `count` counts the rows of a batch (batch.py).
    """
    base, stages = plan.mesh.size_of(tensor_parallel.AXIS), plan.mesh.size_of("pp")
    ranks = plan.size // stages
    axes = {
        (few, many): world.across(f"rows{few}-{many}", between(few, many, ranks, stages))
        for few, many in combinations(plan.tensor_degrees, 2)
    }
    return RowExchange(axes, base, world.rank % ranks, ranks, world, batch.Rows(count).of)
