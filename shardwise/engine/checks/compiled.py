"""A check that refuses torch.compile under tensor parallelism and pipelines.

Under data parallelism a compiled block sees full parameters, and hooks run between two graphs
(core/tools/graph_break.py).  Tensor parallelism and pipelines intercept single operations of a
forward pass, which a compiled graph no longer has.
"""

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwise.core.errors import bad
from shardwise.core.plan.plan import Plan
from shardwise.techniques.data.wrap_policy import uncompiled


def require_plain(model: nn.Module, plan: Plan, loss: Any = None) -> None:
    """Raise InputError for a compiled model or loss under a plan with tp, cp or pp."""
    if plan.pipeline is None and plan.mesh.size_of("tp") == plan.cp == 1:
        return
    data = plan.mesh.size
    refuse(model, f"'{plan}'", f"the plan 'dp{data} zero3'")
    if hasattr(loss, "_torchdynamo_orig_callable"):
        given = f"a loss compiled by torch.compile under '{plan}'"
        raise bad(given, _ALLOWED, "loss=loss_fn, without torch.compile")


def refuse(model: nn.Module, where: str, instead: str) -> None:
    """Raise InputError if `model` or one of its modules is compiled."""
    name = next(_compiled(model), None)
    if name is not None:
        what = f"{name} compiled by torch.compile under {where}"
        raise bad(what, _ALLOWED, f"the model without torch.compile, or {instead}")


_ALLOWED = (
    "compiled models and blocks under sw.DDP, sw.FSDP and plans without tp, cp and pp, which "
    "intercept single operations"
)


def _compiled(model: nn.Module) -> Iterator[str]:
    """The names of compiled modules; none if torch's compiler was never loaded."""
    for name, module in model.named_modules() if "torch._dynamo" in sys.modules else ():
        if (
            uncompiled(module) is not module
            or getattr(module, "_compiled_call_impl", None) is not None
        ):
            yield f"the module {name}" if name else f"a {type(uncompiled(module)).__name__}"
