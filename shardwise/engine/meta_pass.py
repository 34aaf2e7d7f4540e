"""One forward and one backward pass of the plain model on the meta device.

The pass computes no values and allocates no memory. It records the order in which modules are
called, what each call takes and returns, and which tensors a gradient reaches. Predictions are made
from this record (core/model_spec.py) and from the plan, before any rank starts.

A model whose forward reads values (`if x.max() > 0:`) cannot run on meta. It runs once on the given
batch instead, on the processor, and the record says so.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.comm.world import Axis
from shardwise.core.model_spec import Call, CutLoss, ModelPass, Value
from shardwise.core.uneven import Cut
from shardwise.parallel.data.hooks import tensors_in
from shardwise.parallel.tensor.logits import Logits

#: What a forward that reads values raises on meta.
UNKNOWN = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, AttributeError)


def run(
    twin: nn.Module,
    real: Callable[[], nn.Module],
    call: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    heads: Mapping[str, tuple[Axis, Cut]] | None = None,
) -> ModelPass:
    """The record of `call(twin, batch)`, a loss, and of its backward pass; `twin` is on meta.

    Where it cannot run there, the record of `call(real(), batch)`, for a copy that has values. Of
    the modules that `heads` names the logits stay cut over an axis: what a program does with them
    says whether they are gathered.
    """
    heads = heads or {}
    try:
        return _recorded(twin, call, batch, heads)
    except UNKNOWN as error:
        if any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves(batch)):
            raise
        found = _recorded(real(), call, batch, heads)
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        note = f"how often units are gathered depends on values of the batch (on meta: {why})"
        return found._replace(note=note)


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` with its parameters on meta: what is tied stays tied, frozen stays frozen.

    Buffers keep their values: what a forward reads of them it can read in the copy.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def with_saved(
    run: ModelPass,
    laid_out: nn.Module,
    call: Callable[[nn.Module, Any], Tensor],
    batch: Any,
) -> ModelPass:
    """`run` with what autograd keeps of a model on meta that is laid out on a tensor axis.

    A model that does not run on meta in that layout keeps what it does without one.
    """
    with suppress(*UNKNOWN):
        return run._replace(saved=_recorded(laid_out, call, batch, {}).saved)
    return run


def _recorded(
    model: nn.Module,
    call: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    heads: Mapping[str, tuple[Axis, Cut]],
) -> ModelPass:
    record = _Record([*model.parameters(), *model.buffers(), *tree_leaves(batch)])
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(record.watching(model, heads))
        stack.enter_context(saved_tensors_hooks(record.save, lambda x: x))
        stack.enter_context(_AsOnProcessor(record))
        stack.enter_context(_ToMeta())
        loss = call(model, batch)
        if loss.requires_grad:
            loss.sum().backward()
    return record.done()


class _Record:
    """What was seen so far. Tensors are kept alive, so that no other has the id of one."""

    def __init__(self, given: list[Any]) -> None:
        self.given = {_storage(x) for x in given if isinstance(x, Tensor)}
        self.kept: dict[int, tuple[str, int]] = {}  # by storage: where it was saved, and its bytes
        self.inside = [""]  # modules that are running, innermost last
        self.calls: list[Call] = []
        self.tensors: list[Tensor] = []
        self.numbers: dict[tuple[int, int], int] = {}
        self.returned: set[int] = set()  # values that a gradient reached
        self.tensors_kept: list[Tensor] = []
        self.losses: list[CutLoss] = []
        self.joins: list[Value] = []

    @contextmanager
    def watching(self, model: nn.Module, heads: Mapping[str, tuple[Axis, Cut]]) -> Iterator[None]:
        """Hooks on every module of the model for the time of a pass."""
        handles: list[Any] = []
        for name, module in model.named_modules():
            begin, end = partial(self._begin, name), partial(self._end, name)
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(end))
            if name in heads:
                handles.append(module.register_forward_hook(partial(self._cut, *heads[name])))
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
        saved: dict[str, int] = {}
        for name, stored_bytes in self.kept.values():
            saved[name] = saved.get(name, 0) + stored_bytes
        logits = tuple(self.losses), tuple(self.joins)
        return ModelPass(tuple(self.calls), values, tuple(saved.items()), *logits)

    def save(self, x: Tensor) -> Tensor:
        """Autograd keeps `x` for the backward pass."""
        storage = _storage(x)
        if not _in_backward() and storage not in self.given:
            self.kept.setdefault(storage, (self.inside[-1], x.untyped_storage().nbytes()))
            self.tensors_kept.append(x.detach())
        return x

    def _begin(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.inside.append(name)
        self.calls.append(Call(name, True, self._values((args, kwargs)), _in_backward()))

    def _end(self, name: str, _: nn.Module, __: Any, out: Any) -> None:
        self.inside.pop()
        self.calls.append(Call(name, False, self._values(out), _in_backward()))

    # --- logits that stay cut (parallel/tensor/logits.py) ---------------------------------------

    def _cut(self, axis: Axis, cut: Cut, _: nn.Module, __: Any, y: Tensor) -> Tensor:
        stream: Any = self  # it gathers logits and notes losses, as a stream does
        return Logits.of(y[..., : cut.size(axis.rank)], axis, cut, stream)

    def join(self, x: Tensor, cut: Cut) -> Tensor:
        """Logits are gathered."""
        widest = max(map(cut.size, range(cut.ranks)))
        shape = (*x.shape[:-1], cut.ranks * widest)
        self.joins.append(Value(shape, str(x.dtype).removeprefix("torch."), False))
        return functional.pad(x, (0, cut.whole - x.shape[-1]))

    def take(self, x: Tensor, cut: Cut) -> Tensor:
        """Gathered logits that were changed are cut again."""
        return x[..., : cut.size(0)]

    def lost(self, positions: int, smoothing: bool, element_bytes: int) -> None:
        """A cross-entropy of logits that stay cut."""
        self.losses.append(CutLoss(positions, smoothing, element_bytes))

    def _values(self, given: Any) -> tuple[int, ...]:
        return tuple(self._number(x) for x in tensors_in(given))

    def _number(self, x: Tensor) -> int:
        """A tensor that was changed in place is another value from then on."""
        key = id(x), x._version
        if key not in self.numbers:
            number = self.numbers[key] = len(self.tensors)
            self.tensors.append(x)
            if x.requires_grad:
                x.register_hook(lambda _: self.returned.add(number))
        return self.numbers[key]


class _ToMeta(TorchDispatchMode):
    """Operations on a tensor on meta take their other tensors there; all others are real.

    So what a model computes from the batch or from its buffers alone has values.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, kwargs))):
            args = tree_map_only(Tensor, _moved, args)
            kwargs = dict(
                zip(kwargs, tree_map_only(Tensor, _moved, [*kwargs.values()]), strict=True)
            )
        return func(*args, **kwargs)


class _AsOnProcessor(TorchFunctionMode):
    """What is asked of tensors on meta is answered as on a processor.

    Their device is "cpu", so that what a model makes from sizes alone (positions, masks) has values
    that it may look at. Attention keeps what a fused kernel keeps: no scores.
    """

    def __init__(self, record: "_Record") -> None:
        super().__init__()
        self.record = record

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.device.__get__:
            return torch.device("cpu")
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            out = func(*args, **kwargs)
        if out.requires_grad:
            named = [kwargs[name] for name in ("query", "key", "value") if name in kwargs]
            query, key, value = [*args[:3], *named]
            wide = torch.promote_types(query.dtype, torch.float32)
            sums = query.new_empty(query.shape[:-1], dtype=wide, device="meta")
            for x in (query, key, value, out, sums):
                self.record.save(x)
        return out


def _moved(x: Tensor) -> Tensor:
    return x.to("meta")


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
