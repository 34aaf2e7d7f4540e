"""Logits whose columns are not in one tensor: sharded over ranks, or computed tile by tile later.

    x.float(), x.view(-1, V), x[:, :-1]        stay logits
    tanh(x / c) * c                            of shards: computed on the shards, again Logits
    cross_entropy(x, targets)                  from a few numbers a position of each shard or tile
    softmax(x), x + bias, x.argmax(-1), x.sum(), print(x)    needs all columns; a plain tensor

`Columns` are the shards (tensor/sharded_logits.py) or the tiles (tile/tiled_logits.py).  An
operation that is not listed here joins the columns first, so it is always correct; the ledger shows
the all-gather of shards.

Logits of tiles carry the layer's input [..., D], to which views of the positions are applied.  The
first operation that joins the columns computes all of them, with the gradient mode that the layer
was called with.  From then on they are a plain tensor, and their views are views of it, earlier
ones too.
"""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.core.errors import bad
from shardwise.kernels.cross_entropy import OPTIONS, LossOptions, cross_entropy, reduced

Rule = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]


class Columns(Protocol):
    """The columns of logits: shards of ranks, or tiles that are not computed yet.

    whole     their number, the size of the vocabulary
    computed  whether tiles have been joined
    copy      the columns of a copy of the logits, cast if asked
    join      all columns [..., V] of a shard, or for the input of tiles
    take      this rank's shard of joined columns; None: these are the memory of the logits
    loss      the cross-entropy
    """

    @property
    def whole(self) -> int: ...
    @property
    def computed(self) -> bool: ...
    def copy(self, dtype: torch.dtype | None, /) -> "Columns": ...
    def join(self, local: Tensor, /) -> Tensor: ...
    def take(self, full: Tensor, /) -> Tensor | None: ...
    def loss(self, local: Tensor, targets: Tensor, /, **_: Unpack[LossOptions]) -> Tensor: ...


class LogitRows(NamedTuple):
    """Rows of several data ranks: the output layer has `all`, the loss of this rank its `own`.
    `gather(x, factor)` is all rows, from own ones; `take(x, factor)` own ones, from all.  `factor`
    is the number of entries in dim 0 for each row.
    """

    all: int
    own: int
    gather: Callable[[Tensor, int], Tensor]
    take: Callable[[Tensor, int], Tensor]


