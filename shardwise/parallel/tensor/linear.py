"""Tensor parallelism: one layer over several ranks, by columns and by rows.

    x ----> [ columns ] ----> gelu ----> [ rows ] ----> y          W1 cut by output, W2 by input
      I -> R          S(-1)        S(-1)          P -> I           forward: one all-reduce
      P -> I          S(-1)        S(-1)          I -> R           backward: one all-reduce

    x ----> [ columns ] ----> gelu ----> [ rows ] ----> y          under sequence parallelism
      S(T) -> R       S(-1)        S(-1)          P -> S(T)        all-gather, reduce-scatter
      P -> S(T)       S(-1)        S(-1)          S(T) -> R        reduce-scatter, all-gather

`Stream` is where the residual stream lives between the two: whole and alike on every rank (I), or
split along the sequence (S(T), T being the last dim but one).  Several layers of columns that read
one x (queries, keys, values; gate and up) share an `Entry`: x moves once, and the gradients they
send back are added up before they are summed over the ranks, once, beside the weight gradients.

Nothing here knows a model: modules keep their class, names and forward; hooks move what goes in
and what comes out, ahead of the user's.  (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section
3; Korthikanti et al., arXiv 2205.05198, section 4.2.2.)
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
from shardwise.comm.once import once
from shardwise.comm.transport import Pending
from shardwise.comm.world import Axis
from shardwise.core.layout import I, P, Placement, R, S
from shardwise.core.lengths import Lengths
from shardwise.core.model_spec import Crossing, CutLoss
from shardwise.core.uneven import Cut
from shardwise.kernels.matmul import Products


class Stream:
    """The residual stream on the tensor axis; `split` says that it is split along the sequence."""

    def __init__(
        self, axis: Axis, split: bool, products: Products, within: "Stream | None" = None
    ) -> None:
        self.axis, self.split, self.products = axis, split, products
        self.log = within or self  # whose crossings count what moves here
        self.lengths = Lengths(axis.size)  # of sequences in the stream, where it is split
        self.slot: _Entered | None = None  # what was entered last
        self.counting = False  # whether a step is going on
        self.crossings: list[Crossing] = []  # of this step, in the order of its forward passes
        self.losses: list[CutLoss] = []  # of this step, of logits that stay sharded

    def enter(self, x: Tensor) -> tuple[Tensor, "Entry"]:
        """`x` of the stream as all of every rank's columns read it, moved once for all readers."""
        now = _now(x)
        if self.slot is None or self.slot.x is not x or self.slot.when != now:
            numel = x.numel() * self._parts
            crossing = self._note(x, S(0) if self.split else I, R, numel)
            entry = Entry(self, crossing, x.shape[-2] if self.split else 0)
            self.slot = _Entered(x, now, _Enter.apply(x, entry), entry)
        return self.slot.moved, self.slot.entry

    def leave(self, y: Tensor, fresh: bool = True) -> Tensor:
        """The sum over the ranks of their partial `y`, back in the stream.

        `fresh`: whoever made `y` does not look at it again, so that it may be written over.
        """
        self.slot = None
        if not self.split:
            return self.sum(y, fresh)
        y = self._padded(y)
        crossing = self._note(y, P, S(0), y.numel())
        return _Leave.apply(y, self.axis, crossing)

    def sum(self, y: Tensor, fresh: bool = True) -> Tensor:
        """The sum over the ranks of their partial `y`, whole and alike on every rank."""
        self._note(y, P, I, y.numel())
        return _Sum.apply(y, self.axis) if fresh else move(y, self.axis, P, I)

    def gather(self, x: Tensor) -> Tensor:
        """The whole sequence of `x`, which ranks go on to use differently."""
        return self._whole(x, R)

    def spread(self, x: Tensor) -> Tensor:
        """`x`, whole and alike on every rank, which ranks go on to use differently."""
        crossing = self._note(x, I, R, x.numel())
        return move(x, self.axis, I, R, crossing.come_back)

    def unsplit(self, x: Tensor) -> Tensor:
        """The whole sequence of `x`, with which every rank goes on alike."""
        return self._whole(x, I)

    def _whole(self, x: Tensor, dst: Placement) -> Tensor:
        if not self.split:
            return x
        dim = x.dim() - 2
        crossing = self._note(x, S(0), dst, x.numel() * self.axis.size)
        length = self.lengths.whole(x.shape[dim])
        return _first(move(x, self.axis, S(dim), dst, crossing.come_back), dim, length)

    def scatter(self, x: Tensor) -> Tensor:
        """This rank's part of the sequence of `x`, which is the same on every rank."""
        if not self.split:
            return x
        x = self._padded(x)
        crossing = self._note(x, I, S(0), x.numel())
        return move(x, self.axis, I, S(x.dim() - 2), crossing.come_back)

    def join(self, x: Tensor, cut: Cut) -> Tensor:
        """The whole features of which `x` are this rank's, alike on every rank."""
        self._note(x, S(0), I, x.shape[:-1].numel() * _padded_features(cut))
        return join(x, self.axis, cut.on(x.dim() - 1))

    def take(self, x: Tensor, cut: Cut) -> Tensor:
        """This rank's features of `x`, which is whole and alike on every rank."""
        crossing = self._note(x, I, S(0), x.shape[:-1].numel() * _padded_features(cut))
        return take(x, self.axis, cut.on(x.dim() - 1), crossing.come_back)

    def lost(self, positions: int, smoothing: bool, element_bytes: int) -> None:
        """Note a loss of logits that stay sharded."""
        if self.log.counting:
            self.log.losses.append(CutLoss(positions, smoothing, element_bytes))

    def begin(self, known: Mapping[int, int] | None = None) -> None:
        """A pass begins; `known`: lengths of sequences that were split elsewhere."""
        self.lengths.known = dict(known or {})

    def end(self) -> None:
        """The forward pass is over: nothing more reads what was entered."""
        self.slot = None

    def _padded(self, x: Tensor) -> Tensor:
        """`x`, whole, so long that every rank has a shard of the same size."""
        return _padded(x, self.lengths.shard(x.shape[-2]) * self.axis.size)

    @property
    def _parts(self) -> int:
        return self.axis.size if self.split else 1

    def _note(self, x: Tensor, src: Placement, dst: Placement, numel: int) -> Crossing:
        # activations that are made again are in the backward pass
        phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        crossing = Crossing(src, dst, numel, x.element_size(), phase)
        if self.log.counting:
            self.log.crossings.append(crossing)
        return crossing


