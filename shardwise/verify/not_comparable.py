"""Modules that a plan does not compute as one process does: batch norm and dropout.

A proof of a model with batch norm fails under a plan that divides the batch, and the report says
why. A proof sets dropout to 0 on both sides of the comparison, and the report says so.
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from shardwise.core.plan.plan import Plan
from shardwise.models.trainable import Trainable

NAMED = 3  # modules of each kind that are named


def batch_norm_note(model: nn.Module, plan: Plan) -> str:
    """Why a plan that divides the batch cannot match one process, and what to prove then; or ""."""
    norms = [name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if not norms or plan.shares * plan.microbatches == 1:
        return ""
    rows = "each rank's own rows" if plan.pipeline is None else "each microbatch's rows"
    return (
        f"This model cannot match one process under a plan that divides the batch: it has batch "
        f"norm ({_listed(norms)}), whose statistics in training are of {rows}, not of the whole "
        "batch. To prove the rest, build it with GroupNorm or LayerNorm in place of batch norm; or "
        "prove a plan without data ranks and microbatches, such as tp2."
    )


def dropout_note(model: nn.Module) -> str:
    """The note on changes of the model by a proof; "" if none."""
    drops = [name for name, m in model.named_modules() if m.training and any(_rates(m))]
    if not drops:
        return ""
    return (
        f"Dropout ({_listed(drops)}) was set to 0 on both sides of the comparison: its masks "
        "depend on the plan."
    )


def without_dropout(trainable: Trainable) -> Trainable:
    """The same model with every rate of dropout set to 0."""

    def make() -> nn.Module:
        model = trainable.make()
        for module in model.modules():
            for name in _rates(module):
                setattr(module, name, 0.0)
        return model

    return replace(trainable, make=make)


def _rates(module: nn.Module) -> Iterator[str]:
    for name, value in vars(module).items():
        is_rate = "drop" in name or (name == "p" and isinstance(module, _DropoutNd))
        if is_rate and isinstance(value, float) and value > 0:
            yield name


def _listed(names: list[str]) -> str:
    named = ", ".join(name or "the model itself" for name in names[:NAMED])
    return f"{named} and {len(names) - NAMED} more" if len(names) > NAMED else named
