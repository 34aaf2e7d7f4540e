"""Differences between ranks that may be intended: each kind is warned about once.

    passes     backward passes of a loop's step, whose gradients are summed at once
    writes     of the program to parameters, optimizer states and gradients, between steps
    graph      the operations of a loop's loss: that of the backward pass that runs, whose call is
               on the stack of this thread, or of the one that waits for it
    hooks      of the program on modules and parameters
    numbers    of modules (epsilon, the rate of a dropout), and the functions that they call

Graphs, hooks and numbers are compared every so many steps, the others in each.
"""

import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import BuiltinFunctionType, FrameType, FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.core.tools.hook import program_hooks
from shardwise.core.tools.tree import leaves
from shardwise.techniques.data.flat.flat_parameter import Flat

Options = dict[str, Any]
KINDS: Final = {
    "passes": "If the loss of each pass is divided by their number, this is no mistake.",
    "writes": "If each rank writes to what it alone holds, this is no mistake.",
    "graph": "If the batch decides which operations a rank computes, this is no mistake.",
    "hooks": "A hook that only reads may stay.",
    "numbers": "A number that a module only records may stay.",
}


class Doubts:
    """What this rank has of each kind since the step before."""

    def __init__(self, flats: Sequence[Flat], modules: Mapping[str, nn.Module]) -> None:
        self.flats, self.modules = flats, modules
        self.params = [pair for f in flats for pair in zip(f.names, f.params, strict=True)]
        self.passes = self.gradient_writes = 0
        self.state_writes = False
        self.graph: list[str] = []
        self.version: int | None = None  # of all parameters, in the step before
        self.warned = set[str]()  # of these kinds, which are compared no more

    def found(self, *, all_kinds: bool) -> dict[str, Options]:
        """By kind, then by module or parameter; the next step begins."""
        found = defaultdict[str, Options](dict)
        if self.passes:
            found["passes"] = {"the backward passes of the step": self.passes}
        now = sum(p._version for _, p in self.params) + sum(f.assignments for f in self.flats)
        if self.version is not None:
            found["writes"] = {
                "changes of parameters since the step before": now - self.version,
                "changes of the optimizer's states since the step before": self.state_writes,
                "changes of gradients before the optimizer's step": self.gradient_writes,
            }
        found["graph"] = {f"the operation {name} in the loss": True for name in self.graph}
        for name, owner in (*self.modules.items(), *self.params) if all_kinds else ():
            numbers = _values_of(owner) if isinstance(owner, nn.Module) else {}
            for kind, own in ("hooks", program_hooks(owner)), ("numbers", numbers):
                found[kind] |= {f"{kind} of {name or 'the model'}": own} if own else {}
        self.version, self.gradient_writes, self.graph = now, 0, []
        return {kind: own for kind, own in found.items() if kind not in self.warned and own}

    def warn(self, kind: str, error: Exception) -> None:
        """Warn of what differs."""
        self.warned.add(kind)
        warnings.warn(f"{error} {KINDS[kind]}", stacklevel=2)


def _values_of(module: nn.Module) -> Options:
    """Its numbers, but for those of a rank or of dynamo, and the names of functions it calls."""
    own = vars(module).items()
    every = {name: x for name, x in own if not ("rank" in name or "dynamo" in name)}
    functions = FunctionType, BuiltinFunctionType
    named = {name: x.__qualname__ for name, x in every.items() if isinstance(x, functions)}
    return named | {name: x for name, x in every.items() if type(x) in (int, float)}


def operations_of_pass() -> list[str]:
    """The kinds of nodes in the graph that is differentiated; none if no call of it is found.

    Whether a view is copied depends on the shapes of a rank's rows.
    """
    nodes = [x.grad_fn for x in leaves(_differentiated(), Tensor) if x.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        new = {each for each, _ in nodes.pop().next_functions if each is not None} - seen
        seen |= new
        nodes += new
    found = {" ".join((node.name(), *_numbers_of(node))) for node in seen}
    return sorted(name for name in found if not any(word in name for word in ("View", "Clone")))


def _numbers_of(node: Any) -> Iterable[str]:
    """The numbers of an operation that no shape decides: a mean and a sum differ in the first."""
    for name in ("reduction", "ignore_index", "beta", "delta", "alpha", "exponent", "p"):
        if type(value := getattr(node, f"_saved_{name}", None)) in (int, float):
            yield f"{name}={value}"


def _differentiated() -> Any:
    """The tensors of the call of `backward` that runs. Keeps no frame, which would keep a model."""
    found, frames = None, [sys._getframe(1), *sys._current_frames().values()]
    while frames and found is None:
        frame: FrameType | None = frames.pop(0)
        while frame is not None and frame.f_code is not torch.autograd.backward.__code__:
            frame = frame.f_back
        found = None if frame is None else frame.f_locals["tensors"]
        del frame
    frames.clear()
    return found
