"""Modules that a plan does not compute as one process does: batch norm and dropout.

    batch norm   in training, its statistics are of the rows that a rank has, not of the whole batch
    dropout      is drawn for the rows that a rank has at once: several data ranks, or several
                 microbatches, draw in another order than one process does for the whole batch;
                 and under a pipeline for each stage by itself

A proof of such a model fails because of the model, and the report says so.  On the tensor axis
alone dropout draws what one process draws (parallel/tensor/dropout.py).
"""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from shardwise.core.plan import Plan

NAMED = 3  # modules of each kind that are named


def unlike_one_process(model: nn.Module, plan: Plan) -> str:
    """Why the model under `plan` cannot match one process, and what to prove instead; "" if it can.

    Plans that cut the rows of the batch are meant, and of dropout pipelines; of a batch that stays
    together on one stage nothing is said.
    """
    cuts, staged = plan.data_size * plan.microbatches > 1, plan.pipeline is not None
    norms = [name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    drops = [name for name, m in model.named_modules() if m.training and _draws(m)]
    reasons = []
    if norms and cuts:
        rows = "each microbatch's rows" if staged else "each rank's own rows"
        whose = f"whose statistics in training are of {rows}, not of the whole batch"
        reasons.append(f"batch norm ({_listed(norms)}), {whose}")
    if drops and staged:
        reasons.append(f"dropout ({_listed(drops)}), drawn for each stage and microbatch by itself")
    elif drops and cuts:
        reasons.append(f"dropout ({_listed(drops)}), which each rank draws for its own rows")
    if not reasons:
        return ""
    has, cut = "; and ".join(reasons), "cuts the batch" if cuts else "has a pipeline"
    pipeline = ", pipeline" * staged
    return (
        f"This model cannot match one process under a plan that {cut}: it has {has}. To "
        "prove the rest, build it with dropout of 0, and with GroupNorm or LayerNorm in place of "
        f"batch norm; or prove a plan without data ranks{pipeline} and accumulation, such as tp2."
    )


def _draws(module: nn.Module) -> bool:
    """Whether it drops something at random: a layer for it, or a rate that it applies itself."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return any(rate > 0 for rate in _rates(module))


def _rates(module: nn.Module) -> Iterator[float]:
    """Rates of dropout among its attributes: attention and recurrent layers keep theirs so."""
    for name, value in vars(module).items():
        if "drop" in name and isinstance(value, float):
            yield value


def _listed(names: list[str]) -> str:
    named = ", ".join(name or "the model itself" for name in names[:NAMED])
    return f"{named} and {len(names) - NAMED} more" if len(names) > NAMED else named
