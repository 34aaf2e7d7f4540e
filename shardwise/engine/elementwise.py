"""A check that refuses optimizers that need whole tensors when parameters are sharded.

A shard of a matrix has two dims too (flat_parameter.py).  An optimizer such as Muon would treat it
as a matrix and compute a wrong update, without any error.
"""

from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardwise.core.errors import bad
from shardwise.core.weak import owner
from shardwise.parallel.data.hooks import Data

#: torch.optim classes that update each element independently, so that they work on shards.
ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax"),
    *("ASGD", "Rprop"),
)


def needs_whole_tensors(kind: type) -> bool:
    """Whether a class of torch.optim, or a class derived from it, is not elementwise."""
    ours = [
        c for c in kind.__mro__ if c.__module__.startswith("torch.optim") and c is not Optimizer
    ]
    return bool(ours) and ours[0].__name__ not in ELEMENTWISE


def _refuse(optimizer: Optimizer, *_: Any) -> None:
    """A hook before every optimizer step: raises InputError for a wrong one on shards."""
    if not needs_whole_tensors(type(optimizer)):
        return
    if any(_is_piece(p) for group in optimizer.param_groups for p in group["params"]):
        raise bad(
            f"a step of {type(optimizer).__name__}, which needs whole tensors, on shards",
            f"an elementwise class: {', '.join(ELEMENTWISE)}",
            'torch.optim.AdamW(module.parameters()), or sw.FSDP(module, "NO_SHARD")',
        )


def _is_piece(p: nn.Parameter) -> bool:
    """Whether a parameter is sharded."""
    owners = [owner(hook) for hook in (p._post_accumulate_grad_hooks or {}).values()]
    return any(isinstance(o, Data) and o.places[p][1].split for o in owners if p in o.places)


register_optimizer_step_pre_hook(_refuse)
