"""The kernels of operations, and what they save for the backward pass, on the meta device.

product        2 m n k of its dims                        all arguments, and the result
attention      as torch counts, half of it if causal      query, key, value, output
element-wise   0                                          all arguments, and the result
look-up        0                                          the rows that are read, twice
view           not recorded: it moves nothing

What is saved:

                CPU                                     CUDA
    attention   query, key, value, output, sums of      the same; scores in fp64, without a dim of
                rows; scores with dropout and           heads, and with grouped heads in fp32 or
                without a dim of heads                  under a mask
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
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from shardwise.prediction.prediction import Operation

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
)
#: Memory without values is counted from the next operation on, when its owner has it.
UNWRITTEN: Final = ("empty", "new_empty", "empty_like", "empty_strided")
#: Fused attention: the places of the query and of `is_causal`, and the number of its products.
FUSED: Final = {
    "attention": (0, 8, 2),
    "attention_backward": (2, 0, 5),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 4, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 7, 5),
}


def operation_of(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Operation | None:
    """The kernel of an operation below autograd; None without elements."""
    tensors, results = call_tensors((args, kwargs)), call_tensors(out)
    if _name(func) in LOOKUPS:
        tensors = [*tensors[1:], *results]
    flops, causal = _flops(func, args, kwargs, out)
    done = flops // 2 if causal else flops
    moved_bytes = sum(map(_bytes, [*tensors, *results]))
    return Operation(_dtype(tensors or results), flops, done, moved_bytes) if moved_bytes else None


def _flops(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> tuple[int, bool]:
    """The operations of a product, and whether it is causal attention."""
    if (place := FUSED.get(_name(func))) is not None:
        first, causal, products = place
        flops = round(products / 2 * attention_flops(*args[first : first + 3]))
        return flops, bool(args[causal] if len(args) > causal else kwargs.get("is_causal"))
    counts = flop_registry.get(_out_of_place(func))
    return (0 if counts is None else counts(*args, **kwargs, out_val=out)), False


def attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """The operations of a fused attention, whose query heads may share those of key and value."""

    def shared(x: Tensor) -> tuple[int, ...]:
        return (*x.shape[:-3], *query.shape[-3:-2], *x.shape[-2:])

    return sdpa_flop_count(query.shape, shared(key), shared(value))


@cache
def moves_nothing(func: Any) -> bool:
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
    causal: bool = False


# Each is one operation, as a kernel is, for modes that look at operations.
_LIBRARY: Final = torch.library.Library("shardwise", "DEF")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, ScalarType wide, int rows, "
    "int seeds, float drops, bool causal) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "attention_backward(bool causal, Tensor grad, Tensor query, Tensor key, Tensor value) "
    "-> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define("norm(Tensor x, Tensor? weight, int dims, ScalarType wide) -> (Tensor, Tensor)")
_LIBRARY.define("norm_backward(Tensor grad, Tensor x, Tensor? weight) -> (Tensor, Tensor)")
_LIBRARY.define("dropout(Tensor x) -> (Tensor, Tensor)")
_LIBRARY.define("dropout_backward(Tensor grad, Tensor mask, ScalarType dtype) -> Tensor")
_OPS: Final[Any] = torch.ops.shardwise
ATTENTION: Final[Any] = _OPS.attention.default


@torch.library.impl(_LIBRARY, "attention", "Meta")
def _attention(
    query: Tensor,
    _: Tensor,
    value: Tensor,
    __: Any,
    wide: torch.dtype,
    rows: int,
    seeds: int,
    *___: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, with the strides of the query; the sums of its rows; the seeds of dropout."""
    out = torch.empty_like(query[..., :1].expand(*query.shape[:-1], value.shape[-1]))
    *outer, positions = query.shape[:-1]
    sums = query.new_empty((*outer, -(-positions // rows) * rows), dtype=wide)
    return out, sums, query.new_empty(seeds, dtype=torch.int64)


@torch.library.impl(_LIBRARY, "attention_backward", "Meta")
def _attention_backward(_: bool, __: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, inputs))


class FusedAttention(torch.autograd.Function):
    """Attention on meta: the shape of its result, and the tensors that a fused kernel saves."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, how: "Fused"
    ) -> Tensor:
        """Query [B, H, T, E], key, value [B, H or fewer, S, E]; a truth mask as numbers."""
        ctx.causal = how.causal
        wide = torch.promote_types(query.dtype, torch.float32)
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.to(query.dtype)
        out, sums, seeds = ATTENTION(query, key, value, mask, wide, *how)
        masks = [] if mask is None else [mask]
        ctx.save_for_backward(query, key, value, *masks, out, sums, *([seeds] if how.seeds else []))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = _OPS.attention_backward(ctx.causal, grad, *ctx.saved_tensors[:3])
        return *found, None, None


@torch.library.impl(_LIBRARY, "norm", "Meta")
def _norm(x: Tensor, _: Tensor | None, dims: int, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    norms = x.new_empty((*x.shape[:-dims], *(1,) * dims), dtype=wide)
    return torch.empty_like(x), norms


@torch.library.impl(_LIBRARY, "norm_backward", "Meta")
def _norm_backward(_: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if weight is None else torch.empty_like(weight)


class _RMSNorm(torch.autograd.Function):
    """The norm on meta: the shape of its result, and what the fused kernel of CUDA saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: int, weight: Tensor | None) -> Tensor:
        """Of `x`, whose last `dims` dims are normalised; no values."""
        out, norms = _OPS.norm(x, weight, dims, torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, norms, *([] if weight is None else [weight]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, _, *weights = ctx.saved_tensors
        weight = weights[0] if weights else None
        of_x, of_weight = _OPS.norm_backward(grad, x, weight)
        return of_x, None, None if weight is None else of_weight


@torch.library.impl(_LIBRARY, "dropout", "Meta")
def _dropped(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape, dtype=torch.bool)


@torch.library.impl(_LIBRARY, "dropout_backward", "Meta")
def _dropout_backward(grad: Tensor, _: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(grad, dtype=dtype)


class _Dropout(torch.autograd.Function):
    """Dropout on meta, with the mask that the kernel of CUDA saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        out, mask = _OPS.dropout(x)
        ctx.save_for_backward(mask)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _OPS.dropout_backward(grad, *ctx.saved_tensors, ctx.dtype)


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


def _without_memory(x: Tensor) -> Tensor:
    """A tensor on the CPU of the shape and dtype of `x`, for torch's own choice of a kernel."""
    last = x.shape[-1:] if x.stride()[-1:] == (1,) else (1,) * min(x.ndim, 1)
    return torch.empty(last, dtype=x.dtype, device="cpu").expand(x.shape)


def attention_on(
    kernels: Kernels,
    inputs: Sequence[Tensor],
    mask: Tensor | None,
    drops: float,
    *,
    causal: bool,
) -> Fused | None:
    """The fused kernel that computes attention of query, key and value; None if none does."""
    query, key, value = inputs
    if mask is not None and mask.requires_grad:
        return None
    grouped = query.ndim > 2 and 0 < key.shape[-3] != query.shape[-3]  # torch divides by them
    if kernels == "cpu":
        q, k, v = map(_without_memory, inputs)
        at = None if mask is None else _without_memory(mask)
        with _disable_current_modes():
            fused = torch.ops.aten._fused_sdp_choice(q, k, v, at, drops, causal, enable_gqa=grouped)
        return Fused(causal=causal) if fused else None
    if query.ndim != 4:
        return None
    one_head_size = query.shape[-1] == value.shape[-1]
    if query.dtype in (torch.float16, torch.bfloat16) and mask is None and one_head_size:
        return Fused(seeds=2, drops=drops, causal=causal)
    return None if grouped or query.dtype == torch.float64 else Fused(32, 2, drops, causal)
