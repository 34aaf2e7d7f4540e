"""Layers with a plan of their own in an engine: their meshes, their units, and their rows.

Hooks move the rows of a layer's inputs before the layer, and those of its outputs when needed. A
tensor with this rank's number of rows in dim 0 is an activation of the batch. Others (masks, tables
of positions) are the same on all ranks, so they need no gradient.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.comm.move import broadcast
from shardwise.comm.unchanged import generators_of
from shardwise.comm.world import Axis, World
from shardwise.core.applied import Applied
from shardwise.core.errors import bad
from shardwise.core.layouts.param_layout import Groups
from shardwise.core.mesh import TENSOR
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.tree import leaves, mapped
from shardwise.engine import batch
from shardwise.kernels.logits import LogitRows, Logits
from shardwise.techniques.layers.exchange import Redistributed, RowExchange, between, plain
from shardwise.techniques.layers.plans import Layers
from shardwise.techniques.pipeline.trace.interceptor import StandIn
from shardwise.techniques.tensor import apply as tensor_parallel
from shardwise.techniques.tensor.sharded_logits import Tensors

if TYPE_CHECKING:
    from shardwise.engine.options import Build


class Random:
    """Random numbers of a layer: equal on the ranks that compute the same rows."""

    def __init__(self, generators: list[torch.Generator], seed: int) -> None:
        self.generators = generators
        self.states = [torch.Generator(g.device).manual_seed(seed).get_state() for g in generators]

    def swap(self) -> None:
        now = [generator.get_state() for generator in self.generators]
        for generator, state in zip(self.generators, self.states, strict=True):
            generator.set_state(state)
        self.states = now


class LayerHooks:
    """The hooks of the layers of one mesh."""

    def __init__(self, exchange: RowExchange, degree: int, random: Random) -> None:
        self.exchange, self.degree, self.random = exchange, degree, random
        #: in this forward, what was moved from tensors without a gradient, such as masks
        self.moved, self.passes = WeakIdKeyDictionary(), 0
        self.inside = 0  # forwards of these layers that are running

    def install(self, name: str, module: nn.Module) -> None:
        """Hook one layer, after all other hooks of this package."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            """Move the rows of the inputs."""
            if not self.exchange.counts:
                self.exchange.equal((args, kwargs))
            rows = self._have_rows(name, (args, kwargs))
            found = mapped(lambda x: self._enter(name, x, rows), (args, kwargs), Tensor)
            self.inside += 1
            self.random.swap()
            return found

        def after(_: nn.Module, __: Any, out: Any) -> Any:
            self.inside -= 1
            self.random.swap()
            return mapped(partial(self._leave, name), out, Tensor)

        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        module.register_forward_hook(after)
        for part in [part for part in module.modules() if part is not module]:
            part.register_forward_pre_hook(partial(self._require_inside, name))

    def begin(self, *_: object) -> None:
        self.inside = 0
        self.exchange.drop_assumed()

    def end(self, *_: object) -> None:
        self.moved.clear()

    def _require_inside(self, name: str, part: nn.Module, _: Any) -> None:
        if not self.inside and torch._C._current_graph_task_id() == -1:
            raise bad(
                f"a call inside of {name}, which has a mesh of its own, without a call of {name}",
                "layers whose own forward calls what is inside of them",
                "the layer under the model's axes, or patterns of the modules that are called",
            )

    def _have_rows(self, name: str, inputs: Any) -> set[int]:
        """The ids of the tensors whose dim 0 counts the rows of the batch, on all ranks. Raises
        InputError if no input does: each rank would compute its own rows' part alone.
        """
        exchange = self.exchange
        own = exchange.held(exchange.base)
        every = [x for x in leaves(inputs, Tensor, objects=True) if x.dim() > 0]
        plain = [x for x in every if not isinstance(x, Redistributed)]
        flags = [x.shape[0] == own for x in plain]
        if plain and exchange.uneven and exchange.base != self.degree:
            flags = exchange.everywhere(flags, self.degree)
        if len(plain) == len(every) and not any(flags) and exchange.base != self.degree:
            shapes = ", ".join(str(list(x.shape)) for x in every) or "none"
            raise bad(
                f"inputs of shape {shapes} of the layer {name}, which has a mesh of its own, for a "
                f"batch of {own} rows: no dim 0 counts the rows",
                "layers that take activations [rows, ...] of the batch, or rows of it",
                "the layer under the model's axes, or its inputs before rows are flattened",
            )
        return {id(x) for x, flag in zip(plain, flags, strict=True) if flag}

    def _enter(self, name: str, x: Any, rows: Collection[int]) -> Any:
        if isinstance(x, Redistributed):
            return x.at(self.degree)
        if not isinstance(x, Tensor):
            return x
        exchange = self.exchange
        if id(x) not in rows:
            if x.requires_grad and torch.is_grad_enabled():
                raise _without_rows(name, x)
            return x
        if x.requires_grad:
            return exchange.move(x, exchange.base, self.degree)
        if self.passes != exchange.passes:
            self.moved, self.passes = WeakIdKeyDictionary(), exchange.passes
        if x not in self.moved:
            self.moved[x] = exchange.move(x, exchange.base, self.degree)
        return self.moved[x]

    def _leave(self, name: str, x: Any) -> Any:
        """An output of the layer; the model around it sees this rank's own rows."""
        if not isinstance(x, Tensor):
            return x
        found = with_rows(x, self.exchange, self.degree)
        if found is not None:
            return found
        if x.dim() == 0 or x.shape[0] != self.exchange.held(self.degree):
            if x.requires_grad and self.degree != self.exchange.base:
                raise _without_rows(name, x, "output")
            return x
        return Redistributed.of(x, self.exchange, self.degree)


