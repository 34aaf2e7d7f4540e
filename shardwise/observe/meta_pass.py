"""Models on the meta device: copies of them, and what their tensors report and compute.

A pass computes no values and allocates no memory. A model whose forward reads values
(`if x.max() > 0:`) cannot run there.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.comm.parameter import attributes, meta_parameters
from shardwise.observe import work
from shardwise.observe.work import FusedAttention, Kernels, call_tensors

#: Errors that a forward that reads values raises on meta.
UNKNOWN = (RuntimeError, NotImplementedError, ValueError, TypeError, LookupError, AttributeError)


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy with parameters on meta, tied and frozen as before; buffers keep values."""
    return copy.deepcopy(model, _from_a_forward(model) | meta_parameters(model))


def value_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model, _from_a_forward(model))


def _from_a_forward(model: nn.Module) -> dict[int, Any]:
    return {id(x): x.detach() for x in attributes(model) if not x.is_leaf}


def template(model: nn.Module) -> nn.Module:
    """A `meta_copy` that is never run, and takes no memory: it has the model's buffers."""
    return copy.deepcopy(model, {id(x): x for x in attributes(model)} | meta_parameters(model))


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
    """Sizes, strides and dtype of each result; None if one has other memory than its own."""
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


class ToMeta(TorchDispatchMode):
    """Moves the other inputs of an operation on a meta tensor to meta; other operations are real.
    So tensors that a model computes only from the batch or from its buffers have values.  A write
    of a meta tensor to one with values is lost; with `strict` it raises RuntimeError.  `record` and
    `seen` get each operation and its result; `read` may say what an operation gives.
    """

    def __init__(self, record: Any = None, *, strict: bool = False, read: Any = None) -> None:
        super().__init__()
        self.record, self.strict, self.read = record, strict, read
        self.results = MetaResults()
        self.seen: Callable[[Any, Any, dict[str, Any], Any], None] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each operation goes through torch._dynamo, which takes long to import

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # of logits that autograd has saved
            out = None if self.record else self.results.at_once(func, args, kwargs)
            out = self._result(func, args, kwargs) if out is None else out
            if self.seen is not None:
                self.seen(func, args, kwargs, out)
        return out

    def _result(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        on_meta = {x.is_meta for x in work.call_tensors((*args, *kwargs.values()))}
        if True in on_meta:
            if self.strict and func._schema.is_mutable and not args[0].is_meta:
                raise RuntimeError(f"{func}: unknown values written to a known tensor")
            if self.read and (read := self.read(func, args, kwargs)) is not NotImplemented:
                return read
            if False in on_meta:
                args, kwargs = _all_moved(args), _all_moved(kwargs)
            if "device" in kwargs:  # x.to(y.device): the device that a tensor reports
                kwargs = kwargs | {"device": torch.device("meta")}
            out = self.results(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        if self.record is not None:
            self.record.operation(func, args, kwargs, out)
        return out


_DEVICE: Final[Any] = Tensor.device.__get__
_RECURRENT: Final = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_SEEN: Final = {
    _DEVICE,
    functional.scaled_dot_product_attention,
    *_RECURRENT,
    *work.ON_CUDA,
}


class AsOn(TorchFunctionMode):
    """Makes meta tensors report another device, and save what its kernels save (work.py).
    So tensors that a model computes only from sizes (positions, masks) have values that it may
    read, and attention saves no scores.  With `exact`, a function that keeps what its kernel
    decides (the LSTM of the CPU) raises NotImplementedError.
    """

    def __init__(
        self,
        record: Any,
        device: torch.device,
        kernels: Kernels,
        *,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.record, self.device, self.exact = record, device, exact
        self.kernels: Kernels = kernels

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _SEEN:  # most are looks at attributes
            return func(*args, **kwargs)
        if func == _DEVICE:
            return self.device
        if func in _RECURRENT:
            return self._recurrent(func, args)
        if func is not functional.scaled_dot_product_attention:
            found = work.fused_on(self.kernels, func, args, kwargs)
            return func(*args, **kwargs) if found is None else found
        named = [kwargs[name] for name in ("query", "key", "value") if name in kwargs]
        inputs = [*args[:3], *named]
        if not any(x.is_meta for x in inputs):  # a pass that computes values
            return func(*args, **kwargs)
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        drops = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
        how = work.attention_on(self.kernels, inputs, mask, drops, causal=causal)
        if how is None:  # torch compares the devices before it dispatches
            return func(*_all_moved(args), **_all_moved(kwargs))
        out = FusedAttention.apply(*inputs, mask, how)
        if self.record is not None:
            given = [*inputs, *([] if mask is None else [mask])]
            self.record.attention(given, out)
        return out

    def _recurrent(self, func: Any, args: Any) -> Any:
        """Torch compares the devices of input and states before it dispatches."""
        if not args[0].is_meta:
            return func(*args)
        if self.exact and func is torch.lstm:
            raise NotImplementedError("what torch.lstm keeps is decided by its kernel")
        with torch._C.DisableTorchFunction():
            return func(*_all_moved(args))


@contextmanager
def as_on(device: torch.device, record: Any = None, *, strict: bool = False) -> Iterator[None]:
    """Inside, a model on meta computes as on `device`; operations on real tensors are real."""
    with AsOn(record, device, "cpu"), ToMeta(record, strict=strict):
        yield


def _all_moved(values: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.to("meta"), values)
