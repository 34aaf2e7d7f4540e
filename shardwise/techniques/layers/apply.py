"""Layers with a plan of their own in an engine: their meshes, their units, and their rows.

Regions.open     opens the axes of each mesh over the same ranks
.lay_out         shards the layers on their tensor axes
.install         hooks the layers of other meshes, so that activations are redistributed
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from torch import Tensor, nn

from shardwise.comm.move import broadcast
from shardwise.comm.world import World
from shardwise.core.mesh import TENSOR
from shardwise.core.plan import Plan
from shardwise.engine import batch
from shardwise.engine.training import Build
from shardwise.kernels.logits import LogitRows, Logits
from shardwise.techniques.layers.exchange import RowExchange, between
from shardwise.techniques.layers.hooks import LayerHooks, Random, hook_own_rows
from shardwise.techniques.layers.plans import Layers
from shardwise.techniques.layers.redistributed import Redistributed
from shardwise.techniques.pipeline.placeholders import StandIn
from shardwise.techniques.tensor import apply as tensor_parallel
from shardwise.techniques.tensor.layout import Tensors, nowhere
from shardwise.techniques.tensor.rng import generators_of


@dataclass
class Region:
    """The layers of one plan, the axes of their mesh, and their tensor axis."""

    layers: Layers
    world: World
    tensors: Tensors

    @property
    def degree(self) -> int:
        """The number of ranks of the tensor axis."""
        return self.layers.plan.mesh.size_of(TENSOR)


@dataclass
class Regions:
    """The layers of a model with plans of their own."""

    plan: Plan
    regions: list[Region]
    exchange: RowExchange

    @classmethod
    def open(cls, build: Build) -> "Regions":
        """Open the axes of all meshes; called by all ranks of the world."""
        world, plans = build.world, build.layers
        found: list[Region] = []
        for each in plans.layers:
            own = world.beside(each.plan.mesh, f".{each.number}") if each.mesh else world
            found.append(Region(each, own, nowhere()))
        return cls(build.plan, found, exchange_of(world, build.plan, build.rows))

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
        tensor = world.axis(TENSOR)
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
    rows = LogitRows(
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
    base, stages = plan.mesh.size_of(TENSOR), plan.mesh.size_of("pp")
    ranks = plan.size // stages
    axes = {
        (few, many): world.across(f"rows{few}-{many}", between(few, many, ranks, stages))
        for few, many in combinations(plan.tensor_degrees, 2)
    }
    return RowExchange(axes, base, world.rank % ranks, ranks, world, batch.RowCounter(count).of)
