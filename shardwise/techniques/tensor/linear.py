"""Tensor parallelism of linear layers: column-parallel, then row-parallel.

    x ----> [ columns ] ----> gelu ----> [ rows ] ----> y          W1 sharded by output, W2 by input
      I -> R          S(-1)        S(-1)          P -> I           forward: one all-reduce
      P -> I          S(-1)        S(-1)          I -> R           backward: one all-reduce

    x ----> [ columns ] ----> gelu ----> [ rows ] ----> y          under sequence parallelism
      S(T) -> R       S(-1)        S(-1)          P -> S(T)        all-gather, reduce-scatter
      P -> S(T)       S(-1)        S(-1)          S(T) -> R        reduce-scatter, all-gather

`Stream` moves tensors between the layers and the residual stream, which is the same on every rank
(I), or sharded along the sequence (S(T), where T is the second to last dim). Column-parallel layers
with the same input x (queries, keys, values; gate and up) share an `InputGradient`: x is gathered
once, and the gradients of x are added locally, then summed once.

Modules keep their class, names and forward. Hooks move their inputs and outputs, before the user's
own hooks. (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3; Korthikanti et al., arXiv
2205.05198, section 4.2.2.)
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.comm.move import (
    all_gather_along,
    begin_reduce_scatter,
    join,
    move,
    reduce_scatter,
    start,
    take,
)
from shardwise.comm.torch_links import once
from shardwise.comm.transport import Pending
from shardwise.comm.world import Axis
from shardwise.core.layouts.layout import I, P, Placement, R, S
from shardwise.core.layouts.uneven import Cut, Lengths


class Stream:
    """The residual stream on the tensor axis; `split`: it is sharded along the sequence."""

    def __init__(self, axis: Axis, split: bool) -> None:
        self.axis, self.split = axis, split
        self.lengths = Lengths(axis.size)  # of the sequences, if they are sharded
        self.slot: _Entered | None = None  # the last entered tensor

    def enter(self, x: Tensor) -> tuple[Tensor, "InputGradient"]:
        """`x` of the stream as the input of column-parallel layers, moved once for all of them."""
        version = _version(x)
        if self.slot is None or self.slot.x is not x or self.slot.version != version:
            entry = InputGradient(self, x.shape[-2] if self.split else 0)
            self.slot = _Entered(x, version, _Enter.apply(x, entry), entry)
        return self.slot.moved, self.slot.entry

    def leave(self, y: Tensor, fresh: bool = True) -> Tensor:
        """The sum over ranks of a partial `y`, overwritten if its layer read it last (`fresh`)."""
        self.slot = None
        if not self.split:
            return self.sum(y, fresh)
        return _Leave.apply(self._padded(y), self.axis)

    def sum(self, y: Tensor, fresh: bool = True) -> Tensor:
        return _Sum.apply(y, self.axis) if fresh else move(y, self.axis, P, I)

    def gather(self, x: Tensor) -> Tensor:
        """`x` gathered along the sequence, to be used differently by the ranks (R)."""
        return self._whole(x, R)

    def spread(self, x: Tensor) -> Tensor:
        """`x`, equal on all ranks, to be used differently by the ranks (I -> R)."""
        return move(x, self.axis, I, R)

    def unsplit(self, x: Tensor) -> Tensor:
        """`x` gathered along the sequence, to be used in the same way by all ranks (I)."""
        return self._whole(x, I)

    def _whole(self, x: Tensor, dst: Placement) -> Tensor:
        if not self.split:
            return x
        dim = x.dim() - 2
        length = self.lengths.full(x.shape[dim])
        return _first(move(x, self.axis, S(dim), dst), dim, length)

    def scatter(self, x: Tensor) -> Tensor:
        """This rank's shard of the sequence of `x`, which is equal on all ranks."""
        if not self.split:
            return x
        return move(self._padded(x), self.axis, I, S(x.dim() - 2))

    def join(self, x: Tensor, cut: Cut) -> Tensor:
        return join(x, self.axis, cut.on(x.dim() - 1))

    def take(self, x: Tensor, cut: Cut) -> Tensor:
        return take(x, self.axis, cut.on(x.dim() - 1))

    def begin(self, known: Mapping[int, int] | None = None) -> None:
        """Begin a pass; `known`: the lengths of sequences that other stages sharded."""
        self.lengths.known = dict(known or {})

    def _padded(self, x: Tensor) -> Tensor:
        return _padded(x, self.lengths.shard(x.shape[-2]) * self.axis.size)


class _Entered(NamedTuple):
    """An entered tensor, its version (in-place changes increase it), and its readers' input."""

    x: Tensor
    version: tuple[int, bool]
    moved: Tensor
    entry: "InputGradient"


def _version(x: Tensor) -> tuple[int, bool]:
    return 0 if x.is_inference() else x._version, torch.is_grad_enabled()


def _first(x: Tensor, dim: int, length: int) -> Tensor:
    # contiguous now, since otherwise each reader would store a copy of its own
    return x if x.shape[dim] == length else x.narrow(dim, 0, length).contiguous()


def _padded(x: Tensor, length: int) -> Tensor:
    short = length - x.shape[-2]
    return functional.pad(x, (0, 0, 0, short)) if short else x


