"""Tensors that reach a layer of a later stage, or the loss, past the arguments of layers.

object.kept = v        in a layer of stage 0
x + object.kept        in a layer of stage 1, whose rank has no such tensor, or an old one
"""

import sys
from collections.abc import Iterable
from typing import Any

from shardwise.core.errors import bad


def require_arguments(
    layer: str, stage: int, outputs: Iterable[Any], before: Iterable[Any], made: dict[Any, Any]
) -> None:
    """Raise InputError if a tensor of an earlier stage's layer, not among the inputs with the nodes
    of autograd `before`, is in `outputs`. `made` has each node's stage and layer.
    """
    nodes, done = [x.grad_fn for x in outputs], {None, *before}
    while nodes:
        node = nodes.pop()
        if node in done or not node.next_functions:  # of a parameter: layers may share it
            continue
        done.add(node)
        made_in, maker = made.setdefault(node, (stage, layer))
        if made_in < stage:
            raise bad(
                f"{layer}, of stage {stage}, which computes with a tensor that {maker}, of stage "
                f"{made_in}, has left for it in an object",
                "layers that take what other layers made as arguments",
                f"return x, extra in {maker}, and {layer}(x, extra)",
            )
        nodes += [each for each, _ in node.next_functions]


def require_no_capture() -> None:
    """Raise InputError if transformers collects outputs of layers in this forward."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if collected := capturing and capturing._active_collector.get():
        raise bad(
            f"a pipeline of a model that returns {', '.join(collected)} of layers of other ranks",
            "logits, the loss and the last hidden state",
            f"{', '.join(f'output_{name}=False' for name in collected)}, or a plan without pp",
        )