class _Entered(NamedTuple):
    """What was entered, when (a change in place makes it another), as its readers take it."""

    x: Tensor
    when: tuple[int, bool]
    moved: Tensor
    entry: "Entry"


def _now(x: Tensor) -> tuple[int, bool]:
    return 0 if x.is_inference() else x._version, torch.is_grad_enabled()


def _padded_features(cut: Cut) -> int:
    """All features, with every rank's block as wide as the widest."""
    return cut.ranks * max(cut.size(rank) for rank in range(cut.ranks))


def _first(x: Tensor, dim: int, length: int) -> Tensor:
    # contiguous at once, or each reader copies it and keeps its copy
    return x if x.shape[dim] == length else x.narrow(dim, 0, length).contiguous()


def _padded(x: Tensor, length: int) -> Tensor:
    short = length - x.shape[-2]
    return functional.pad(x, (0, 0, 0, short)) if short else x


class Entry:
    """The gradient of one input, added up over the layers that read it, then over the ranks."""

    def __init__(self, stream: Stream, crossing: Crossing, shard: int) -> None:
        self.stream, self.crossing, self.shard = stream, crossing, shard
        self.readers = self.waiting = self.turn = 0
        self.mixed = False  # whether somebody sends a gradient by other ways than `add`
        self.grad: Tensor | None = None
        self.going: Pending[Tensor] | None = None  # the sum over the ranks, under way

    def read(self) -> None:
        """One more layer reads it."""
        self.readers += 1
        self.waiting += 1

    def line_up(self, y: Tensor) -> None:
        """Of a reader's output: its weight's gradient is to come after every reader has sent back.

        Of what is ready autograd takes first what was made last; to it this was made with the
        first reader's.
        """
        node: Any = y.grad_fn
        if node is not None:
            self.turn = self.turn or node._sequence_nr()
            node._set_sequence_nr(self.turn)

    def add(self, grad: Tensor, weight: Tensor) -> Tensor | None:
        """Take what one reader [out, in] sends back; the sum of all, when it is on its way."""
        products = self.stream.products
        grad = grad if grad.dtype == weight.dtype else grad.to(weight.dtype)  # of autocast
        if self.grad is None:
            self.grad = products.linear(grad, weight.t(), None)
        else:
            out, width = weight.shape
            products.add(self.grad.view(-1, width), grad.reshape(-1, out), weight, 1.0, 1.0)
        self.waiting -= 1
        if self.waiting or self.mixed:
            return None
        self.begin()
        return self.grad

    def begin(self) -> None:
        """Start the sum over the ranks, beside whatever is computed next."""
        grad, axis = self.grad, self.stream.axis
        assert grad is not None
        if self.stream.split:
            whole = _padded(grad, self.shard * axis.size)
            self.going = begin_reduce_scatter(whole, axis, grad.dim() - 2)
        else:
            self.grad = grad.contiguous()
            self.going = _begin_all_reduce(self.grad, axis)

    def end(self, rest: Tensor | None) -> Tensor | None:
        """The gradient in the stream.  `rest` came by other ways than `add`."""
        if self.going is None and rest is not None:
            self.grad = rest.clone() if self.grad is None else self.grad.add_(rest)
        if self.going is None and self.grad is not None:  # some reader was not in this pass
            self.begin()
        going, self.grad, self.going = self.going, None, None
        self.waiting = self.readers
        if going is None:
            return None
        self.crossing.come_back()
        return going.wait()


