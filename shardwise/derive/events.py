"""Events of a traced pass: calls of modules and operations, with the dims of what they are given.

The positions of a sequence are the axis of dim 1 of what an embedding returns, and what operations
without a rule make of it.  An operation *mixes* positions if a rank with a part of them computes
something else: it is not elementwise in them, or it combines them with a constant of their length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.derive.axes import TracedAxis, leaves
from shardwise.derive.axis_rules import Dims, propagate


@dataclass(frozen=True)
class TraceEvent:
    """A call of a module begins or ends ("call", "end"), or an operation runs ("op").

    `name` is the module's, or the operation's; `inside` has the modules that run, outermost first;
    `dims` are those of the first tensor argument, or of every argument of an operation.  `active`:
    a gradient may reach a parameter from it.
    """

    kind: str
    name: str
    inside: tuple[str, ...]
    dims: tuple[Dims, ...]
    active: bool = True
    mixes: bool = False

    def has(self, axes: set[TracedAxis]) -> bool:
        """Whether a tensor of it has one of the axes."""
        return any(leaf in axes for dims in self.dims for dim in dims for leaf in leaves(dim))


def mixes_positions(
    positions: Sequence[TracedAxis], func: Any, dims: Sequence[Dims], args: Any, out: Tensor
) -> bool:
    """Whether an operation mixes positions: its rule is applied with an axis of their own."""
    if not positions:
        return False
    roots = {axis.root for axis in positions}
    own = {size: TracedAxis(size) for size in {axis.size for axis in roots}}
    swapped = [_each(one, lambda leaf: own[leaf.size] if leaf in roots else leaf) for one in dims]
    used = {leaf for one in swapped for dim in one for leaf in dim} & {*own.values()}
    if not used:
        return False
    kept = {leaf for dim in propagate(func, swapped, args, out) for leaf in leaves(dim)}
    return any(a.mixed or len(a.leaves) > 1 or a.root not in kept for a in used)


def _each(dims: Dims, change: Callable[[TracedAxis], TracedAxis]) -> Dims:
    return tuple(tuple(change(leaf) for leaf in leaves(dim)) for dim in dims)
