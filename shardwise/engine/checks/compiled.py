"""torch.compile where single operations are followed: the model runs without it.

Under data parallelism a compiled block sees full parameters, and hooks run between two graphs
(core/tools/graph_break.py).  Tensor parallelism, context parallelism and pipelines intercept single
operations of a forward pass, which a compiled graph no longer has.
"""

import sys
from typing import Any

from torch import nn

from shardwise.core.plan.plan import Plan
from shardwise.core.tools.structure import uncompiled


def followed(plan: Plan) -> bool:
    """Whether the plan intercepts single operations."""
    return plan.pipeline is not None or plan.mesh.size_of("tp") > 1 or plan.cp > 1


def without_compiler(model: nn.Module, where: str, rank: int = 0) -> nn.Module:
    """The model, in which torch.compile is undone in place; rank 0 prints a line if it was there.

    Compiled parts become what they were made from; graphs that exist are not used any more.
    """
    if "torch._dynamo" not in sys.modules:
        return model
    inner, found = uncompiled(model), uncompiled(model) is not model
    for module in list(inner.modules()):
        if getattr(module, "_compiled_call_impl", None) is not None:
            module._compiled_call_impl, found = None, True
        for key, part in module._modules.items():
            if part is not None and uncompiled(part) is not part:
                module._modules[key], found = uncompiled(part), True
    if found and not rank:
        print(
            f"shardwise: the {type(inner).__name__} runs without torch.compile under {where}, "
            "which follows single operations.",
            file=sys.stderr,
        )
    return inner


def as_followed(plan: Plan, model: nn.Module, loss: Any, rank: int) -> tuple[nn.Module, Any]:
    """The model and the loss, without torch.compile where the plan follows operations."""
    if not followed(plan):
        return model, loss
    plain = getattr(loss, "_torchdynamo_orig_callable", loss)
    return without_compiler(model, f"'{plan}'", rank), plain