class InputGradient:
    """The gradient of one input: the sum over its readers, then over the ranks."""

    def __init__(self, stream: Stream, shard: int) -> None:
        self.stream, self.shard = stream, shard
        self.readers = self.waiting = self.turn = 0
        self.mixed = False  # whether some reader does not use `add`
        self.grad: Tensor | None = None
        self.pending: Pending[Tensor] | None = None  # the sum over the ranks

    def read(self) -> None:
        self.readers += 1
        self.waiting += 1

    def line_up(self, y: Tensor) -> None:
        """Order the backward of a reader's output `y` after the input gradients of all readers: the
        ready node of the highest sequence number runs first, so all get the first reader's.
        """
        node: Any = y.grad_fn
        if node is not None:
            self.turn = self.turn or node._sequence_nr()
            node._set_sequence_nr(self.turn)

    def add(self, grad: Tensor, weight: Tensor) -> Tensor | None:
        """Add one reader's input gradient; returns the sum after the last reader, else None."""
        grad = grad if grad.dtype == weight.dtype else grad.to(weight.dtype)  # under autocast
        if self.grad is None:
            self.grad = grad @ weight
        else:
            out, width = weight.shape
            self.grad.view(-1, width).addmm_(grad.reshape(-1, out), weight)
        self.waiting -= 1
        if self.waiting or self.mixed:
            return None
        self.begin()
        return self.grad

    def begin(self) -> None:
        """Start the sum over the ranks, which overlaps with the computation that follows."""
        grad, axis = self.grad, self.stream.axis
        assert grad is not None
        if self.stream.split:
            whole = _padded(grad, self.shard * axis.size)
            self.pending = begin_reduce_scatter(whole, axis, grad.dim() - 2)
        else:
            self.grad = grad.contiguous()
            self.pending = _begin_all_reduce(self.grad, axis)

    def end(self, rest: Tensor | None) -> Tensor | None:
        """The gradient in the stream's placement; `rest` is the part that did not come by `add`."""
        if self.pending is None and rest is not None:
            self.grad = rest.clone() if self.grad is None else self.grad.add_(rest)
        if self.pending is None and self.grad is not None:  # not all readers are in this pass
            self.begin()
        pending, self.grad, self.pending = self.pending, None, None
        self.waiting = self.readers
        return None if pending is None else pending.wait()


def _begin_all_reduce(x: Tensor, axis: Axis) -> Pending[Tensor]:
    x.view(-1)[:0].zero_()  # so that dispatch modes see that `x` is written to
    pending = start(x.view(-1), axis, P, I, x.view(-1))
    return Pending([pending.wait, lambda: x])


class _Enter(torch.autograd.Function):
    """From the stream to R; the entry computes the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, entry: InputGradient) -> Tensor:
        """The input of the readers: `x`, gathered along the sequence if it is sharded."""
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        stream = entry.stream
        if not stream.split:
            return x.view_as(x)
        dim = x.dim() - 2
        length = stream.lengths.full(x.shape[dim])
        return _first(all_gather_along(x, stream.axis, dim), dim, length)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return ctx.entry.end(grad), None


class _Leave(torch.autograd.Function):
    """P -> S(T), as `move` does, without its dispatch on placements."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(y, axis, y.dim() - 2)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_along(grad, ctx.axis, grad.dim() - 2), None


class _Sum(torch.autograd.Function):
    """P -> I in place: `move` without a copy."""

    @staticmethod
    def forward(_: Any, y: Tensor, axis: Axis) -> Tensor:
        return _begin_all_reduce(y.contiguous(), axis).wait().view(y.shape)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Columns(torch.autograd.Function):
    """Computes a column-parallel layer's input gradient before the weight's: the layer got its
    input detached, so its own node runs after this one, while ranks sum the input's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, _moved: Tensor, entry: InputGradient, weight: Callable[[], Tensor]
    ) -> Tensor:
        ctx.entry, ctx.weight = entry, weight
        entry.read()
        return y.detach()  # not a view of y, because the next layer may work in place

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.weight()
        own = grad if ctx.needs_input_grad[0] else None
        return own, ctx.entry.add(grad, weight), None, None


def columns(module: nn.Module, stream: Stream, transposed: bool, entered: bool) -> None:
    """Hook a column-parallel layer, whose input an outer module may have `entered`."""
    if entered:
        return
    alone = is_linear(module)
    module.register_forward_pre_hook(partial(_before_columns, stream, alone), with_kwargs=True)
    if alone:
        module.register_forward_hook(partial(_after_columns, stream, transposed), prepend=True)


def is_linear(module: nn.Module) -> bool:
    """Whether the module only multiplies by its weight: torch's Linear, transformers' Conv1D."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _before_columns(
    stream: Stream, alone: bool, _: nn.Module, args: Any, kwargs: dict[str, Any]
) -> Any:
    name = None if args else next(k for k, value in kwargs.items() if isinstance(value, Tensor))
    moved, entry = stream.enter(args[0] if name is None else kwargs[name])
    # a plain layer computes weight gradients separately from the input's, see _Columns
    separate = alone and torch.is_grad_enabled() and moved.requires_grad
    entry.mixed |= not alone
    x = moved.detach() if separate else moved
    return ((x, *args[1:]), kwargs) if name is None else (args, kwargs | {name: x})


def _after_columns(
    stream: Stream, transposed: bool, module: nn.Module, _: Any, y: Tensor
) -> Tensor | None:
    if stream.slot is None:
        return None
    moved, entry = stream.slot.moved, stream.slot.entry
    if not (torch.is_grad_enabled() and moved.requires_grad):
        return None
    entry.line_up(y)
    return _Columns.apply(y, moved, entry, partial(_weight, module, transposed))


def _weight(module: nn.Module, transposed: bool) -> Tensor:
    """The weight [out, in] at the time of the backward pass, when zero3 has gathered it."""
    own: Any = module._parameters.get("weight")  # not as an attribute: the layer is not running
    weight: Tensor = own.detach()
    return weight.t() if transposed else weight
