"""Sabotages that only facts of the engine show (facts.py): each once passed a proof."""

from dataclasses import replace
from typing import Any

from shardwise.checkpoint import pending
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer.optimizer import ShardedOptimizer
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.data.rerun import Rerun
from shardwise.techniques.pipeline import stage_module
from tests.verify.mutations.mutation import Mutation, Patch, around, nothing


def evaluated_before_the_update(patch: Patch) -> None:
    def made(real: Any, engine: Engine, call: Any) -> Any:
        engine.__dict__["flush"] = nothing
        try:
            return real(engine, call)
        finally:
            del engine.__dict__["flush"]

    around(patch, Engine, "_made", made)


def gradients_of_a_rerun_kept(patch: Patch) -> None:
    def collected(real: Any, rerun: Rerun, flat: Flat, index: int) -> None:
        counts, rerun.counts = rerun.counts, True
        real(rerun, flat, index)
        rerun.counts = counts

    around(patch, Rerun, "_collected", collected)


def a_snapshot_of_views(patch: Patch) -> None:
    patch.setattr(pending, "snapshot", lambda *_: [])


def masters_not_assigned(patch: Patch) -> None:
    def follow(optimizer: ShardedOptimizer) -> None:
        for flat in optimizer.flats:
            flat.take_assigned()
            flat.assigned.clear()

    patch.setattr(ShardedOptimizer, "follow", follow)


def stages_in_reverse(patch: Patch) -> None:
    def starts(real: Any, model: Any, plan: Any, *given: Any) -> Any:
        return real(model, replace(plan, stages=plan.stages[::-1]), *given)

    around(patch, stage_module, "stage_starts", starts)


MUTATIONS = (
    Mutation(
        "evaluated before the update",
        *("dp2 offload:optim-delayed=0", "late evaluation", evaluated_before_the_update),
    ),
    Mutation("gradients of a rerun kept", "dp2 zero2", "rerun", gradients_of_a_rerun_kept),
    Mutation("a snapshot of views", "dp1", "late writer", a_snapshot_of_views),
    Mutation("masters not assigned", "dp2 zero1 bf16", "assigned weights", masters_not_assigned),
    Mutation(
        "stages in reverse", "pp2 gpipe:2 stages:3,1", "blocks of stages", stages_in_reverse, "deep"
    ),
)
