"""Refuses optimizers that need whole tensors where each rank holds pieces of parameters.

A piece of a matrix has two dimensions (flat.py).  An optimizer such as Muon would treat it as a
matrix and compute a wrong update, and nothing would raise an error.
"""

from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardwise.core.errors import bad
from shardwise.core.weak import owner
from shardwise.parallel.data.hooks import Data

#: torch.optim classes that treat every element alike, so that a piece is updated as in the whole.
ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax"),
    *("ASGD", "Rprop"),
)


def needs_whole(kind: type) -> bool:
    """Whether a class of torch.optim, or one derived from it, looks at several elements at once."""
    ours = [
        c for c in kind.__mro__ if c.__module__.startswith("torch.optim") and c is not Optimizer
    ]
    return bool(ours) and ours[0].__name__ not in ELEMENTWISE


def _refuse(optimizer: Optimizer, *_: Any) -> None:
    """Called before each step of any optimizer. Raises InputError as the docstring above says."""
    if not needs_whole(type(optimizer)):
        return
    if any(_is_piece(p) for group in optimizer.param_groups for p in group["params"]):
        raise bad(
            f"a step of {type(optimizer).__name__}, which needs whole tensors, on parameters of "
            "which each rank holds a piece",
            f"a class that treats every element alike: {', '.join(ELEMENTWISE)}",
            'torch.optim.AdamW(module.parameters()), or sw.FSDP(module, "NO_SHARD")',
        )


def _is_piece(p: nn.Parameter) -> bool:
    """Whether a parameter is one of several whose elements are divided among ranks."""
    owners = [owner(hook) for hook in (p._post_accumulate_grad_hooks or {}).values()]
    return any(isinstance(o, Data) and o.places[p][1].split for o in owners if p in o.places)


register_optimizer_step_pre_hook(_refuse)
