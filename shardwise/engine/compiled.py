"""Refuses torch.compile under tensor parallelism and pipelines, which act on single operations.

Under data parallelism a compiled block sees whole parameters, and hooks run between two graphs
(core/graph_break.py).  Tensor parallelism and pipelines act on single operations of a forward pass,
and a compiled graph no longer has them.
"""

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwise.core.errors import bad
from shardwise.core.plan import Plan
from shardwise.parallel.data.wrap_policy import plain


def require_plain(model: nn.Module, plan: Plan, loss: Any = None) -> None:
    """Raise InputError for a model or a loss that is compiled, under a plan that follows it."""
    if plan.pipeline is None and plan.mesh.size_of("tp") == 1:
        return
    data = plan.mesh.size
    refuse(model, f"'{plan}'", f"the plan 'dp{data} zero3'")
    if hasattr(loss, "_torchdynamo_orig_callable"):
        raise bad(f"a loss compiled by torch.compile under '{plan}'", _ALLOWED, "the loss itself")


def refuse(model: nn.Module, where: str, instead: str) -> None:
    """Raise InputError if `model` or a module in it is compiled."""
    name = next(_compiled(model), None)
    if name is not None:
        what = f"{name} compiled by torch.compile under {where}"
        raise bad(what, _ALLOWED, f"the model without torch.compile, or {instead}")


_ALLOWED = (
    "compiled models and blocks under data parallelism alone: sw.DDP, sw.FSDP, and plans of the "
    "rows ddp, zero1, zero2 and zero3 without tp and pp, whose operations are followed one by one"
)


def _compiled(model: nn.Module) -> Iterator[str]:
    """The names of what is compiled; nothing can be where no compiler was loaded."""
    for name, module in model.named_modules() if "torch._dynamo" in sys.modules else ():
        if plain(module) is not module or getattr(module, "_compiled_call_impl", None) is not None:
            yield f"the module {name}" if name else f"a {type(plain(module)).__name__}"
