"""Logits that stay sharded over the vocabulary.

    rank 0 holds x[..., 0..3], rank 1 x[..., 4..7]           x.shape is [..., 8] on both
    x.float(), x.view(-1, 8), x[:, :-1], tanh(x / c) * c     computed on the shards; again Logits
    cross_entropy(x, targets)                                sums three numbers a position
    softmax(x), x + bias, x.argmax(-1), x.sum(), print(x)    gathers the logits; a plain tensor

A model with a vocabulary-parallel output layer returns them.  An operation that is not listed here
gathers the logits first, so it is always correct, and the ledger shows the all-gather.
"""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.uneven import Cut
from shardwise.kernels.matmul import BY_TORCH
from shardwise.parallel.tensor.cross_entropy import OPTIONS, cross_entropy, sharded_cross_entropy
from shardwise.parallel.tensor.linear import Stream

Rule = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]


class Columns(Protocol):
    """What gathers and shards columns: the stream of a step, or the record of a pass on meta."""

    def join(self, x: Tensor, cut: Cut) -> Tensor:
        """All columns of the shard `x`."""
        ...

    def take(self, x: Tensor, cut: Cut) -> Tensor:
        """This rank's shard of all columns `x`."""
        ...

    def record_loss(self, positions: int, smoothing: bool, element_bytes: int) -> None:
        """Called with each cross-entropy of sharded logits."""


class Rows(Protocol):
    """Rows of several data ranks: those of the output layer, of which the loss has its own only.

    `factor` is the number of entries in dim 0 for each row.
    """

    @property
    def all(self) -> int:
        """The number of rows of the output layer."""
        ...

    @property
    def own(self) -> int:
        """The number of rows of this rank's batch."""
        ...

    def gather(self, x: Tensor, factor: int) -> Tensor:
        """All rows, from this rank's own."""
        ...

    def take(self, x: Tensor, factor: int) -> Tensor:
        """This rank's own rows, from all."""
        ...


class Logits(Tensor):
    """Logits [..., V] of which this rank holds the columns that `cut` assigns it: S(-1) on `axis`.

    Made by `Logits.of`.  `local` is this rank's shard, with the gradient of the shard; `full()`
    gathers all columns (I on the axis).  Columns taken out (`x[..., 5]`, `x.T`) are a copy; writing
    to the logits themselves (`x[..., 5] = 0`) changes them.

    With `rows`, dim 0 of the shard has the rows of several data ranks; the logits are those of this
    rank's own rows.
    """

    axis: Axis
    cut: Cut
    stream: Columns
    rows: Rows | None

    @staticmethod
    def of(
        local: Tensor,
        axis: Axis,
        cut: Cut,
        stream: Columns | None = None,
        rows: Rows | None = None,
    ) -> "Logits":
        """Logits whose shard on this rank is `local` [..., v]; nothing is copied.

        `stream` gathers them and records each loss.

        Raises:
            InputError: `local` has another number of columns than this rank's shard.
        """
        columns = cut.size(axis.rank)
        if local.shape[-1] != columns:
            raise bad(
                f"logits with {local.shape[-1]} columns on rank {axis.rank} of axis {axis.name}",
                f"the {columns} columns of {cut.whole} that this rank holds",
                "torch.nn.functional.cross_entropy(logits, targets) for gathered logits",
            )
        out = local.as_subclass(Logits)
        out.axis, out.cut, out.rows = axis, cut, rows
        out.stream = stream or Stream(axis, split=False, products=BY_TORCH)
        return out

    @property
    def local(self) -> Tensor:
        """This rank's shard [..., v] as a plain tensor; not copied, and differentiable."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def full(self) -> Tensor:
        """All columns [..., V] as a plain tensor, equal on all ranks: an all-gather."""
        whole = self.stream.join(self.local, self.cut)
        return whole if self.rows is None else self.rows.take(whole, _factor(self))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            out = _RULES.get(func, _attribute)(func, args, kwargs)
        return _gathered(func, args, kwargs) if out is NotImplemented else out


# --- on gathered logits ----------------------------------------------------------------------


def _gathered(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call `func` with every Logits among its arguments gathered, each once."""
    plain: dict[int, Tensor] = {}

    def gather(x: Any) -> Any:
        """`x`, with plain tensors for all Logits in it."""
        if isinstance(x, Logits):
            if id(x) not in plain:
                plain[id(x)] = x.full()
            return plain[id(x)]
        if isinstance(x, (tuple, list)):
            items = [gather(item) for item in x]
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        return {k: gather(v) for k, v in x.items()} if type(x) is dict else x

    in_place = _IN_PLACE.fullmatch(func.__name__) or kwargs.get("inplace") is True
    target = args[0] if args and in_place else kwargs.get("out")
    if (in_place and not isinstance(target, Tensor)) or isinstance(kwargs.get("out"), Logits):
        raise bad(
            f"{func.__name__} into sharded logits",
            "functions that return a new tensor, and methods that change one tensor in place",
            "logits.copy_(...)",
        )
    out = func(*gather(args), **gather(kwargs))
    if not isinstance(target, Logits):
        return out
    with torch._C.DisableTorchFunctionSubclass():
        if target.axis.size > 1:  # on one rank the gathered tensor is the same memory
            part = target.stream.take(plain[id(target)], target.cut)
            rows = target.rows
            target.copy_(part if rows is None else rows.gather(part, _factor(target)))
    return target


