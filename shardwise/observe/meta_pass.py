"""Models on the meta device: copies of them, and what their tensors report and compute.

A pass computes no values and allocates no memory. A model whose forward reads values
(`if x.max() > 0:`) cannot run there.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.comm.parameter import attributes, meta_parameters
from shardwise.observe import work
from shardwise.observe.meta_results import MetaResults
from shardwise.observe.work import FusedAttention, Kernels

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


class PassRecorder(Protocol):
    """Records the operations of a pass, to derive a table."""

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None: ...

    def attention(self, inputs: Sequence[Tensor], out: Tensor, /) -> None:
        """A fused attention on the meta device of query, key, value and perhaps a mask."""


class ToMeta(TorchDispatchMode):
    """Moves the other inputs of an operation on a meta tensor to meta; other operations are real.
    So tensors that a model computes only from the batch or from its buffers have values.  A write
    of a meta tensor to one with values is lost; with `strict` it raises RuntimeError.  `read` may
    say what an operation gives (dry_engine.py).  `seen` gets each operation and its result.
    """

    def __init__(
        self, record: PassRecorder | None = None, *, strict: bool = False, read: Any = None
    ) -> None:
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
        record: PassRecorder | None,
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
def as_on(
    device: torch.device,
    record: PassRecorder | None = None,
    *,
    strict: bool = False,
    kernels: Kernels = "cpu",
) -> Iterator[None]:
    """Inside, a model on meta computes as on `device`; operations on real tensors are real."""
    with AsOn(record, device, kernels), ToMeta(record, strict=strict):
        yield


def _all_moved(values: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.to("meta"), values)
