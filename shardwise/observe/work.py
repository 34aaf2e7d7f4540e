"""The recorder of a pass's operations, and what kernels save for the backward pass, on the meta
device.

product        2 m n k of its dims                        all arguments, and the result
attention      as torch counts, half of it if causal      query, key, value, output
element-wise   0                                          all arguments, and the result
look-up        0                                          the rows that are read, twice
view           not recorded: it moves nothing

What is saved:

                CPU                                     CUDA
    attention   query, key, value, output, sums of      the same; scores in fp64, and with grouped
                rows; scores with dropout               heads in fp32 or under a mask
    RMS norm    what each of its operations saves       input, weight, the norm of each row
    dropout     the mask in the dtype of the input      a mask of one byte per element

On CUDA, attention is fused in 16 bits, and in fp32 by the kernel that takes masks (those named
flash, cuDNN and memory-efficient; their sums of rows are fp32).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import flop_registry

from shardwise.core.model_spec import Operation

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
    if not isinstance(values, _TREES):
        return []
    found = list[Tensor]()
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _TREES):
            found += call_tensors(value)
    return found


_TREES: Final = (tuple, list, dict)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


# --- what kernels save for the backward pass ------------------------------------------------------

Kernels = Literal["cpu", "cuda"]
KERNELS: Final = ("cpu", "cuda")


def kernels_of(device: torch.device) -> Kernels:
    return "cuda" if device.type == "cuda" else "cpu"


class Fused(NamedTuple):
    """A fused kernel: it pads its sums to a multiple of `rows`, and saves `seeds` for dropout."""

    rows: int = 1
    seeds: int = 0
    drops: float = 0.0


_LIBRARY: Final = torch.library.Library("shardwise", "DEF")
_LIBRARY.define(
    "attention(Tensor query, int width, ScalarType wide, int rows, int seeds, float drops) "
    "-> (Tensor, Tensor, Tensor)"
)
#: One operation, as a kernel is, for modes that keep what it makes.
ATTENTION: Final[Any] = torch.ops.shardwise.attention.default


@torch.library.impl(_LIBRARY, "attention", "Meta")
def _attention(
    query: Tensor, width: int, wide: torch.dtype, rows: int, seeds: int, _: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, with the strides of the query; the sums of its rows; the seeds of dropout."""
    out = torch.empty_like(query[..., :1].expand(*query.shape[:-1], width))
    *outer, positions = query.shape[:-1]
    sums = query.new_empty((*outer, -(-positions // rows) * rows), dtype=wide)
    return out, sums, query.new_empty(seeds, dtype=torch.int64)


class FusedAttention(torch.autograd.Function):
    """Attention on meta: the shape of its result, and the tensors that a fused kernel saves."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, how: "Fused"
    ) -> Tensor:
        """Query [B, H, T, E], key, value [B, H or fewer, S, E]; a truth mask as numbers."""
        wide = torch.promote_types(query.dtype, torch.float32)
        out, sums, seeds = ATTENTION(query, value.shape[-1], wide, *how)
        masks = [] if mask is None else [mask.to(query.dtype) if mask.dtype == torch.bool else mask]
        ctx.save_for_backward(query, key, value, *masks, out, sums, *([seeds] if how.seeds else []))
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        found = (torch.empty_like(x, device="meta") for x in ctx.saved_tensors[:3])
        return *found, None, None


class _RMSNorm(torch.autograd.Function):
    """The norm on meta: the shape of its result, and what the fused kernel of CUDA saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: int, weight: Tensor | None) -> Tensor:
        """Of `x`, whose last `dims` dims are normalised; no values."""
        wide = torch.promote_types(x.dtype, torch.float32)
        norms = x.new_empty((*x.shape[:-dims], *(1,) * dims), dtype=wide, device="meta")
        ctx.save_for_backward(x, norms, *([] if weight is None else [weight]))
        return torch.empty_like(x, device="meta")

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor] = [torch.empty_like(x, device="meta") for x in ctx.saved_tensors]
        return found[0], None, found[2] if len(found) > 2 else None


class _Dropout(torch.autograd.Function):
    """Dropout on meta, with the mask that the kernel of CUDA saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        ctx.save_for_backward(x.new_empty(x.shape, dtype=torch.bool, device="meta"))
        return torch.empty_like(x, device="meta")

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0], dtype=ctx.dtype, device="meta")


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, _: Any = None) -> Any:
    fused = x.is_meta and (weight is None or weight.dtype == x.dtype)
    return _RMSNorm.apply(x, len(shape), weight) if fused else None


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return _Dropout.apply(x) if x.is_meta and training and 0 < p < 1 and not inplace else None


#: The functions that a kernel of CUDA computes as one operation: what stands for them on meta, and
#: the names of its arguments.
ON_CUDA: Final[Mapping[Any, tuple[Callable[..., Any], tuple[str, ...]]]] = {
    functional.rms_norm: (_rms_norm, ("input", "normalized_shape", "weight", "eps")),
    torch.rms_norm: (_rms_norm, ("input", "normalized_shape", "weight", "eps")),
    functional.dropout: (_dropout, ("input", "p", "training", "inplace")),
    torch.dropout: (_dropout, ("input", "p", "train")),
}


def fused_on(kernels: Kernels, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The result on meta of a function, other than attention, that one kernel computes; or None."""
    if kernels == "cpu" or func not in ON_CUDA:
        return None
    stands, names = ON_CUDA[func]
    return stands(*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))


def attention_on(
    kernels: Kernels, inputs: Sequence[Tensor], mask: Tensor | None, drops: float
) -> Fused | None:
    """The fused kernel that computes attention of query, key and value; None if none does."""
    query, key, _ = inputs
    if mask is not None and mask.requires_grad:
        return None
    if kernels == "cpu":
        return None if drops else Fused()
    if query.dtype in (torch.float16, torch.bfloat16) and mask is None:
        return Fused(seeds=2, drops=drops)
    grouped = query.shape[-3] != key.shape[-3]
    return None if grouped or query.dtype == torch.float64 else Fused(32, 2, drops)
