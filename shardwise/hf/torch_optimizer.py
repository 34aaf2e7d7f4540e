"""The optimizer of TrainingArguments as a specification, and what Trainer's loop holds of it."""

import re
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.engine.optimizer.optimizer import ShardedOptimizer
from shardwise.engine.optimizer.optimizer_spec import Optim, OptimizerSpec

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def specification(
    kind: type[Optimizer], options: dict[str, Any], decay: float, groups: dict[str, dict[str, Any]]
) -> OptimizerSpec:
    """The class with its options; parameters of `groups` do not decay, others by `decay`."""
    known = {key: value for key, value in options.items() if key != "fused"}
    known["weight_decay"] = decay
    return Optim(kind, groups=groups, **known)


def without_decay(model: nn.Module, decayed: set[str]) -> dict[str, dict[str, Any]]:
    """Patterns of the names that are not `decayed`: one for the same weight of all layers.

    A pattern that would match a decayed name too is written out as the names.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name in decayed:
            continue
        pattern = _NUMBER.sub("*", name)
        exact = re.compile(re.escape(pattern).replace(r"\*", ".*"))
        clash = any(exact.fullmatch(other) for other in decayed)
        found[name if clash else pattern] = {"weight_decay": 0.0}
    return found


class Updated(Optimizer):
    """What Trainer's loop and its callbacks hold: the groups of the engine's optimizer.

    `engine.step` has updated when the loop calls `step`, which therefore does nothing.
    """

    def __init__(self, of: ShardedOptimizer) -> None:  # Optimizer.__init__ would make new groups
        self.of = of
        self.defaults, self.state, self.param_groups = of.defaults, of.state, of.param_groups

    def step(self, closure: Any = None) -> None:
        """Do nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: `engine.step` clears each gradient after its update."""

    def state_dict(self) -> dict[str, Any]:
        return self.of.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.of.load_state_dict(state_dict)
