"""Recomputation in an engine: which modules of a model it is for, and what they draw from."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardwise.core.errors import bad
from shardwise.core.plan import Plan
from shardwise.engine.rng import STATES, generators_of
from shardwise.parallel.data.wrap_policy import Rule, blocks
from shardwise.parallel.recompute.checkpointed import recompute
from shardwise.parallel.recompute.choice import chosen
from shardwise.parallel.recompute.generators import Generators


def fitting(
    model: nn.Module, plan: Plan, units: Rule = "auto", starts: Sequence[str] = ()
) -> dict[str, str]:
    """The modules that the plan recomputes, by name; `starts` begin the stages of a pipeline.

    Raises InputError where the plan names none, or one that lies in several stages.
    """
    kinds = chosen(model, plan.recompute, blocks(model, units) if plan.recompute else {})
    for name in kinds:
        inside = next((start for start in starts if start.startswith(f"{name}.")), None)
        if inside is not None:
            raise bad(
                f"recompute:{plan.recompute}, which recomputes {name}, with a stage that begins "
                f"inside of it at {inside}",
                "modules that lie in one stage",
                f"a stage that begins at {name}, or recompute:{inside}",
            )
    return kinds


def apply(model: nn.Module, kinds: Mapping[str, str], device: torch.device) -> None:
    """Recompute the activations of these modules, in place."""
    recompute(model, kinds, Generators(generators_of(device), STATES))
