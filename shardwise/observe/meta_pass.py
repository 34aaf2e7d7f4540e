"""One forward and one backward pass of the plain model on the meta device.

The pass computes no values and allocates no memory. It records the order in which modules are
called, what each call takes and returns, and which tensors a gradient reaches. Predictions are made
from this record (core/model_spec.py) and from the plan, before any rank starts.

A model whose forward reads values (`if x.max() > 0:`) cannot run on meta. It runs once on the CPU
with the real batch instead, and the `note` of the record says so.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.comm.parameter import attributes, meta_parameters
from shardwise.comm.unchanged import kept_values
from shardwise.core.errors import InputError
from shardwise.core.model_spec import Call, ModelPass, Value
from shardwise.core.tools.tree import leaves
from shardwise.observe import work
from shardwise.observe.meta_results import MetaResults
from shardwise.observe.recorded_tape import TapeRecorder, attention_flops
from shardwise.observe.work import FusedAttention, Kernels, WorkRecorder, in_backward
from shardwise.techniques.data.outputs import tensors_in

#: Changes a model during a pass; the argument records what the change sends.
Around = Callable[[nn.Module, Callable[[Any], None]], AbstractContextManager[None]]
#: Errors that a forward that reads values raises on meta.
UNKNOWN = (RuntimeError, NotImplementedError, ValueError, TypeError, LookupError, AttributeError)


def run(
    twin: nn.Module,
    real: Callable[[], nn.Module],
    call: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    around: Around | None = None,
    *,
    kernels: Kernels = "cpu",
) -> ModelPass:
    """The record of `call(twin, batch)`, a loss, and of its backward pass; `twin` is on meta.
    If it cannot run there, the record of `call(real(), batch)`, with a copy that has values.
    `around` computes a rank's positions.
    """
    try:
        return _recorded(twin, call, batch, around, kernels)
    except UNKNOWN as error:
        if any(x.is_meta for x in leaves(batch, Tensor, objects=True)):
            raise
        try:
            found = _recorded(real(), call, batch, around, kernels)
        except InputError as again:
            raise (error if isinstance(error, InputError) else again) from None
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        note = f"the number of gathers of units depends on values of the batch (on meta: {why})"
        return found._replace(note=note)


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


def with_tape(
    run: ModelPass,
    laid_out: nn.Module,
    call: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    around: Around | None = None,
    *,
    kernels: Kernels = "cpu",
) -> ModelPass:
    """`run` with tape and rows of a sharded model on meta; unchanged if that does not run."""
    with suppress(*UNKNOWN):
        own = _recorded(laid_out, call, batch, around, kernels)
        return run._replace(tape=own.tape, rows=own.rows)
    return run


def _recorded(
    model: nn.Module,
    call: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    around: Around | None,
    kernels: Kernels,
) -> ModelPass:
    record = _Record([*model.parameters(), *model.buffers(), *leaves(batch, Tensor, objects=True)])
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(kept_values(batch))
        if "torch._dynamo" in sys.modules:  # otherwise no module is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(record.watching(model))
        stack.enter_context(saved_tensors_hooks(record.save, lambda x: x))
        stack.enter_context(as_on(torch.device("cpu"), record, kernels=kernels))
        stack.enter_context(around(model, record.rows.append) if around else nullcontext())
        loss = call(model, batch)
        if loss.requires_grad:
            loss.sum().backward()
    names = {id(p): name for name, p in model.named_parameters()}
    unused = {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
    model.zero_grad()
    reads = tuple((calls, names[key]) for calls, key in record.reads if key in names)
    return record.done()._replace(unused=frozenset(unused), reads=reads)


class _Record:
    """The record so far. It keeps tensors alive, so that no new tensor gets the id of one."""

    def __init__(self, inputs: list[Any]) -> None:
        self.tape, self.work = TapeRecorder(inputs), WorkRecorder()
        self.inside = [""]  # modules that are running, innermost last
        self.graded = ""  # the module whose backward pass is running
        self.begun: list[int] = []  # the calls of these modules
        self.calls: list[Call] = []
        self.tensors: list[Tensor] = []
        self.numbers: dict[tuple[int, int], int] = {}
        self.returned: set[int] = set()  # values that a gradient reached
        self.rows: list[Any] = []
        self.reads: dict[tuple[int, int], None] = {}  # the same, at each use of a tensor
        self.given: set[int] = set()  # what a module returned: its unit stays, or it is a copy

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Set hooks on every module of the model during a pass."""
        handles: list[Any] = []
        for name, module in model.named_modules():
            begin, end = partial(self._begin, name), partial(self._end, name)
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_pre_hook(self._receive, with_kwargs=True))
            handles.append(module.register_forward_hook(end))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def done(self) -> ModelPass:
        """The record as a value."""
        values = tuple(
            Value(tuple(x.shape), str(x.dtype).removeprefix("torch."), n in self.returned)
            for n, x in enumerate(self.tensors)
        )
        tape = self.tape.done()._replace(operations=tuple(self.work.operations))
        found = ModelPass(tuple(self.calls), values, tape, tuple(self.rows))
        self.tensors.clear()  # their hooks refer to this record
        return found

    def save(self, x: Tensor) -> Tensor:
        if not in_backward():
            self.tape.save(x, self.inside[-1])
        return x

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """An operation below autograd."""
        if in_backward():
            self.work.operation(func, (args, kwargs), out, self.graded, backward=True)
            return
        read = (id(x) for x in work.call_tensors((args, kwargs)) if id(x) not in self.given)
        self.reads |= {(len(self.calls), x): None for x in read}
        module, before = self.inside[-1], len(self.tape.products)
        self.tape.operation(module, func, args, kwargs, out)
        product = before if len(self.tape.products) > before else -1
        self.work.operation(
            func,
            (args, kwargs),
            out,
            module,
            backward=False,
            saves=self.tape.saves,
            product=product,
        )

    def attention(
        self, inputs: Sequence[Tensor], out: Tensor, saves: int, *, causal: bool = False
    ) -> None:
        """Record a fused attention with output `out`, before which autograd had saved `saves`."""
        if in_backward():
            return
        module, product = self.inside[-1], len(self.tape.products)
        query, key, value = inputs[:3]
        self.tape.attention(module, (query, key, value), out, saves)
        flops = attention_flops(query, key, value)
        self.work.attention(inputs, out, module, flops, causal=causal, saves=saves, product=product)

    def kernel(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        if not in_backward():
            self.work.kernel(inputs, out, self.inside[-1], self.tape.saves)

    def _begin(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.inside.append(name)
        if not in_backward():
            self.tape.take(name, tensors_in((args, kwargs)))
        self.begun.append(len(self.calls))
        outer = self.inside[-2]
        values, recorded = self._values((args, kwargs), outer), torch.is_grad_enabled()
        self.calls.append(Call(name, True, values, in_backward(), recorded))

    def _receive(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """The inputs after the module's own hooks, which may have changed them."""
        call = self.begun[-1]
        values = self._values((args, kwargs), self.inside[-1])
        self.calls[call] = self.calls[call]._replace(values=values)

    def _end(self, name: str, _: nn.Module, __: Any, out: Any) -> None:
        self.inside.pop()
        self.begun.pop()
        self.given |= {id(x) for x in tensors_in(out)}
        if not in_backward():
            self.tape.give(name, tensors_in(out))
        self.calls.append(Call(name, False, self._values(out, name), in_backward()))

    def _values(self, inputs: Any, module: str) -> tuple[int, ...]:
        return tuple(self._number(x, module) for x in tensors_in(inputs))

    def _number(self, x: Tensor, module: str) -> int:
        """The number of a value that `module` computed; an in-place change makes a new value."""
        key = id(x), x._version
        if key not in self.numbers:
            number = self.numbers[key] = len(self.tensors)
            self.tensors.append(x)
            if x.requires_grad:
                x.register_hook(partial(self._reached, number, module))
        return self.numbers[key]

    def _reached(self, number: int, module: str, _: Tensor) -> None:
        """A gradient reaches a value that `module` computed: its backward pass follows."""
        self.returned.add(number)
        self.graded = module


class PassRecorder(Protocol):
    """Records the operations of a pass, for predictions or to derive a table."""

    @property
    def tape(self) -> Any:
        """Its `saves` counts the tensors that autograd has saved."""

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None: ...

    def attention(
        self, inputs: Sequence[Tensor], out: Tensor, saves: int, /, *, causal: bool = False
    ) -> None:
        """A fused attention on the meta device of query, key, value and perhaps a mask."""

    def kernel(self, inputs: Sequence[Tensor], out: Tensor, /) -> None:
        """An element-wise function that one kernel computes (work.py)."""


class ToMeta(TorchDispatchMode):
    """Moves the other inputs of an operation on a meta tensor to meta; other operations are real.
    So tensors that a model computes only from the batch or from its buffers have values.  A write
    of a meta tensor to one with values is lost; with `strict` it raises RuntimeError.  `read` may
    say what an operation gives (dry_engine.py).
    """

    def __init__(
        self, record: PassRecorder | None = None, *, strict: bool = False, read: Any = None
    ) -> None:
        super().__init__()
        self.record, self.strict, self.read = record, strict, read
        self.results = MetaResults()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each operation goes through torch._dynamo, which takes long to import

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # of logits that autograd has saved
            if self.record is None:
                known = self.results.at_once(func, args, kwargs)
                if known is not None:
                    return known
            on_meta = {x.is_meta for x in work.call_tensors((args, kwargs))}
            if True in on_meta:
                if self.strict and func._schema.is_mutable and not args[0].is_meta:
                    raise RuntimeError(f"{func}: unknown values written to a known tensor")
                if self.read and (read := self.read(func, args, kwargs)) is not NotImplemented:
                    return read
                if False in on_meta:
                    args = tree_map_only(Tensor, _moved, args)
                    kwargs = {k: tree_map_only(Tensor, _moved, x) for k, x in kwargs.items()}
                if "device" in kwargs:  # x.to(y.device): the device that a tensor reports
                    kwargs = kwargs | {"device": torch.device("meta")}
                out = self.results(func, args, kwargs)
            else:
                out = func(*args, **kwargs)
            if self.record is not None:
                self.record.operation(func, args, kwargs, out)
        return out


_DEVICE: Final[Any] = Tensor.device.__get__
_SEEN: Final = {_DEVICE, functional.scaled_dot_product_attention, *work.ON_CUDA}


class AsOn(TorchFunctionMode):
    """Makes meta tensors report another device, and save what its kernels save (work.py).
    So tensors that a model computes only from sizes (positions, masks) have values that it may
    read, and attention saves no scores.
    """

    def __init__(self, record: PassRecorder | None, device: torch.device, kernels: Kernels) -> None:
        super().__init__()
        self.record, self.device = record, device
        self.kernels: Kernels = kernels

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _SEEN:  # most are looks at attributes
            return func(*args, **kwargs)
        if func == _DEVICE:
            return self.device
        if func is not functional.scaled_dot_product_attention:
            found = work.fused_on(self.kernels, func, args, kwargs)
            if found is not None and self.record is not None:
                given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
                self.record.kernel(given, found)
            return func(*args, **kwargs) if found is None else found
        named = [kwargs[name] for name in ("query", "key", "value") if name in kwargs]
        inputs = [*args[:3], *named]
        if not inputs[0].is_meta:  # a pass that computes values
            return func(*args, **kwargs)
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        drops = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
        how = work.attention_on(self.kernels, inputs, mask, drops)
        if how is None:
            return func(*args, **kwargs)
        saves = 0 if self.record is None else self.record.tape.saves
        out = FusedAttention.apply(*inputs, mask, how)
        if self.record is not None:
            given = [*inputs, *([] if mask is None else [mask])]
            self.record.attention(given, out, saves, causal=causal)
        return out


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


def _moved(x: Tensor) -> Tensor:
    return x.to("meta")
