"""The recorder of a pass's operations: their FLOPs and the bytes that they read and write.

product        2 m n k of its dims                        all arguments, and the result
attention      as torch counts, half of it if causal      query, key, value, output
element-wise   0                                          all arguments, and the result
look-up        0                                          the rows that are read, twice
view           not recorded: it moves nothing
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardwise.core.tools.tape import Operation

#: Operations that read of their first argument only as much as they write.
LOOKUPS: Final = ("embedding", "index", "index_select", "gather", "nll_loss_forward")
#: Operations that return memory without touching it; the others of that kind are views by schema.
UNTOUCHED: Final = (
    "_unsafe_view",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "detach",
    "attention",
)
#: The five products of attention's backward pass, relative to the two of its forward pass.
BACKWARD_PRODUCTS: Final = 2.5


class WorkRecorder:
    """The operations so far, of the forward and of the backward pass."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def operation(
        self,
        func: Any,
        arguments: tuple[Any, dict[str, Any]],
        out: Any,
        module: str,
        *,
        backward: bool,
        saves: int = 0,
        product: int = -1,
    ) -> None:
        """Record an operation below autograd, unless it moves nothing."""
        if _moves_nothing(func):
            return
        args, kwargs = arguments
        tensors, results = call_tensors(arguments), call_tensors(out)
        if _name(func) in LOOKUPS:
            tensors = [*tensors[1:], *results]
        counts = flop_registry.get(_out_of_place(func))
        flops = 0 if counts is None else counts(*args, **kwargs, out_val=out)
        moved_bytes = sum(map(_bytes, [*tensors, *results]))
        dtype = _dtype(tensors or results)
        work = Operation(module, backward, dtype, flops, flops, moved_bytes, saves, product)
        self.operations += [work] if moved_bytes else []

    def attention(
        self,
        inputs: Sequence[Tensor],
        out: Tensor,
        module: str,
        flops: int,
        *,
        causal: bool,
        saves: int,
        product: int,
    ) -> None:
        """Record a fused attention, and its backward pass if it has one."""
        moved_bytes = sum(map(_bytes, (*inputs, out)))
        done, dtype = flops // 2 if causal else flops, _dtype(inputs)
        self.operations.append(
            Operation(module, False, dtype, flops, done, moved_bytes, saves, product)
        )
        if out.requires_grad:
            more, done = round(BACKWARD_PRODUCTS * flops), round(BACKWARD_PRODUCTS * done)
            self.operations.append(Operation(module, True, dtype, more, done, 2 * moved_bytes))

    def kernel(self, inputs: Sequence[Tensor], out: Tensor, module: str, saves: int) -> None:
        """Record a fused element-wise kernel; its backward pass reads the gradient too."""
        forward = sum(map(_bytes, (*inputs, out)))
        operation = Operation(module, False, _dtype(inputs), 0, 0, forward, saves)
        self.operations.append(operation)
        if out.requires_grad:
            more = forward + _bytes(out)
            self.operations.append(operation._replace(backward=True, moved_bytes=more))


@cache
def _moves_nothing(func: Any) -> bool:
    returns = [each.alias_info for each in func._schema.returns]
    views = bool(returns) and all(each is not None and not each.is_write for each in returns)
    return views or _name(func) in UNTOUCHED


@cache
def _out_of_place(func: Any) -> Any:
    """The operation that computes the same as one that writes to its argument."""
    return getattr(torch.ops.aten, _name(func).removesuffix("_"), func._overloadpacket)


@cache
def _name(func: Any) -> str:
    return func._overloadpacket.__name__


def _bytes(x: Tensor) -> int:
    """The bytes of its elements; of an expanded tensor those in memory."""
    if x.layout is not torch.strided:
        return x.numel() * x.element_size()
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _dtype(tensors: Sequence[Tensor]) -> str:
    largest = max(tensors, key=Tensor.numel, default=None)
    return "" if largest is None else str(largest.dtype).removeprefix("torch.")


def call_tensors(values: Any) -> list[Tensor]:
    """The tensors in the arguments or results of an operation; pytree takes longer than some."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [x for value in values for x in call_tensors(value)]
