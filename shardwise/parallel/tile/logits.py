"""Logits of a tiled layer, which are not computed before they are used, and their cross-entropy.

    logits = head(x)                              nothing is computed
    cross_entropy(logits.flatten(0, 1), targets)  tile by tile, as below
    logits.argmax(-1), logits / 2, print(logits)  computes all of them: a plain tensor

    tile k      l = x Wk^T [N, Vk]     s_k = log sum_j exp(l_j)     t_k = l at the target, or 0
    loss        log sum_k exp(s_k) - sum_k t_k                      of each position
    backward    l again; the gradient of l_j is (exp(l_j - s_k) ds_k + [j is the target] dt_k)

A tile keeps x and s_k for the backward pass, so that logits of one tile exist at a time, in forward
and in backward, at the price of one more product. It is the loss of vocabulary-parallel ranks
(Megatron-LM, arXiv 1909.08053, section 3), one after another in place of side by side.

N  positions    V  vocabulary, Vk of it in tile k    D  features of the input
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

#: Calls of a module for positions x [..., D], or for positions, targets and the type of its loss.
Call = Callable[..., Any]


class TiledLogits(Tensor):
    """Logits [..., V] of a tiled layer for the inputs `x` [..., D]; it has no memory of its own.

    Made by `TiledLogits.of`. Casts and views of the positions are logits again, of the same views
    of `x`. Every other operation computes all logits first.
    """

    x: Tensor
    tiles: Sequence[Call]
    #: what hooks on the layer's output see (parallel/data/outputs.py)
    computed_from: Tensor
    made: Tensor | None  # all logits, once something has asked for them

    @staticmethod
    def of(x: Tensor, tiles: Sequence[Any], dtype: torch.dtype | None = None) -> "TiledLogits":
        """The logits of `tiles`, cast to `dtype` if given."""
        shape = (*x.shape[:-1], tiles[-1].stop)
        made = torch.Tensor._make_wrapper_subclass(
            TiledLogits, shape, dtype=dtype or x.dtype, device=x.device
        )
        made.x, made.tiles, made.made, made.computed_from = x, tiles, None, x
        return made

    def full(self) -> Tensor:
        """All logits [..., V], as a plain tensor."""
        if self.made is None:
            made = torch.cat([tile(self.x) for tile in self.tiles], -1)
            self.made = made.to(_dtype(self))
        return self.made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if (name == "__get__" and owner in _DESCRIBED) or name in _DESCRIBED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "__get__" and owner == "requires_grad":
            return args[0].x.requires_grad
        rule = _RULES.get(name)
        first = args[0] if args else kwargs.get("input")
        if rule is not None and isinstance(first, TiledLogits) and first.made is None:
            found = rule(func, args, kwargs)
            if found is not NotImplemented:
                return found
        return func(*_full(tuple(args)), **_full(kwargs))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_full(args), **_full(kwargs or {}))  # from C++, without a gradient


#: Attributes and methods of a tensor that do not read its values.
_DESCRIBED = {
    *("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta", "is_sparse", "size"),
    *("dim", "numel", "nelement", "ndimension", "is_floating_point", "is_complex", "__len__"),
}


def _full(given: Any) -> Any:
    return tree_map_only(TiledLogits, TiledLogits.full, given)


def _dtype(x: Tensor) -> torch.dtype:
    with torch._C.DisableTorchFunctionSubclass():
        return x.dtype


def _viewed(logits: TiledLogits, x: Tensor) -> TiledLogits:
    return TiledLogits.of(x, logits.tiles, _dtype(logits))


# --- rules: NotImplemented computes all logits ---------------------------------------------------


def _cast(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`float()`, `double()`, `to(dtype)`: of the logits of each tile, as of all."""
    logits = args[0]
    dtype = {"float": torch.float32, "double": torch.float64}.get(func.__name__)
    if dtype is None:
        (dtype,) = args[1:] if len(args) == 2 and not kwargs else (None,)
    # the type of a tile's product is that of x: a second cast would lose the first
    if not isinstance(dtype, torch.dtype) or _dtype(logits) != logits.x.dtype:
        return logits if dtype == _dtype(logits) else NotImplemented
    return TiledLogits.of(logits.x, logits.tiles, dtype)


