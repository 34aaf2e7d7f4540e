"""A check that refuses optimizers that need whole tensors when parameters are sharded.

A shard of a matrix has two dims too (flat_parameter.py).  An optimizer such as Muon would treat it
as a matrix and compute a wrong update, without any error.
"""

from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardwise.core.errors import bad
from shardwise.core.plan import Plan
from shardwise.core.weak import owner
from shardwise.parallel.data.hooks import Data

#: torch.optim classes that update each element independently, so that they work on shards.
ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax"),
    *("ASGD", "Rprop"),
)
#: Classes that need the full tensor, and are supported if each rank updates full parameters.
BY_TENSOR = ("Adafactor",)


def needs_whole_tensors(kind: type) -> bool:
    """Whether a class of torch.optim, or a class derived from it, is not elementwise."""
    name = _torchs(kind)
    return bool(name) and name not in ELEMENTWISE


def updates_by_tensor(kind: type) -> bool:
    """Whether it is not elementwise, but supported if each rank updates full parameters."""
    return _torchs(kind) in BY_TENSOR


def _torchs(kind: type) -> str:
    """The name of the class in torch.optim that it is or derives from; "" for others."""
    ours = [
        c for c in kind.__mro__ if c.__module__.startswith("torch.optim") and c is not Optimizer
    ]
    return ours[0].__name__ if ours else ""


def require_whole(kind: type, plan: Plan) -> None:
    """Raise InputError if `kind` updates whole tensors and ranks of `plan` hold parts of them."""
    if not updates_by_tensor(kind):
        return
    sizes: dict[str, int] = {}
    for own in map(plan.of_layers, range(len(plan.layers) + 1)):
        for axis in filter(None, ("tp", own.shard_axis)):
            sizes[axis] = max(sizes.get(axis, 1), own.mesh.size_of(axis))
    split = [axis for axis, size in sizes.items() if size > 1]
    if not split:
        return
    whole = "with ddp, pp, dp_replicate, accumulate and recompute, in every precision"
    raise bad(
        f"{kind.__name__} under the plan '{plan}', whose ranks of the axis {' and '.join(split)} "
        "update parts of a parameter; its means of rows and columns are those of whole matrices",
        f"{kind.__name__} where each rank updates whole parameters: {whole}",
        f"sw.Lion(lr=1e-4) with '{plan}', or {kind.__name__} with 'dp{plan.size}'",
    )


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