def _begin_all_reduce(x: Tensor, axis: Axis) -> Pending[Tensor]:
    """Begin the sum over the axis, in the memory of contiguous `x`."""
    x.view(-1)[:0].zero_()  # an operation, by which a dispatch mode sees that `x` is written to
    going = start(x.view(-1), axis, P, I, x.view(-1))
    return Pending([going.wait, lambda: x])


class _Enter(torch.autograd.Function):
    """From the stream to R; the way back is the entry's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, entry: Entry) -> Tensor:
        """`x` as the readers take it: itself, or the whole sequence of it."""
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        stream = entry.stream
        if not stream.split:
            return x.view_as(x)
        dim = x.dim() - 2
        length = stream.lengths.whole(x.shape[dim])
        return _first(all_gather_along(x, stream.axis, dim), dim, length)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return ctx.entry.end(grad), None


class _Leave(torch.autograd.Function):
    """P -> S(T): `move` without its choice of what to do."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, axis: Axis, crossing: Crossing) -> Tensor:
        """This rank's shard of the sum."""
        ctx.axis, ctx.crossing = axis, crossing
        return reduce_scatter(y, axis, y.dim() - 2)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.crossing.come_back()
        return all_gather_along(grad, ctx.axis, grad.dim() - 2), None, None


class _Sum(torch.autograd.Function):
    """P -> I, written over what came: `move` without a copy."""

    @staticmethod
    def forward(_: Any, y: Tensor, axis: Axis) -> Tensor:
        """The sum over the axis, in the memory of `y`."""
        return _begin_all_reduce(y.contiguous(), axis).wait().view(y.shape)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Columns(torch.autograd.Function):
    """Between a layer of columns and its reader: takes the input's gradient ahead of the weight's.

    The layer itself was given its input detached, so that its own node makes only the weight
    gradients; autograd runs it after this one, while the input's gradient is on its way.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, _moved: Tensor, entry: Entry, weight: Callable[[], Tensor]
    ) -> Tensor:
        """`y` as it is, one more reader of the entry."""
        ctx.entry, ctx.weight = entry, weight
        entry.read()
        return y.detach()  # no view of y: its reader may work in place

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.weight()
        own = grad if ctx.needs_input_grad[0] else None
        return own, ctx.entry.add(grad, weight), None, None


def columns(module: nn.Module, stream: Stream, transposed: bool, entered: bool) -> None:
    """Hook a layer whose outputs are cut.  `transposed`: its weight is [in, out].

    `entered`: its input is whole on every rank already (an outer module gathers it).
    """
    if entered:
        return
    alone = plain(module)
    module.register_forward_pre_hook(partial(_before_columns, stream, alone), with_kwargs=True)
    if alone:
        module.register_forward_hook(partial(_after_columns, stream, transposed), prepend=True)


def plain(module: nn.Module) -> bool:
    """Whether it is a product with its weight and no more: torch's Linear, transformers' Conv1D."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _before_columns(
    stream: Stream, alone: bool, _: nn.Module, args: Any, kwargs: dict[str, Any]
) -> Any:
    name = None if args else next(k for k, value in kwargs.items() if isinstance(value, Tensor))
    moved, entry = stream.enter(args[0] if name is None else kwargs[name])
    # the weight gradients of a plain layer are made apart from its input's, see _Columns
    apart = alone and torch.is_grad_enabled() and moved.requires_grad
    entry.mixed |= not alone
    x = moved.detach() if apart else moved
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
    """The weight [out, in] as it is when backward comes by: gathered then, under zero3."""
    weight = module.get_parameter("weight").detach()
    return weight.t() if transposed else weight
