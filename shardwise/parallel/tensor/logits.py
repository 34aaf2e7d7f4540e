"""Logits that stay sharded over the vocabulary.

    rank 0 holds x[..., 0..3], rank 1 x[..., 4..7]           x.shape is [..., 8] on both
    x.float(), x.view(-1, 8), x[:, :-1], tanh(x / c) * c     on the columns: logits again
    cross_entropy(x, targets)                                three numbers a position are summed
    softmax(x), x + bias, x.argmax(-1), x.sum(), print(x)    on the whole, gathered for it: plain

A model with a cut output layer returns them, and what a program does with logits goes on as it
was.  What is not known here to leave columns apart is done on the whole: always right, and seen in
the ledger as an all-gather.
"""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

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


class Logits(Tensor):
    """Logits [..., V] of which this rank holds the columns that `cut` gives it: S(-1) on `axis`.

    Made by `Logits.of`.  `local` are the columns, whose gradient is that of this rank's columns;
    `whole()` is all of it, I on the axis.  One thing is other than of a plain tensor: a part of the
    vocabulary taken out (`x[..., 5]`, `x.T`) is a copy, so that writing to it does not change the
    logits.  Writing to the logits (`x[..., 5] = 0`) does.
    """

    axis: Axis
    cut: Cut
    stream: Stream

    @staticmethod
    def of(local: Tensor, axis: Axis, cut: Cut, stream: Stream | None = None) -> "Logits":
        """The logits of which `local` [..., v] are this rank's columns by `cut`; nothing is copied.

        `stream` gathers them and notes each loss.

        Raises:
            InputError: `local` has not as many columns as this rank holds.
        """
        columns = cut.size(axis.rank)
        if local.shape[-1] != columns:
            raise bad(
                f"logits with {local.shape[-1]} columns on rank {axis.rank} of axis {axis.name}",
                f"the {columns} columns of {cut.whole} that this rank holds",
                "the loss of whole logits as torch.nn.functional.cross_entropy(logits, targets)",
            )
        return _made(local, axis, cut, stream or Stream(axis, split=False, products=BY_TORCH))

    @property
    def local(self) -> Tensor:
        """This rank's columns [..., v], plain; no copy, and autograd follows."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def whole(self) -> Tensor:
        """All columns [..., V], plain and the same on every rank: an all-gather."""
        return self.stream.join(self.local, self.cut)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            out = _RULES.get(func, _attribute)(func, args, kwargs)
        return _on_whole(func, args, kwargs) if out is NotImplemented else out


# --- on the whole ----------------------------------------------------------------------------


def _on_whole(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Gather every Logits among the arguments, each once, and go on with plain tensors."""
    found: dict[int, Tensor] = {}

    def gathered(x: Any) -> Any:
        """`x` with the whole in the place of every Logits in it."""
        if isinstance(x, Logits):
            if id(x) not in found:
                found[id(x)] = x.whole()
            return found[id(x)]
        if isinstance(x, (tuple, list)):
            made = [gathered(one) for one in x]
            return type(x)(*made) if hasattr(x, "_fields") else type(x)(made)
        return {k: gathered(v) for k, v in x.items()} if type(x) is dict else x

    in_place = _in_place(func.__name__, kwargs)
    changed = args[0] if args and in_place else None
    if isinstance(kwargs.get("out"), Logits) or (in_place and not isinstance(changed, Tensor)):
        raise bad(
            f"{func.__name__} into logits that are cut over the vocabulary",
            "functions that return a new tensor, and methods that change one tensor in place",
            "logits.copy_(...)",
        )
    out = func(*gathered(args), **gathered(kwargs))
    return _write_back(changed, found[id(changed)]) if isinstance(changed, Logits) else out


def _in_place(name: str, kwargs: dict[str, Any]) -> bool:
    ours = re.fullmatch(r"_?[a-z]\w*[a-z0-9]_|__setitem__|__i(?!n|ter)[a-z]+__", name)
    return ours is not None or kwargs.get("inplace") is True


def _write_back(x: Logits, whole: Tensor) -> Logits:
    """The whole of `x` was changed: change this rank's columns."""
    with torch._C.DisableTorchFunctionSubclass():
        if whole.shape != _shape(x):
            raise bad(
                f"logits of shape {tuple(_shape(x))} given the shape {tuple(whole.shape)} in place",
                "changes of values in place",
                "the function that returns a new tensor",
            )
        if x.axis.size > 1:  # else it is the same memory
            x.copy_(x.stream.take(whole, x.cut))
    return x


# --- on the columns --------------------------------------------------------------------------
# Rules: inside them a Logits is the tensor of its columns, and NotImplemented means: on the whole.


def _shape(x: Logits) -> torch.Size:
    return torch.Size((*x.shape[:-1], x.cut.whole))


def _made(x: Tensor, axis: Axis, cut: Cut, stream: Stream) -> Logits:
    out = x.as_subclass(Logits)
    out.axis, out.cut, out.stream = axis, cut, stream
    return out


def _like(x: Logits, out: Any) -> Any:
    """What was made of the columns of `x`, as logits again."""
    if isinstance(out, (tuple, list)):
        return type(out)(_like(x, one) for one in out)
    if not isinstance(out, Tensor) or out is x:
        return out
    return _made(out, x.axis, x.cut, x.stream)


