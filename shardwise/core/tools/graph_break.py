"""Graph breaks: functions that torch.compile does not compile, and runs between two graphs.

Gathering, freeing and reducing change the storage of parameters and wait for other ranks. They
must run before a graph, whose inputs are the gathered parameters.

`torch.compiler.disable` does the same but loads the compiler, which takes seconds. This sets the
frame evaluator directly, if torch has loaded it, and imports nothing of torch.
"""

import sys
from collections.abc import Callable
from typing import Any

from shardwise.core.tools.hook import Hook


def graph_break(act: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `act` so that each call is a graph break and nothing in it is compiled."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return act(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compiler.disable's mark
    call._torchdynamo_disable_msg = "a hook of Shardwise's"  # type: ignore[attr-defined]
    _skip(call, inner=True)
    _skip(Hook.__call__, inner=False)  # nn.Module calls it for each hook
    return call


def _skip(function: Any, inner: bool) -> None:
    """Do not compile frames of the function; with `inner`, nor of functions that it calls."""
    evaluator: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    actions = getattr(evaluator, "_FrameAction", None)
    if actions is not None:
        below = actions.SKIP if inner else actions.DEFAULT
        strategy = evaluator._FrameExecStrategy(actions.SKIP, below)
        evaluator.set_code_exec_strategy(function.__code__, strategy)