class Logits(Tensor):
    """Logits [..., V] with the columns of `columns`. Of shards this tensor is the rank's own shard
    [..., v]. Columns taken out (`x[..., 5]`, `x.T`) are a copy; writing to the logits (`x[..., 5] =
    0`) changes them. With `rows`, dim 0 of the shard has the rows of several data ranks; the logits
    are those of this rank's own rows. Of tiles it has no values: one NaN, expanded.
    """

    columns: Columns
    rows: LogitRows | None
    carried: Tensor | None  # of tiles: the layer's input
    again: Callable[[], Tensor] | None  # of views of tiles: the view of all columns
    made: Tensor | None  # of tiles: all columns
    records: bool  # of tiles: whether autograd recorded when the layer was called

    @staticmethod
    def of(local: Tensor, columns: Columns, rows: LogitRows | None = None) -> "Logits":
        """Logits whose shard on this rank is `local` [..., v]; nothing is copied."""
        out = local.as_subclass(Logits)
        out.columns, out.rows, out.carried = columns, rows, None
        return out

    @staticmethod
    def later(
        x: Tensor, columns: Columns, dtype: torch.dtype, *, trained: bool, records: bool = True
    ) -> "Logits":
        """Logits of tiles for the layer's input `x` [..., D]; nothing is computed.
        `trained`: they have a gradient. `records`: the logits that they are views of recorded.
        """
        shape = (*x.shape[:-1], columns.whole)
        records = records and torch.is_grad_enabled()
        with torch.set_grad_enabled(records):
            needed = x if x.requires_grad or not trained else x.new_zeros((), requires_grad=True)
            out = _Unread.apply(needed, shape, dtype).as_subclass(Logits)
        out.columns, out.rows, out.carried = columns, None, x
        out.again, out.made, out.records = None, None, records
        return out

    @property
    def local(self) -> Tensor:
        """This rank's shard, or the input of tiles: a plain tensor, not copied, differentiable."""
        if self.carried is not None:
            return self.carried
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @property
    def computed_from(self) -> Tensor:
        """The tensor whose views they are, and that hooks see (techniques/data/outputs.py)."""
        return self if self.carried is None else self.carried

    def full(self) -> Tensor:
        """All columns [..., V] as a plain tensor, equal on all ranks of an axis of shards."""
        if self.carried is None:
            whole = self.columns.join(self.local)
            return whole if self.rows is None else self.rows.take(whole, _factor(self))
        if self.made is None:
            with torch.set_grad_enabled(self.records):
                self.made = self.again() if self.again else self.columns.join(self.carried)
        return self.made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else kwargs.get("input")
        late = x if isinstance(x, Logits) and x.carried is not None else None
        if late is not None and late.columns.computed:
            return _joined(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            out = _RULES.get(func, _attribute)(func, args, kwargs)
        if out is NotImplemented:
            return _joined(func, args, kwargs)
        if late is not None:
            _remember(out, late, lambda: func(late.full(), *args[1:], **kwargs))
        return out


class _Unread(torch.autograd.Function):
    """Stands for logits in the graph: their shape, without values."""

    @staticmethod
    def forward(_: Any, x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """One NaN, as often as there are logits: an operation that reads it is seen."""
        return torch.full((), torch.nan, dtype=dtype, device=x.device).expand(shape)

    @staticmethod
    def backward(_: Any, __: Tensor) -> Tensor:
        """Refuse the gradient of what has read it."""
        raise bad(
            "a gradient for the logits of a tiled layer from a torch.autograd.Function",
            "functions of torch, which compute the logits when they read them",
            "logits.clone(), or a plan without tile for this layer",
        )


def _remember(out: Any, x: Logits, again: Callable[[], Any]) -> None:
    """Keep how views `out` of the logits of tiles are made from all columns."""
    if isinstance(out, tuple | list):
        for i, each in enumerate(out):
            _remember(each, x, lambda i=i: again()[i])
    elif isinstance(out, Logits) and out is not x and out.columns is x.columns:
        out.again = again


# --- on all columns --------------------------------------------------------------------------


def _joined(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call `func` with all columns of every Logits among its arguments, joined once each."""
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
            f"{func.__name__} into sharded logits, or those of tiles",
            "functions that return a new tensor, and methods that change one tensor in place",
            "logits.copy_(...)",
        )
    out = func(*gather(args), **gather(kwargs))
    if not isinstance(target, Logits):
        return out
    part, rows = target.columns.take(plain[id(target)]), target.rows
    if part is not None:
        with torch._C.DisableTorchFunctionSubclass():
            target.copy_(part if rows is None else rows.gather(part, _factor(target)))
    return target


#: Names of functions that change their first argument.
_IN_PLACE = re.compile(r"_?[a-z]\w*[a-z0-9]_|__setitem__|__i(?!n|ter)[a-z]+__")


# --- on shards, or on the input of tiles --------------------------------------------------------
# In a rule a Logits is the tensor of its shard.  NotImplemented: join the columns.


def _shape(x: Logits) -> torch.Size:
    dims = x.shape[:-1] if x.rows is None else (x.rows.own * _factor(x), *x.shape[1:-1])
    return torch.Size((*dims, x.columns.whole))


def _factor(x: Logits) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return x.shape[0] // max(1, x.rows.all) if x.rows is not None else 1


def _like(x: Logits, out: Any, dtype: torch.dtype | None = None) -> Any:
    """Tensors computed from the shard of `x`, or from its input of tiles, as Logits."""
    if isinstance(out, (tuple, list)):
        return type(out)(_like(x, item) for item in out)
    if not isinstance(out, Tensor) or out is x:
        return out
    if x.carried is None:
        return Logits.of(out, x.columns, x.rows)
    copied = dtype or out.untyped_storage()._cdata != x.local.untyped_storage()._cdata
    columns = x.columns.copy(dtype) if copied else x.columns
    own = {"trained": x.requires_grad, "records": x.records}
    return Logits.later(out, columns, dtype or x.dtype, **own)


#: Attributes that do not depend on the values.
DESCRIBED = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta")


def _attribute(func: Any, args: Sequence[Any], _: dict[str, Any]) -> Any:
    x, name = args[0] if args else None, getattr(getattr(func, "__self__", None), "__name__", "")
    if not isinstance(x, Logits) or (x.carried is not None and name not in DESCRIBED):
        return NotImplemented
    if func.__name__ == "__set__":
        return func(*args) if x.carried is None else NotImplemented
    if func.__name__ != "__get__" or name in ("T", "mT", "H", "mH", "_base", ""):
        return NotImplemented
    return _shape(x) if name == "shape" else _like(x, func(x))


def _size(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if not args or not isinstance(args[0], Logits):
        return NotImplemented
    shape = _shape(args[0])
    if func.__name__ in ("numel", "nelement"):
        return shape.numel()
    default = 0 if func.__name__ == "__len__" else None
    dim = args[1] if len(args) > 1 else kwargs.get("dim", default)
    return shape if dim is None else shape[dim]


def _described(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _same(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Copies, hooks, and properties of a shard."""
    x = args[0] if args else None
    if not isinstance(x, Logits) or x.carried is not None:
        return NotImplemented
    return _like(x, func(*args, **kwargs))


def _cast(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A cast; of tiles the first, for a second one would lose the rounding of the first."""
    x = args[0] if args else None
    if not isinstance(x, Logits) or x.carried is None:
        return _same(func, args, kwargs)
    if func.__name__ == "contiguous":
        base = func(x.carried, *args[1:], **kwargs)
        return x if base is x.carried else _like(x, base)
    probe = x.carried.new_empty(0, dtype=x.dtype)
    cast = func(probe, *args[1:], **kwargs)
    if cast is probe:
        return x
    again = x.dtype != x.carried.dtype
    if not isinstance(cast, Tensor) or cast.device != probe.device or again:
        return NotImplemented
    return _like(x, x.carried, cast.dtype)


def _elementwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    x = next(one for one in tensors if isinstance(one, Logits))
    if x.carried is not None:
        return NotImplemented
    others = [one for one in tensors if one is not x]
    elsewhere = "out" in kwargs or (func.__name__.endswith("_") and args[0] is not x)
    elsewhere = elsewhere or (x.rows is not None and any(one.dim() for one in others))
    if elsewhere or not all(map(_broadcasts, others)):
        return NotImplemented
    return _like(x, func(*args, **kwargs))


def _broadcasts(x: Tensor) -> bool:
    """Whether `x` has one value for all columns and no gradient, which ranks would not sum."""
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    return not isinstance(x, Logits) and not needs_grad and (x.dim() == 0 or x.shape[-1] == 1)


def _reshape(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, *sizes = args or (None,)
    if not isinstance(x, Logits):
        return NotImplemented
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = [*sizes[0]]
    if kwargs or not sizes or not all(type(size) is int for size in sizes):
        return NotImplemented
    numel, rest = _shape(x).numel(), math.prod(size for size in sizes if size != -1)
    if -1 in sizes and rest > 0:
        sizes[sizes.index(-1)] = numel // rest
    if sizes[-1] != x.columns.whole or math.prod(sizes) != numel or min(sizes) < 0:
        return NotImplemented
    if x.rows is not None:  # dim 0 of the shard has the other ranks' rows too
        rest = math.prod(sizes[1:-1]) * x.shape[-1]
        sizes[0] = x.numel() // max(1, rest)
        if len(sizes) < 2 or sizes[0] % max(1, x.rows.all):
            return NotImplemented
    base = x.computed_from
    apply = func if x.carried is None else torch.reshape  # logits are contiguous, inputs may not be
    return _like(x, apply(base, (*sizes[:-1], base.shape[-1])))


#: View functions, with the names and defaults of their dims.
_DIMS: dict[str, dict[str, int]] = {
    "flatten": {"start_dim": 0, "end_dim": -1},
    "transpose": {"dim0": -1, "dim1": -1},
    "unbind": {"dim": 0},
}


def _view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, *given = args or (None,)
    defaults = _DIMS[func.__name__]
    dims = {**defaults, **dict(zip(defaults, given, strict=False)), **kwargs}.values()
    if isinstance(x, Logits) and x.rows is not None and func.__name__ != "flatten":
        return NotImplemented
    if not isinstance(x, Logits) or not all(-x.dim() <= dim < x.dim() for dim in dims):
        return NotImplemented
    if any(dim % x.dim() == x.dim() - 1 for dim in dims):
        return NotImplemented
    return _like(x, func(x.computed_from, *given, **kwargs))


def _index(func: Any, args: Sequence[Any], _: dict[str, Any]) -> Any:
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
    return _like(x, func(x.computed_from, index)) if named[-1] == slice(None) else NotImplemented


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
    with torch.set_grad_enabled(torch.is_grad_enabled() and (x.carried is None or x.records)):
        return x.columns.loss(x.local, targets, **(OPTIONS | options))


def _loss_of_own_rows(x: Logits, targets: Tensor, options: dict[str, Any]) -> Tensor:
    assert x.rows is not None
    factor, how = _factor(x), OPTIONS | options
    everyone = x.rows.gather(targets, factor)
    alone = Logits.of(x.local, x.columns)
    losses = _own_loss(None, (alone, everyone), how | {"reduction": "none"})
    losses = x.rows.take(losses, factor)
    return reduced(losses, targets == how["ignore_index"], how["reduction"])


_NAMES: dict[Rule, str] = {
    _size: "size __len__ numel nelement",
    _described: """
        dim ndimension is_floating_point is_complex element_size get_device is_inference
    """,
    _same: """
        is_contiguous data_ptr storage_offset untyped_storage requires_grad_ retain_grad
        register_hook cpu cuda clone detach detach_
    """,
    _cast: "to type type_as float double half bfloat16 contiguous",
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
