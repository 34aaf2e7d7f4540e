"""The recomputation of an engine; predictions choose for a budget, and size arenas.

A prediction needs the unsharded model: the engine keeps a copy on the meta device, with the model's
own buffers.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from shardwise.core.buffer_sizes import Slots
from shardwise.core.model_spec import ModelSpec
from shardwise.core.plan.plan import Plan
from shardwise.engine.options import EngineOptions, Loss
from shardwise.engine.spec_of_model import model_spec
from shardwise.observe import meta_pass
from shardwise.techniques.recompute.apply import Recomputation, on_host, recomputed_modules
from shardwise.techniques.recompute.price_step import kept_slots
from shardwise.techniques.recompute.word import recompute_budget


def recomputation(
    model: nn.Module,
    plan: Plan,
    rank: int,
    objective: Loss,
    options: EngineOptions,
    starts: Sequence[str] = (),
) -> Recomputation:
    """The recomputation of a model that is not sharded yet."""
    kinds = recomputed_modules(model, plan, options.units, starts)
    budget = recompute_budget(plan.recompute)
    if not budget and not (plan.arenas and kinds):
        hosted = on_host(model, plan, options.units, kinds, starts)
        return Recomputation(kinds, hosted=hosted, everything=plan.activations is not None)
    plain = meta_pass.template(model)

    def spec(batch: Any) -> ModelSpec:
        return model_spec(plain, plan, rank, batch, objective, options)

    def sizes(batch: Any) -> Slots:
        return kept_slots(spec(batch), plan, rank)

    if not budget:
        return Recomputation(kinds, sizes=sizes)
    return Recomputation(kinds, lambda batch: spec(batch).recomputed)
