"""What reaches a layer of a later stage, or the loss, past the arguments of layers.

object.kept = v        in a layer of stage 0
x + object.kept        in a layer of stage 1, whose rank has no such tensor, or an old one
object.depth += 1      in each layer: a rank counts its own layers only
"""

import dis
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
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
    made |= dict.fromkeys(done - made.keys(), (stage, layer))
    while nodes:
        node = nodes.pop()
        if node in done or not node.next_functions:  # of a parameter: layers may share it
            continue
        done.add(node)
        if node not in made:
            made[node] = stage, layer
            nodes += [each for each, _ in node.next_functions]
        elif made[node][0] < stage:
            raise bad(
                f"{layer}, of stage {stage}, which computes with a tensor that {made[node][1]}, of "
                f"stage {made[node][0]}, has left for it in an object",
                "layers that take what other layers made as arguments",
                f"return x, extra in {made[node][1]}, and {layer}(x, extra)",
            )


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
    """Numbers that several layers may change: attributes of objects that two of them hold and of
    containers, and globals that a forward assigns.
    """

    def __init__(self, layers: Sequence[nn.Module], containers: Sequence[nn.Module]) -> None:
        #: by id of a table: whose it is, the table, and the names that count; None: all
        self.tables: dict[int, tuple[str, dict[str, Any], set[str] | None]] = {
            id(vars(m)): (type(m).__name__, vars(m), None) for m in containers
        }
        self.writers = defaultdict[str, dict[str, int]](dict)  # of each number: layers, stages
        inside, held = [[*layer.modules()] for layer in layers], Counter[int]()
        for modules in (*inside, *([each] for each in containers)):
            for key, (owner, table) in _objects_of(modules).items():
                held[key] += 1
                if held[key] > 1:
                    self.tables[key] = owner, table, None
        for forward in {type(m).forward for modules in inside for m in modules}:
            code: Any = getattr(forward, "__code__", "")
            steps = dis.get_instructions(code)
            if names := {step.argval for step in steps if step.opname == "STORE_GLOBAL"}:
                table = forward.__globals__
                known = self.tables.get(id(table), ("", table, None))[2] or set()
                self.tables[id(table)] = forward.__module__, table, known | names

    def _now(self) -> dict[tuple[int, str], Any]:
        return {
            (key, name): x
            for key, (_, table, names) in self.tables.items()
            for name, x in table.items()
            if isinstance(x, int | float) and (names is None or name in names)
        }

    @contextmanager
    def during(self, layer: str, stage: int) -> Iterator[None]:
        """Record which numbers the call of a layer changes."""
        before = self._now()
        yield
        for key, x in self._now().items():
            if key in before and before[key] != x:
                self.writers[f"{self.tables[key[0]][0]}.{key[1]}"][layer] = stage

    def warn(self, last: int) -> None:
        """Warn of numbers that layers of other stages than the `last` change."""
        for name, layers in self.writers.items():
            if {*layers.values()} != {last}:
                warnings.warn(
                    f"{name} is changed by the layers {', '.join([*layers][:4])}: in a pipeline "
                    "each rank sees only the changes that its own layers make. If the number is "
                    "only recorded, this is no mistake; else pass it to the layers as an argument.",
                    stacklevel=2,
                )


def _objects_of(modules: Iterable[nn.Module]) -> dict[int, tuple[str, dict[str, Any]]]:
    """The class and attributes of each object that modules hold, but for modules and tensors."""
    every = (x for m in modules for x in vars(m).values())
    plain = (x for x in every if not isinstance(x, nn.Module | Tensor | type | FunctionType))
    return {id(vars(x)): (type(x).__name__, vars(x)) for x in plain if getattr(x, "__dict__", {})}