#: Names of functions that change their first argument.
_IN_PLACE = re.compile(r"_?[a-z]\w*[a-z0-9]_|__setitem__|__i(?!n|ter)[a-z]+__")


# --- on the shards ---------------------------------------------------------------------------
# In a rule a Logits is the tensor of its shard.  NotImplemented: gather.


def _shape(x: Logits) -> torch.Size:
    if x.rows is None:
        return torch.Size((*x.shape[:-1], x.cut.whole))
    return torch.Size((x.rows.own * _factor(x), *x.shape[1:-1], x.cut.whole))


def _factor(x: Logits) -> int:
    """The number of entries in dim 0 for each row."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.shape[0] // max(1, x.rows.all) if x.rows is not None else 1


def _like(x: Logits, out: Any) -> Any:
    """Tensors computed from the shard of `x`, as Logits."""
    if isinstance(out, (tuple, list)):
        return type(out)(_like(x, item) for item in out)
    if not isinstance(out, Tensor) or out is x:
        return out
    return Logits.of(out, x.axis, x.cut, x.stream, x.rows)


def _attribute(func: Any, args: Sequence[Any], _: dict[str, Any]) -> Any:
    """Attributes of the tensor; other functions gather."""
    if func.__name__ == "__set__":
        return func(*args)
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    if func.__name__ != "__get__" or name in ("T", "mT", "H", "mH", "_base", ""):
        return NotImplemented
    return _shape(args[0]) if name == "shape" else _like(args[0], func(args[0]))


def _size(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if not args or not isinstance(args[0], Logits):
        return NotImplemented
    shape = _shape(args[0])
    if func.__name__ in ("numel", "nelement"):
        return shape.numel()
    default = 0 if func.__name__ == "__len__" else None
    dim = args[1] if len(args) > 1 else kwargs.get("dim", default)
    return shape if dim is None else shape[dim]


def _same(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Casts, copies, and properties that do not depend on the values."""
    x = args[0] if args else None
    return _like(x, func(*args, **kwargs)) if isinstance(x, Logits) else NotImplemented


def _elementwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """With numbers, or with tensors that have one value for all columns of a position."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    x = next(one for one in tensors if isinstance(one, Logits))
    others = [one for one in tensors if one is not x]
    elsewhere = "out" in kwargs or (func.__name__.endswith("_") and args[0] is not x)
    elsewhere = elsewhere or (x.rows is not None and any(one.dim() for one in others))
    if elsewhere or not all(map(_broadcasts, others)):
        return NotImplemented
    return _like(x, func(*args, **kwargs))


def _broadcasts(x: Tensor) -> bool:
    """Whether `x` has one value for all columns, and needs no gradient.

    Its gradient would be the sum over this rank's columns only.
    """
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    return not isinstance(x, Logits) and not needs_grad and (x.dim() == 0 or x.shape[-1] == 1)


def _reshape(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """To a shape whose last dim is the vocabulary."""
    x, sizes = args[0], [*args[1:]]
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = [*sizes[0]]
    if kwargs or not sizes or not all(type(size) is int for size in sizes):
        return NotImplemented
    numel, rest = _shape(x).numel(), math.prod(size for size in sizes if size != -1)
    if -1 in sizes and rest > 0:
        sizes[sizes.index(-1)] = numel // rest
    if sizes[-1] != x.cut.whole or math.prod(sizes) != numel or min(sizes) < 0:
        return NotImplemented
    if x.rows is not None:  # dim 0 of the shard has the other ranks' rows too
        rest = math.prod(sizes[1:-1]) * x.shape[-1]
        sizes[0] = x.numel() // max(1, rest)
        if len(sizes) < 2 or sizes[0] % max(1, x.rows.all):
            return NotImplemented
    return _like(x, func(x, (*sizes[:-1], x.shape[-1])))


#: View functions, with the names and defaults of their dims.
_DIMS: dict[str, dict[str, int]] = {
    "flatten": {"start_dim": 0, "end_dim": -1},
    "transpose": {"dim0": -1, "dim1": -1},
    "unbind": {"dim": 0},
}


def _view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Views along dims other than the last."""
    x, *given = args or (None,)
    defaults = _DIMS[func.__name__]
    dims = {**defaults, **dict(zip(defaults, given, strict=False)), **kwargs}.values()
    if isinstance(x, Logits) and x.rows is not None and func.__name__ != "flatten":
        return NotImplemented
    if not isinstance(x, Logits) or not all(-x.dim() <= dim < x.dim() for dim in dims):
        return NotImplemented
    if any(dim % x.dim() == x.dim() - 1 for dim in dims):
        return NotImplemented
    return _like(x, func(*args, **kwargs))


