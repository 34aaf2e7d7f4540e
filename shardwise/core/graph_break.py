"""Graph breaks: functions that torch.compile leaves out, and runs between two compiled graphs.

Gathering, freeing and reducing act on the storage of parameters and wait for other ranks. A graph
has parameters as its inputs, so it begins after they were gathered.

`torch.compiler.disable` does the same, but loads the compiler, which takes seconds. Here the frame
evaluator is set directly, if torch has loaded it; nothing of torch is imported.
"""

import sys
from collections.abc import Callable
from typing import Any

from shardwise.core.hook import Hook


def graph_break(act: Callable[..., Any]) -> Callable[..., Any]:
    """`act`, with a graph break at each call; nothing in it is compiled."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return act(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compiler.disable's mark
    call._torchdynamo_disable_msg = "a hook of Shardwise's"  # type: ignore[attr-defined]
    _skip(call, inner=True)
    _skip(Hook.__call__, inner=False)  # called by nn.Module for each hook, where there is no graph
    return call


def _skip(function: Any, inner: bool) -> None:
    """Compile no frame of the function; nor, with `inner`, of what it calls."""
    evaluator: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    actions = getattr(evaluator, "_FrameAction", None)
    if actions is not None:
        below = actions.SKIP if inner else actions.DEFAULT
        strategy = evaluator._FrameExecStrategy(actions.SKIP, below)
        evaluator.set_code_exec_strategy(function.__code__, strategy)