def _attribute(func: Any, args: Sequence[Any], _: dict[str, Any]) -> Any:
    """What is read of logits or written to them; every other function is not ours."""
    if func.__name__ not in ("__get__", "__set__"):
        return NotImplemented
    x, name = args[0], getattr(func.__self__, "__name__", "")
    if func.__name__ == "__set__":
        if name != "requires_grad" and args[1] is not None:
            raise bad(f"logits.{name} = ...", "values changed in place", "logits.copy_(...)")
        return func(*args)
    match name:
        case "shape":
            return _shape(x)
        case "nbytes":
            return _shape(x).numel() * x.element_size()
        case "T" | "mT" | "H" | "mH" | "_base" | "":
            return NotImplemented
        case _:
            return _like(x, func(x))


def _size(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if not args or not isinstance(args[0], Logits):
        return NotImplemented
    shape = _shape(args[0])
    if func.__name__ in ("numel", "nelement"):
        return shape.numel()
    dim = 0 if func.__name__ == "__len__" else _second(args, kwargs, "dim")
    return shape if dim is None else shape[dim]


def _second(args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
    return args[1] if len(args) > 1 else kwargs.get(name)


def _as_it_is(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Casts, copies, and what is told of a tensor apart from its values."""
    x = args[0] if args else None
    return _like(x, func(*args, **kwargs)) if isinstance(x, Logits) else NotImplemented


def _elementwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """With numbers, or with tensors that are the same for all columns of a position."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    x = next(one for one in given if isinstance(one, Logits))
    others = [one for one in given if one is not x]
    elsewhere = "out" in kwargs or (func.__name__.endswith("_") and args[0] is not x)
    if elsewhere or not all(map(_alike, others)):
        return NotImplemented
    return _like(x, func(*args, **kwargs))


def _alike(x: Any) -> bool:
    """Whether every column meets the same number, of which no gradient is asked.

    Each rank would have that of its own columns only.
    """
    if not isinstance(x, Tensor):
        return not isinstance(x, (tuple, list))
    asked = x.requires_grad and torch.is_grad_enabled()
    return not isinstance(x, Logits) and not asked and (x.dim() == 0 or x.shape[-1] == 1)


def _reshape(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """To any shape whose last dim is the vocabulary: positions are counted, columns kept."""
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
    return _like(x, func(x, (*sizes[:-1], x.shape[-1])))


#: function -> place, name and default of its arguments that are dims
_DIMS: dict[str, tuple[tuple[int, str, int | None], ...]] = {
    "flatten": ((1, "start_dim", 0), (2, "end_dim", -1)),
    "transpose": ((1, "dim0", None), (2, "dim1", None)),
    "select": ((1, "dim", None),),
    "narrow": ((1, "dim", None),),
    "unbind": ((1, "dim", 0),),
}


def _along(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Along dims none of which is the last."""
    x = args[0] if args else None
    if not isinstance(x, Logits):
        return NotImplemented
    for place, name, default in _DIMS[func.__name__]:
        dim = args[place] if len(args) > place else kwargs.get(name, default)
        if type(dim) is not int or not -x.dim() <= dim < x.dim() or dim % x.dim() == x.dim() - 1:
            return NotImplemented
    return _like(x, func(*args, **kwargs))


def _index(func: Any, args: Sequence[Any], _: dict[str, Any]) -> Any:
    """Positions taken, or given one number for all columns."""
    x, index, *value = args
    if isinstance(x, Logits) and _keeps_columns(index, x.dim()) and all(map(_alike, value)):
        return _like(x, func(*args))
    return NotImplemented


def _keeps_columns(index: Any, dims: int) -> bool:
    """Whether indexing a tensor of so many dims leaves its last dim as it is, and last."""
    parts = list(index) if isinstance(index, tuple) else [index]
    used = [_dims_used(part) for part in parts]
    left = dims - sum(used)
    if left < 0 or -1 in used:
        return False
    gap = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[gap : gap + 1] = [slice(None)] * left
    last = parts[-1]
    return isinstance(last, slice) and last == slice(None)


def _dims_used(part: Any) -> int:
    """How many dims one part of an index takes; -1 for what is not known here."""
    if part is None or part is Ellipsis:
        return 0
    if isinstance(part, Tensor) and not isinstance(part, Logits):
        return {torch.bool: part.dim(), torch.int64: 1, torch.int32: 1}.get(part.dtype, -1)
    return 1 if isinstance(part, slice) or type(part) is int else -1


def _loss(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Torch's, of positions [N] or of one; of more dims, torch takes the classes to be dim 1."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    x, targets = given.pop("input"), given.pop("target")
    words = {key: given.pop(key) for key in OPTIONS if key in given}
    other = any(value is not None for value in given.values())  # weight, and deprecated words
    good = isinstance(x, Logits) and type(targets) is Tensor and targets.dtype == torch.int64
    if other or not good or x.dim() > 2 or targets.shape != x.shape[:-1]:
        return NotImplemented
    return _own_loss(func, (x, targets), words)


def _own_loss(_: Any, args: Sequence[Any], words: dict[str, Any]) -> Tensor:
    """Of any dims, the vocabulary last (cross_entropy.py)."""
    x, targets = args
    loss, element_bytes = sharded_cross_entropy(x.local, (x.axis, x.cut), targets, **words)
    smoothing = words.get("label_smoothing", 0.0) > 0
    x.stream.lost(targets.numel(), smoothing, element_bytes)
    return loss


_NAMES: dict[Rule, str] = {
    _size: "size __len__ numel nelement",
    _as_it_is: """
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
    _along: " ".join(_DIMS),
    _index: "__getitem__ __setitem__",
    _loss: "cross_entropy",
}
_RULES: dict[Any, Rule] = {cross_entropy: _own_loss} | {
    getattr(owner, name): rule
    for rule, names in _NAMES.items()
    for name in names.split()
    for owner in (Tensor, torch, F)
    if callable(getattr(owner, name, None))
}