def _index(func: Any, args: Sequence[Any], _: dict[str, Any]) -> Any:
    """`x[...]` with numbers and slices of dims other than the last."""
    x, index = args
    parts = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, Logits) or not all(
        part is None or part is Ellipsis or type(part) in (int, slice) for part in parts
    ):
        return NotImplemented
    dims = sum(type(part) in (int, slice) for part in parts)
    if dims < x.dim():  # slices of all dims that are not named fill the place of the ellipsis
        parts = (*parts[parts.index(Ellipsis) + 1 :],) if Ellipsis in parts else ()
        parts = parts or (slice(None),)
    named = [part for part in parts if part is not Ellipsis]
    if x.rows is not None and (Ellipsis in parts or named[0] != slice(None)):
        return NotImplemented
    return _like(x, func(*args)) if named[-1] == slice(None) else NotImplemented


def _loss(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`F.cross_entropy` of positions [N] or one position; with more dims the classes are dim 1."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    x, targets = given.pop("input"), given.pop("target")
    options = {key: given.pop(key) for key in OPTIONS if key in given}
    other = any(value is not None for value in given.values())  # weight, and deprecated options
    good = isinstance(x, Logits) and type(targets) is Tensor and targets.dtype == torch.int64
    if other or not good or x.dim() > 2 or targets.shape != _shape(x)[:-1]:
        return NotImplemented
    return _own_loss(func, (x, targets), options)


def _own_loss(_: Any, args: Sequence[Any], options: dict[str, Any]) -> Tensor:
    """`sw.cross_entropy`: any dims, the vocabulary last (cross_entropy.py)."""
    x, targets = args
    if x.rows is not None:
        return _loss_of_own_rows(x, targets, options)
    loss, element_bytes = sharded_cross_entropy(x.local, (x.axis, x.cut), targets, **options)
    smoothing = options.get("label_smoothing", 0.0) > 0
    x.stream.record_loss(targets.numel(), smoothing, element_bytes)
    return loss


def _loss_of_own_rows(x: Logits, targets: Tensor, options: dict[str, Any]) -> Tensor:
    """The loss of this rank's rows: targets are gathered, and the losses of own positions taken."""
    assert x.rows is not None
    factor, how = _factor(x), {"reduction": "mean", "ignore_index": -100} | options
    everyone = x.rows.gather(targets, factor)
    alone = Logits.of(x.local, x.axis, x.cut, x.stream)
    losses = _own_loss(None, (alone, everyone), how | {"reduction": "none"})
    losses = x.rows.take(losses, factor)
    if how["reduction"] == "none":
        return losses
    total = losses.sum()
    counted = (targets != how["ignore_index"]).sum()
    return total / counted if how["reduction"] == "mean" else total


_NAMES: dict[Rule, str] = {
    _size: "size __len__ numel nelement",
    _same: """
        dim ndimension is_contiguous is_floating_point is_complex element_size get_device
        data_ptr storage_offset untyped_storage is_inference requires_grad_ retain_grad
        register_hook
        to type type_as float double half bfloat16 cpu cuda contiguous clone detach detach_
    """,
    _elementwise: """
        add sub subtract rsub mul multiply div divide true_divide neg negative pow __rdiv__ __rsub__
        tanh sigmoid exp abs square clamp clip masked_fill
        add_ sub_ mul_ multiply_ div_ divide_ neg_ pow_ tanh_ sigmoid_ exp_ abs_ clamp_ masked_fill_
        zero_
    """,
    _reshape: "view reshape",
    _view: " ".join(_DIMS),
    _index: "__getitem__",
    _loss: "cross_entropy",
}
_RULES: dict[Any, Rule] = {cross_entropy: _own_loss} | {
    getattr(owner, name): rule
    for rule, names in _NAMES.items()
    for name in names.split()
    for owner in (Tensor, torch, F)
    if callable(getattr(owner, name, None))
}