def _without_rows(name: str, x: Tensor, what: str = "input") -> Exception:
    return bad(
        f"an {what} of shape {list(x.shape)} of the layer {name}, which has a mesh, with a "
        "gradient and a dim 0 that does not count the rows of the batch",
        "layers whose inputs and outputs with a gradient are activations [rows, ...]",
        "the layers that make this tensor and those that take it under one plan",
    )


@dataclass
class Region:
    """The layers of one plan, the axes of their mesh, and their tensor axis."""

    layers: Layers
    world: World
    tensors: Tensors

    @property
    def degree(self) -> int:
        return self.layers.plan.mesh.size_of(TENSOR)


def applied(model: nn.Module, build: "Build") -> "Regions | None":
    """Shard the layers of each mesh on its tensor axis, in place; called by all ranks."""
    world, regions = build.world, list[Region]()
    if not build.layers.meshes:
        return None
    for each in build.layers.meshes:
        own = world.beside(each.plan.mesh, f".{each.number}")
        tensors = tensor_parallel.lay_out(model, own, False, each.table, layers=each.modules)
        regions.append(Region(each, own, tensors))
    exchange = exchange_of(world, build.plan, build.options.rows)
    return Regions(regions, exchange, build.recompute.kinds)


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
        for name in here.keys() & set(self.recomputed):
            if not any(region.layers.holds(name) for region in self.regions):
                own: Any = lambda _, args, kwargs: plain((args, kwargs))  # noqa: E731
                here[name].register_forward_pre_hook(own, with_kwargs=True, prepend=True)
        for region in self.regions:
            hooks = LayerHooks(self.exchange, region.degree, self._random(region))
            for name in here.keys() & set(region.layers.modules):
                hooks.install(name, here[name])
            model.register_forward_pre_hook(hooks.begin)
            model.register_forward_hook(hooks.end, always_call=True)

    def _random(self, region: Region) -> Random:
        world = region.world
        own = [torch.initial_seed() % 2**40]
        seed = torch.tensor(own, dtype=torch.int64, device=world.device)
        tensor = world.axis(TENSOR)
        first = int(broadcast(seed, tensor).item())
        place = self.exchange.place // region.degree
        generators = generators_of(world.device)
        return Random(generators, first + 1_000_003 * place + region.layers.number)


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
