"""Layers with a mesh of their own in a pass that records a model for predictions.

The plain model runs with the rows that each layer has on a rank of its mesh: the hooks are an
engine's, on axes that send nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.comm.world import Axis, traced
from shardwise.core.layouts.uneven import Counts
from shardwise.core.mesh import TENSOR
from shardwise.core.model_spec import RowGather
from shardwise.core.plan.plan import Plan
from shardwise.engine.batch import Count, rows
from shardwise.observe.meta_pass import Around
from shardwise.techniques.layers.apply import exchange_of, with_rows
from shardwise.techniques.layers.layer_hooks import LayerHooks, hook_own_rows
from shardwise.techniques.layers.plans import LayerPlans
from shardwise.techniques.tensor import apply as tensor_parallel


@dataclass(frozen=True)
class LayerPasses:
    """The layers of a plan with a mesh of their own, seen from `rank`. The modules `own` take the
    rank's own rows: recomputed ones, and the first of later stages.
    """

    plans: LayerPlans
    plan: Plan
    rank: int
    own: Sequence[str] = ()

    def counts(self, parts: Sequence[Any], count: Count | None) -> list[Counts]:
        """Each base data rank's rows by microbatch, all equal; `count`: of a batch."""
        ranks = self.plan.size // self.plan.mesh.size_of("pp") // self.plan.mesh.size_of("tp")
        if not self.plans.meshes:
            return [()] * len(parts)
        return [(rows(part, count),) * ranks for part in parts]

    def around(self, counts: Counts) -> Around | None:
        """The hooks of a pass on a microbatch with these rows; None without such layers."""
        if not self.plans.meshes:
            return None

        @contextmanager
        def hooked(model: nn.Module, record: Callable[[RowGather], None]) -> Iterator[None]:
            """Hook the layers of `model`, and the first layers of stages."""
            world = traced(self.rank, self.plan.size).on(self.plan.mesh)
            exchange = exchange_of(world, self.plan)
            exchange.counts, exchange.gathers = counts, record
            handles: list[Any] = []
            for each in self.plans.meshes:
                degree = each.plan.mesh.size_of(TENSOR)
                for name in each.modules:
                    hooks = LayerHooks(exchange, degree, with_rows)
                    handles += hooks.install(name, model.get_submodule(name))
            for name in self.own:
                handles.append(hook_own_rows(model.get_submodule(name)))
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

        return hooked

    def lay_out(self, model: nn.Module) -> nn.Module:
        """Shard the layers on their tensor axes, in place; nothing is sent."""
        world = traced(self.rank, self.plan.size).on(self.plan.mesh)
        for each in self.plans.meshes:
            own = world.beside(each.plan.mesh, f".{each.number}")
            tensor_parallel.lay_out(model, own, False, each.table, layers=each.modules)
        return model

    def axis(self, number: int) -> Axis:
        own = self.plans.layers[number - 1].plan
        world = traced(self.rank, self.plan.size).beside(own.mesh, f".{number}")
        return world.axis(TENSOR)
