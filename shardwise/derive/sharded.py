"""The check of a table: the sharded model runs, and its tensors have the shapes of shards.

A model may run under a wrong table: `view(B, -1, heads, D)` turns missing heads into positions. So
the shapes of results of mixing operations are compared with those of the plain model, with the
sharded axes divided.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.core.layouts.uneven import even
from shardwise.core.plan.plan import Plan
from shardwise.derive.axis_rules import leaves
from shardwise.derive.axis_trace import ATTENTION, NoTape, OperationTrace, checked, named
from shardwise.derive.groups import LayerGroup
from shardwise.engine.spec_of_model import on_tensor_axis
from shardwise.observe.meta_pass import UNKNOWN, as_on_processor
from shardwise.techniques.tensor.tensor_table import Table


@dataclass(frozen=True)
class Sharded:
    """A plain model, on meta or with values, the plan of its tensor axis, and a batch's loss."""

    plain: nn.Module
    plan: Plan
    call: Callable[[nn.Module], Any]


def keeps_shapes(
    model: Sharded, table: Table, trace: OperationTrace, grouped: Sequence[LayerGroup]
) -> bool:
    """Whether the first and the last rank run under `table` with the shapes of their parts."""
    ranks = model.plan.size
    for rank in {0, ranks - 1}:
        try:
            laid_out = on_tensor_axis(model.plain, model.plan, rank, table)
            found = _shapes(laid_out, model.call)
        except UNKNOWN:
            return False
        part = {g.axis.root: even(0, g.axis.size, ranks).size(rank) for g in grouped}
        expected = [
            (name, tuple(_length([part.get(x, x.size) for x in leaves(dim)]) for dim in dims))
            for name, dims in trace.checked
        ]
        if model.plan.sp:  # the stream is gathered with `cat`
            found, expected = ([e for e in x if e[0] != "cat"] for x in (found, expected))
        if found != expected:
            return False
    return True


def _length(sizes: Sequence[int]) -> int:
    length = 1
    for size in sizes:
        length *= size
    return length


Result = tuple[str, tuple[int, ...]]


def _shapes(model: nn.Module, call: Callable[[nn.Module], Any]) -> list[Result]:
    """The names and shapes of the results of checked operations in the model's forward."""
    record = _Shapes()
    end = model.register_forward_hook(record.end, prepend=True)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), as_on_processor(record):
            call(model)
    finally:
        end.remove()
    return record.found


class _Shapes:
    """Records shapes until the model's forward ends."""

    def __init__(self) -> None:
        self.found: list[Result] = []
        self.done = False
        self.tape = NoTape()

    def end(self, *_: Any) -> None:
        """The forward has ended."""
        self.done = True

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """An operation below autograd."""
        made = next((x for x in tree_leaves(out) if isinstance(x, Tensor)), None)
        if not self.done and made is not None and checked(func):
            self.found.append((named(func), tuple(made.shape)))

    def kernel(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        """An element-wise kernel: the kernels of a CPU have none."""

    def attention(
        self, given: Sequence[Tensor], out: Tensor, _: int, *, causal: bool = False
    ) -> None:
        """A fused attention on the meta device; it raises as on others for a mask of all heads."""
        query, key, *rest = given
        scores = (*query.shape[:-1], key.shape[-2])
        for mask in rest[1:]:
            if torch.broadcast_shapes(mask.shape, scores) != scores:
                raise RuntimeError(f"a mask {tuple(mask.shape)} for scores {scores}")
        self.operation(ATTENTION, given, {}, out)
