"""Layers with a mesh of their own in a pass that records a model for predictions.

The pass is that of the plain model, with the rows that each layer has on a rank of its mesh: the
hooks are those of an engine, on axes that send nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.comm.world import Axis, traced
from shardwise.core.model_spec import RowGather
from shardwise.core.plan import Plan
from shardwise.engine import tensor_parallel
from shardwise.engine.batch import rows
from shardwise.engine.layer_plans import LayerPlans
from shardwise.engine.meta_pass import Around
from shardwise.engine.regions import exchange_of, with_rows
from shardwise.parallel.redistribute.exchange import Counts
from shardwise.parallel.redistribute.hooks import LayerHooks
from shardwise.parallel.redistribute.redistributed import plain


@dataclass(frozen=True)
class LayerPasses:
    """The layers of a plan with a mesh of their own, seen from `rank`.

    `begins` are the modules that begin the stages of a pipeline after the first.
    """

    plans: LayerPlans
    plan: Plan
    rank: int
    begins: Sequence[str] = ()

    def counts(self, parts: Sequence[Any], given: Sequence[Counts] | None) -> list[Counts]:
        """The rows of each base data rank, by microbatch; equal ones if they are not given."""
        ranks = self.plan.size // self.plan.mesh.size_of("pp") // self.plan.mesh.size_of("tp")
        if not self.plans.meshes:
            return [()] * len(parts)
        return [(rows(part),) * ranks for part in parts] if given is None else list(given)

    def around(self, counts: Counts) -> Around | None:
        """The hooks of a pass on a microbatch with these rows; None without such layers."""
        if not self.plans.meshes:
            return None

        @contextmanager
        def hooked(model: nn.Module, record: Callable[[RowGather], None]) -> Iterator[None]:
            """Hook the layers of `model`, and the first layers of stages."""
            world = traced(self.rank, self.plan.size).on(self.plan.mesh)
            exchange = exchange_of(world, self.plan, self.plans)
            exchange.counts, exchange.gathers = counts, record
            handles: list[Any] = []
            for each in self.plans.meshes:
                degree = each.plan.mesh.size_of(tensor_parallel.AXIS)
                for name in each.modules:
                    hooks = LayerHooks(exchange, degree, with_rows)
                    handles += hooks.install(name, model.get_submodule(name))
            for name in self.begins:  # what crosses to another stage has the rank's own rows
                module = model.get_submodule(name)
                handles.append(
                    module.register_forward_pre_hook(_own_rows, with_kwargs=True, prepend=True)
                )
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
        """The tensor axis of the layers of a plan, which sends nothing."""
        own = self.plans.layers[number - 1].plan
        world = traced(self.rank, self.plan.size).beside(own.mesh, f".{number}")
        return world.axis(tensor_parallel.AXIS)


def _own_rows(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return plain((args, kwargs))
