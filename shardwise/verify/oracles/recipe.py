"""The optimizer of a proof: AdamW with two groups and no option at its default.

A forgotten option would show. The second group has its own rate, weight decay and betas, and the
rate changes in every step. An update multiplies the rounding of a gradient that is zero by rate /
epsilon; with the usual 1e-8 a bias that began at 0 would be all error. In fp64 there is room for a
factor of 1e4; elsewhere epsilon is larger.
"""

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Final

from torch import nn

from shardwise.core.plan.plan import Plan
from shardwise.engine.optimizer.optimizer_spec import AdamW, OptimizerSpec

#: The rate and epsilon by precision, and for 16 bits.
RATES, RATES_16 = {"fp64": (1e-3, 1e-4), "fp32": (1e-2, 1e-1)}, (1e-2, 1e-2)
#: The factors of all rates in the steps of a proof, over and over.
FACTORS: Final = (1.0, 0.5, 1.5)


def spec_of(plan: Plan, model: nn.Module) -> OptimizerSpec:
    """The optimizer of a proof of `plan` on `model`, which may be on the meta device."""
    lr, eps = RATES.get(plan.precision or "fp64", RATES_16)
    pattern = second_group([n for n, p in model.named_parameters() if p.requires_grad])
    own = {"lr": 2 * lr, "weight_decay": 0.3, "betas": (0.7, 0.9)}
    groups = {pattern: own} if pattern else {}
    return AdamW(groups, lr=lr, betas=(0.8, 0.95), eps=eps, weight_decay=0.1)


def second_group(names: Sequence[str]) -> str:
    """A pattern of parameters by the end of their names, about half of all; "" if there is none."""
    endings = {".".join(name.split(".")[-words:]) for name in names for words in (1, 2)}
    matches = {f"*{end}": sum(fnmatch(name, f"*{end}") for name in names) for end in endings}
    some = {pattern: n for pattern, n in matches.items() if 0 < n < len(names)}
    return min(some, key=lambda pattern: (abs(2 * some[pattern] - len(names)), pattern), default="")


def factor_of(step: int) -> float:
    return FACTORS[step % len(FACTORS)]
