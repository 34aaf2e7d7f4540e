"""What reaches a layer of a later stage, or the loss, past the arguments of layers.

object.kept = v        in a layer of stage 0
x + object.kept        in a layer of stage 1, whose rank has no such tensor, or an old one
object.depth += 1      in each layer: a rank counts its own ones alone
"""

import dis
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor, nn

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


class SharedNumbers:
    """The numbers of objects that layers share, of containers, and globals that a forward sets."""

    def __init__(self, layers: Iterable[nn.Module], containers: Iterable[nn.Module]) -> None:
        self.tables: dict[int, tuple[str, dict[str, Any], set[str] | None]] = {}
        self.writers = defaultdict[str, dict[str, int]](dict)  # of each number: layers, stages
        for module in containers:
            self._add(type(module).__name__, vars(module))
        for module in (m for layer in layers for m in layer.modules()):
            for x in vars(module).values():
                if not isinstance(x, nn.Module | Tensor | type | FunctionType):
                    self._add(type(x).__name__, getattr(x, "__dict__", {}))
            forward = type(module).forward
            if isinstance(forward, FunctionType):
                steps = dis.get_instructions(forward.__code__)
                names = {step.argval for step in steps if step.opname == "STORE_GLOBAL"}
                self._add(forward.__module__, forward.__globals__, names)

    def _add(self, owner: str, table: dict[str, Any], names: set[str] | None = None) -> None:
        if table and names != set():
            self.tables.setdefault(id(table), (owner, table, names))

    def _now(self) -> dict[str, Any]:
        return {
            f"{owner}.{name}": x
            for owner, table, names in self.tables.values()
            for name, x in table.items()
            if isinstance(x, int | float) and (names is None or name in names)
        }

    @contextmanager
    def during(self, layer: str, stage: int) -> Iterator[None]:
        """Note what a layer of a stage changes."""
        before = self._now()
        yield
        for name, x in self._now().items():
            if name in before and before[name] != x:
                self.writers[name][layer] = stage

    def warn(self, last: int) -> None:
        """Warn of numbers that ranks other than that of the stage `last` count."""
        for name, layers in self.writers.items():
            if {*layers.values()} != {last}:
                warnings.warn(
                    f"{name}, which {', '.join([*layers][:4])} change: in a pipeline each rank has "
                    "the number of its own layers. If it is only recorded, this is no mistake; "
                    "else pass it to the layers as an argument.",
                    stacklevel=2,
                )
