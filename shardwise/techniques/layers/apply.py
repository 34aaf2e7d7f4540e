"""Layers with a plan of their own in an engine: their meshes, their units, and their rows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.comm.move import broadcast
from shardwise.comm.unchanged import generators_of
from shardwise.comm.world import Axis, World
from shardwise.core.applied import Applied
from shardwise.core.layouts.param_layout import Groups
from shardwise.core.mesh import TENSOR
from shardwise.core.plan.plan import Plan
from shardwise.engine import batch
from shardwise.kernels.logits import LogitRows, Logits
from shardwise.techniques.layers.exchange import Redistributed, RowExchange, between
from shardwise.techniques.layers.layer_hooks import LayerHooks, Random, hook_own_rows
from shardwise.techniques.layers.plans import Layers
from shardwise.techniques.pipeline.trace.placeholders import StandIn
from shardwise.techniques.tensor import apply as tensor_parallel
from shardwise.techniques.tensor.sharded_logits import Tensors

if TYPE_CHECKING:
    from shardwise.engine.options import Build


@dataclass
class Region:
    """The layers of one plan, the axes of their mesh, and their tensor axis."""

    layers: Layers
    world: World
    tensors: Tensors

    @property
    def degree(self) -> int:
        return self.layers.plan.mesh.size_of(TENSOR)


def applied(model: nn.Module, build: "Build") -> "Regions":
    """Shard the layers of each mesh on its tensor axis, in place; called by all ranks."""
    world, regions = build.world, list[Region]()
    for each in build.layers.meshes:
        own = world.beside(each.plan.mesh, f".{each.number}")
        tensors = tensor_parallel.lay_out(model, own, False, each.table, layers=each.modules)
        regions.append(Region(each, own, tensors))
    return Regions(regions, exchange_of(world, build.plan, build.rows), build.recompute.kinds)


@dataclass
class Regions(Applied):
    """The layers of a model with a mesh of their own; `recomputed` names the recomputed modules."""

    regions: list[Region]
    exchange: RowExchange
    recomputed: Iterable[str] = ()

    @property
    def mixes(self) -> bool:
        return bool(self.exchange.axes)

    def axes(self) -> Iterable[Axis]:
        return [axis for region in self.regions for axis in region.world.axes]

    def sums(self) -> Mapping[tuple[str, Groups], Axis]:
        found = [region.tensors.sums() for region in self.regions]
        return {key: axis for each in found for key, axis in each.items()}

    def begin(self, batch: Any, parts: Sequence[Any], *, trains: bool) -> Sequence[Any]:
        for region in self.regions:
            parts = region.tensors.begin(batch, parts, trains=trains)
        return self.exchange.begin(parts)

    def enter(self, part: Any, model: nn.Module, own: Any) -> Any:
        self.exchange.enter(part)
        return part

    @contextmanager
    def during(self, device: torch.device) -> Iterator[None]:
        with ExitStack() as entered:
            for region in self.regions:
                entered.enter_context(region.tensors.during(device))
            yield

    def end(self, *, trains: bool) -> None:
        for region in self.regions:
            region.tensors.end(trains=trains)
        self.exchange.forget()

    def install(self, model: nn.Module) -> None:
        """Hook the layers of other meshes. Recomputed modules get this rank's own rows, so that a
        recomputation moves none. Stand-ins for a pipeline's other ranks' layers get no hooks.
        """
        every = dict(model.named_modules(remove_duplicate=False))
        here = {name: m for name, m in every.items() if not isinstance(m, StandIn)}
        for name in here.keys() & set(self.recomputed) if self.regions else ():
            if not any(region.layers.holds(name) for region in self.regions):
                hook_own_rows(here[name])
        for region in self.regions:
            hooks = LayerHooks(self.exchange, region.degree, with_rows, self._random(region))
            for name in here.keys() & set(region.layers.modules):
                hooks.install(name, here[name])
            model.register_forward_pre_hook(partial(_begin, hooks))
            model.register_forward_hook(partial(_end, hooks), always_call=True)

    def _random(self, region: Region) -> Random:
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


def with_rows(x: Tensor, exchange: RowExchange, degree: int) -> Tensor | None:
    """Sharded logits with the rows at `degree`; None for other tensors."""
    if not isinstance(x, Logits) or isinstance(x, Redistributed):
        return None
    base = exchange.base
    rows = LogitRows(
        exchange.held(degree),
        exchange.held(base),
        lambda x, factor: exchange.move(x, base, degree, factor),
        lambda x, factor: exchange.move(x, degree, base, factor),
    )
    if x.local.shape[0] % max(1, rows.all):
        return None
    return Logits.of(x.local, x.columns, rows)


def exchange_of(world: World, plan: Plan, count: batch.Count | None = None) -> RowExchange:
    """The axes between a plan's tensor degrees; all ranks call it. `count`: rows of a batch."""
    base, stages = plan.mesh.size_of(TENSOR), plan.mesh.size_of("pp")
    ranks = plan.size // stages
    axes = {
        (few, many): world.across(f"rows{few}-{many}", between(few, many, ranks, stages))
        for few, many in combinations(plan.tensor_degrees, 2)
    }
    return RowExchange(
        axes, base, world.rank % ranks, ranks, world, partial(batch.rows, count=count)
    )