def _view(_: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`view` and `reshape` to shapes whose last dim is the vocabulary."""
    logits, sizes = args[0], list(args[1:])
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = [*sizes[0]]
    if kwargs or not sizes or not all(type(size) is int for size in sizes):
        return NotImplemented
    shape = tuple(logits.shape)
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = math.prod(shape) // known if known else 0
    if sizes[-1] != shape[-1] or math.prod(sizes) != math.prod(shape):
        return NotImplemented
    return _viewed(logits, logits.x.reshape(*sizes[:-1], logits.x.shape[-1]))


def _flatten(_: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`flatten` of dims of positions."""
    logits = args[0]
    given = inspect.signature(_flat_dims).bind(*args[1:], **kwargs)
    given.apply_defaults()
    first, last = (dim % logits.dim() for dim in given.args)
    if last == logits.dim() - 1 and first != last:
        return NotImplemented
    return _viewed(logits, logits.x.flatten(first, last))


def _flat_dims(start_dim: int = 0, end_dim: int = -1) -> None: ...


def _index(_: Any, args: Sequence[Any], _kwargs: dict[str, Any]) -> Any:
    """`logits[a:b, c]`: numbers and slices of positions."""
    logits, index = args
    parts = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [part for part in parts if not isinstance(part, Tensor)]:
        if parts[0] is not Ellipsis or len(parts) != 3 or parts[2] != slice(None):
            return NotImplemented
        return _viewed(logits, logits.x[parts])
    whole = len(parts) == logits.dim() and type(parts[-1]) is slice and parts[-1] == slice(None)
    if not all(type(part) in (int, slice) for part in parts):
        return NotImplemented
    if len(parts) >= logits.dim() and not whole:
        return NotImplemented
    return _viewed(logits, logits.x[parts])


def _same(_: Any, args: Sequence[Any], _kwargs: dict[str, Any]) -> Any:
    return args[0]


def _loss(_: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`F.cross_entropy` of [N, V] with class numbers [N], without weights or smoothing."""
    given = inspect.signature(F.cross_entropy).bind(*args, **kwargs).arguments
    logits, targets = given.pop("input"), given.pop("target")
    ignored, reduction = given.pop("ignore_index", -100), given.pop("reduction", "mean")
    other = any(given.values())  # weight, smoothing, and deprecated options
    good = isinstance(targets, Tensor) and targets.dtype == torch.int64 and logits.dim() == 2
    if other or not good or targets.shape != logits.shape[:1]:
        return NotImplemented
    return cross_entropy(logits, targets, ignored, reduction)


_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("float", "double", "to", "type"), _cast),
    **dict.fromkeys(("view", "reshape"), _view),
    "flatten": _flatten,
    "__getitem__": _index,
    "contiguous": _same,
    "cross_entropy": _loss,
}


# --- the loss ------------------------------------------------------------------------------------


def cross_entropy(logits: TiledLogits, targets: Tensor, ignored: int, reduction: str) -> Tensor:
    """The cross-entropy of logits [N, V] with targets [N], as torch's; a tile at a time."""
    found = [tile(logits.x, targets, _dtype(logits)) for tile in logits.tiles]
    sums, picked = (torch.stack(values) for values in zip(*found, strict=True))
    counted = targets != ignored
    losses = (sums.logsumexp(0) - picked.sum(0)).masked_fill(~counted, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def tile_sums(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    start: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Of logits x weight^T + bias in `dtype`: log-sum-exp [N], and logits at the targets [N].

    x [N, D], weight [Vk, D], bias [Vk]; the tile has the classes from `start`. Of targets [N] in
    other tiles the second is 0.
    """
    return _TileSums.apply(x, weight, bias, targets, start, dtype)


class _TileSums(torch.autograd.Function):
    """Keeps x, the weight and the log-sum-exp; computes the logits again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        start: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """As `tile_sums`."""
        logits = F.linear(x, weight, bias).to(dtype)
        place, inside = _places(targets - start, len(weight))
        sums = logits.logsumexp(-1)
        picked = logits.gather(1, place).squeeze(1).masked_fill(~inside, 0.0)
        ctx.save_for_backward(x, weight, bias, targets, sums)
        ctx.start = start
        return sums, picked

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias."""
        x, weight, bias, targets, sums = ctx.saved_tensors
        of_sums, of_picked = grads
        logits = F.linear(x, weight, bias).to(sums.dtype)
        place, inside = _places(targets - ctx.start, len(weight))
        grad = logits.sub_(sums.unsqueeze(1)).exp_().mul_(of_sums.unsqueeze(1))
        grad.scatter_add_(1, place, of_picked.masked_fill(~inside, 0.0).unsqueeze(1))
        grad = grad.to(x.dtype)
        into_x, into_weight, into_bias, *_ = ctx.needs_input_grad
        return (
            grad @ weight if into_x else None,
            grad.T @ x if into_weight else None,
            grad.sum(0) if into_bias else None,
            None,
            None,
            None,
        )


def _places(targets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The targets [N, 1] as columns of a tile, 0 for those elsewhere; whether they are in it."""
    inside = (targets >= 0) & (targets < columns)
    return targets.masked_fill(~inside, 0).unsqueeze(1), inside
