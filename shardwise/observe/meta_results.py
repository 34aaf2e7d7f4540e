"""The results of operations on the meta device, each computed once for its arguments' shapes.

Many of torch's shape functions are Python programs, slower than all that a dry run does beside.
"""

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.observe.work import call_tensors

#: Arguments that are compared by value; of `bool` and `int` by type too.
_PLAIN: Final = (
    *(type(None), bool, int, float, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class MetaResults:
    """The results of operations that make new tensors and change none."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What func(*args, **kwargs) returns, where all tensors are on meta."""
        key = _key_of(func, args, kwargs)
        if key is None or self.known.get(key, ()) is None:
            return func(*args, **kwargs)
        if key not in self.known:
            out = func(*args, **kwargs)
            inputs = {x.untyped_storage()._cdata for x in call_tensors((args, kwargs))}
            self.known[key] = _shape(out, inputs)
            return out
        return _made(self.known[key])

    def at_once(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The known result, if all tensors are on meta; else None."""
        found = self.known.get(_key_of(func, args, kwargs))
        return None if found is None else _made(found)


def _key_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return known_by(func, args, kwargs) if _is_pure(func) else None


def known_by(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A key of the operation and its arguments' shapes; None if it depends on more."""
    try:
        return func, _key(args), _key(tuple(kwargs.items()))
    except TypeError:  # an argument that is not known by its value
        return None


@cache
def _is_pure(func: Any) -> bool:
    schema = func._schema
    return not schema.is_mutable and all(each.alias_info is None for each in schema.returns)


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, tuple | list):
        return tuple(map(_key, value))
    if isinstance(value, _PLAIN):
        return type(value), value
    raise TypeError


def _shape(out: Any, inputs: set[int]) -> Any:
    """Sizes, strides and dtype of each result.
    None if one is in the memory of an input, or in more memory than it needs.
    """
    if isinstance(out, tuple | list):
        found = [_shape(x, inputs) for x in out]
        return None if None in found else found
    if not isinstance(out, Tensor) or out.layout is not torch.strided or not out.is_meta:
        return None
    own = out.untyped_storage()
    like = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
    if own._cdata in inputs or own.nbytes() != like.untyped_storage().nbytes():
        return None
    return tuple(out.shape), out.stride(), out.dtype


def _made(shape: Any) -> Any:
    if isinstance(shape, list):
        return tuple(map(_made, shape))
    size, stride, dtype = shape
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")
