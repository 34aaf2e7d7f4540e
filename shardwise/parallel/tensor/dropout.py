"""this file is random numbers on the tensor axis: what one process draws for the whole tensor.

    one process     x [B, T, 8]    mask  1 0 1 1 0 1 1 1
    rank 0 of 2     x [B, T, 4]    mask  1 0 1 1              the first half of the same draw
    rank 1 of 2     x [B, T, 4]    mask          0 1 1 1

Every rank draws for the whole tensor, from the default generator, which is in one state on all
ranks of the axis, and keeps its part.  So dropout is equal on what is whole, different on what is
cut, and both are what one process has; and the generators stay in step, however the cuts lie.  The
cost is one whole mask at a time.  (Megatron-LM keeps a second generator for what is cut instead, so
that its losses depend on the degree: arXiv 1909.08053, appendix B.2.)

Which part is known by where a tensor comes from.  `Draws` is a mode of torch: it sees each function
that is called, and what was made of the outputs of a layer of columns, or of a shard of the
sequence, carries its `Mark` on.  A custom autograd function and a compiled region hide what they
do inside: what comes out of them has the mark only if it is made of what went in by torch's own.

Met are dropout, dropout1d to 3d, the attention function with dropout, rand_like, randn_like, and
bernoulli_, uniform_, normal_ and exponential_ in place.  alpha_dropout is not.  On a GPU, attention
with dropout is left to the fused kernels, which draw inside by a pattern of their own: there ranks
draw differently, their generators stay in step, and the values are not one process's.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.comm.uneven import part
from shardwise.comm.world import Axis
from shardwise.core.uneven import Cut

__all__ = ["Columns", "Cutting", "Draws", "Mark", "Shard"]

DROPOUTS = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
)
LIKE = (torch.rand_like, torch.randn_like)
FILLS = (Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_)
#: How far a GPU's generator is moved after a fused kernel, which draws fewer numbers than that.
STRIDE = 2**32


class Mark(Protocol):
    """What a tensor is made of that is cut."""

    @property
    def weight(self) -> int:
        """Of two tensors that are put together, the heavier mark is the result's."""
        ...

    def cut(self, x: Tensor, rank: int) -> Cut | None:
        """How the whole of `x` is cut, of which `rank` has `x`; None where `x` is whole."""
        ...

    def on(self, x: Tensor, rank: int) -> "Mark":
        """The mark of `x`, which was made on `rank` of what has this one."""
        ...


@dataclass(frozen=True)
class Columns:
    """How the outputs of a layer of columns lie: all of them, and each of several packed in them.

    `features` are cuts of the last dim; `heads` count heads, those first that the layer makes.
    `parts` are those of queries, keys and values end to end, whose sizes on a rank may be alike.
    """

    features: tuple[Cut, ...]
    heads: tuple[Cut, ...] = ()
    weight: int = 1
    parts: tuple["Columns", ...] = ()


@dataclass(frozen=True)
class Cutting:
    """Made of the outputs [..., features] of columns, which had so many positions."""

    columns: Columns
    positions: int

    @property
    def weight(self) -> int:
        """That of its columns: queries lead keys, so that their product is by query heads."""
        return self.columns.weight

    def cut(self, x: Tensor, rank: int) -> Cut | None:
        """By heads in [B, h, T, S], [B, T, h, E], [B, h, g, T, S], [B*h, T, S]; else by features.

        Where two dims could be the heads, the first is.
        """
        heads, last = self.columns.heads, x.dim() - 1
        dims = (1, 2) if x.dim() > 3 else ()
        for cut, dim in product(heads, dims):
            if x.shape[dim] == cut.size(rank):
                return cut.on(dim)
        fits = [cut.on(last) for cut in self.columns.features if x.shape[-1:] == (cut.size(rank),)]
        if x.dim() == 3 and heads and not (fits and x.shape[:2].numel() == self.positions):
            return _folded(heads[0], x.shape[0], rank)
        return fits[0] if fits else None

    def on(self, x: Tensor, rank: int) -> "Cutting":
        """That of a part, where `x` is a view of all of it, in rows as long as all features."""
        start = 0
        for columns in self.columns.parts:
            size, row = (each.features[0].size(rank) for each in (columns, self.columns))
            within = row in x.stride() and x.shape[-1] < row and x.numel() == self.positions * size
            if within and x.storage_offset() % row == start:
                return Cutting(columns, self.positions)
            start += size
        return self


def _folded(heads: Cut, count: int, rank: int) -> Cut | None:
    """The cut of a dim that has the heads of each row of the batch, one row after the other."""
    rows, rest = divmod(count, heads.size(rank))
    if rest:
        return None
    ranges = (
        tuple((row * heads.whole + a, row * heads.whole + b) for row in range(rows) for a, b in own)
        for own in heads.ranges
    )
    return Cut(0, rows * heads.whole, tuple(ranges))


@dataclass(frozen=True)
class Shard:
    """Made of a shard [..., size, D] of a sequence of `whole` positions, padded to n alike."""

    whole: int
    ranks: int
    size: int
    weight: int = 0

    def cut(self, x: Tensor, rank: int) -> Cut | None:
        """By positions; the padding belongs to no one."""
        if x.dim() < 2 or x.shape[-2] != self.size:
            return None
        edges = [min(r * self.size, self.whole) for r in range(self.ranks + 1)]
        ranges = tuple(((a, b),) for a, b in pairwise(edges))
        return Cut(x.dim() - 2, self.whole, ranges)

    def on(self, x: Tensor, rank: int) -> "Shard":
        """Itself."""
        return self


class Draws(TorchFunctionMode):
    """Random numbers of one model in training; on an axis of one rank torch's own.

    `layers`: the model's modules. The mode costs about a microsecond for each function called, so
    it is entered for models that draw: those with a layer of dropout, or in whose last pass the
    generator moved. Other dropout that begins later is met from the second pass on.
    """

    def __init__(self, axis: Axis, layers: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.axis = axis
        self.layers = [layer for layer in layers if isinstance(layer, _DropoutNd)]
        self.moved = True  # whether the last pass drew; nobody knows of the first
        self.on = False
        self.marks = WeakIdKeyDictionary()
        self.acts: dict[Any, Callable[..., Any]] = {
            functional.scaled_dot_product_attention: self._attended,
            **dict.fromkeys(DROPOUTS, self._dropped),
            **dict.fromkeys(LIKE, self._like),
            **dict.fromkeys(FILLS, self._filled),
        }

    @contextmanager
    def during(self, device: torch.device) -> Iterator[None]:
        """Around a forward and its backward pass, which may recompute parts of it."""
        if self.axis.size == 1:
            yield
            return
        before = _state(device)
        if self.moved or any(layer.training and layer.p > 0 for layer in self.layers):
            with self:
                self.on = True
                try:
                    yield
                finally:
                    self.on = False
                    self.marks.clear()
        else:
            yield
        self.moved = not torch.equal(before, _state(device))

    def put(self, x: Tensor, mark: Mark | None) -> None:
        """From here on `x` is what the mark says; None: whole and alike on every rank."""
        if mark is not None:
            self.marks[x] = mark
        elif x in self.marks:
            del self.marks[x]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        mark = self._of((*args, *kwargs.values()), None)
        if mark is None:
            return func(*args, **kwargs)
        act = self.acts.get(func)
        out = func(*args, **kwargs) if act is None else act(mark, func, *args, **kwargs)
        self._carry(out, mark)
        return out

    def _of(self, values: Any, found: Mark | None) -> Mark | None:
        """The heaviest mark, of the first that have it, among values in any lists."""
        for value in values:
            if isinstance(value, Tensor):
                mark: Mark | None = self.marks.get(value)
                if mark is not None and (found is None or mark.weight > found.weight):
                    found = mark
            elif isinstance(value, (list, tuple)):
                found = self._of(value, found)
        return found

    def _carry(self, out: Any, mark: Mark) -> None:
        if isinstance(out, Tensor):
            self.marks[out] = mark.on(out, self.axis.rank)
        elif isinstance(out, (list, tuple)):
            for each in out:
                self._carry(each, mark)

    def _backward(
        self,
        x: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """The backward pass from `x`, inside the mode, for what is recomputed in it.

        Torch leaves a mode within what the mode met, and meets every public way to begin one.
        """
        if inputs is not None or (gradient is None and x.numel() != 1):  # as torch has it
            return Tensor.backward(x, gradient, retain_graph, create_graph, inputs)
        gradient = torch.ones_like(x) if gradient is None else gradient
        keep = create_graph if retain_graph is None else retain_graph
        with self:
            _engine_run_backward(
                (x,),
                (gradient,),
                keep,
                create_graph,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )
        return None

    # --- what is drawn ------------------------------------------------------------------------

    def _dropped(
        self,
        mark: Mark,
        func: Any,
        input: Tensor,  # noqa: A002 - as torch calls it
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        """The input times the mask: what torch makes of ones."""
        if not training or p == 0:
            return input

        def draw(whole: Tensor) -> Tensor:
            return func(whole.fill_(1), p, training=True)

        mask = self._part(mark, input, draw)
        if mask is None:
            return func(input, p, training, inplace)
        return input.mul_(mask) if inplace else input * mask

    def _like(self, mark: Mark, func: Any, input: Tensor, **kwargs: Any) -> Tensor:  # noqa: A002
        drawn = self._part(mark, input, lambda whole: func(whole, **kwargs))
        return func(input, **kwargs) if drawn is None else drawn

    def _filled(self, mark: Mark, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
            return func(x, *args, **kwargs)
        drawn = self._part(mark, x, lambda whole: func(whole, *args, **kwargs))
        return func(x, *args, **kwargs) if drawn is None else x.copy_(drawn)

    @torch.no_grad()
    def _part(self, mark: Mark, x: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor | None:
        """This rank's part of what `draw` makes of the whole; None where `x` is the whole."""
        cut = mark.cut(x, self.axis.rank)
        if cut is None:
            return None
        mine = part(draw(_whole(x, cut)), cut, self.axis.rank)
        short = x.shape[cut.dim] - mine.shape[cut.dim]
        if not short:
            return mine
        padding = (*x.shape[: cut.dim], short, *x.shape[cut.dim + 1 :])
        return torch.cat([mine, mine.new_ones(padding)], cut.dim)

    def _attended(
        self,
        mark: Mark,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        **how: Any,
    ) -> Tensor:
        """Attention with its weights dropped, as torch's own reference computes it."""
        if dropout_p == 0:
            return func(query, key, value, attn_mask, **how)
        if query.is_cuda:
            with _apart(query.device, self.axis.rank):
                return func(query, key, value, attn_mask, dropout_p, **how)
        weights = _weights(query, key, attn_mask, **how)
        weights = self._dropped(mark, functional.dropout, weights, dropout_p)
        return weights.to(value.dtype) @ _repeated(value, query, how.get("enable_gqa", False))


def _whole(x: Tensor, cut: Cut) -> Tensor:
    """An empty tensor as the whole of `x` is, its dims in the same order in memory.

    Torch draws in the order of the memory. Of two dims with one stride that of length 1 is inside;
    a computed tensor may have lost where such a dim was.
    """
    shape = cut.whole_shape(x.shape)
    order = sorted(range(x.dim()), key=lambda dim: (-x.stride(dim), x.shape[dim] == 1))
    empty = torch.empty([shape[dim] for dim in order], dtype=x.dtype, device=x.device)
    return empty.permute([order.index(dim) for dim in range(x.dim())])


def _weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The weights [..., h, T, S] of attention, in fp32 at least; a row that sees nothing is 0."""
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    dtype = torch.promote_types(query.dtype, torch.float32)
    key = _repeated(key, query, enable_gqa)
    scores = (query.to(dtype) * root) @ (key.to(dtype) * root).transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)


def _repeated(x: Tensor, query: Tensor, grouped: bool) -> Tensor:
    """Keys or values, once for each query head that they serve."""
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) if grouped else x


def _state(device: torch.device) -> Tensor:
    """The state of the default generators that a model on `device` may draw from."""
    own = torch.default_generator.get_state()
    return torch.cat([own, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else own


@contextmanager
def _apart(device: torch.device, rank: int) -> Iterator[None]:
    """For the time, a GPU's generator with a seed of this rank's; then in step, and moved on."""
    own = torch.cuda.default_generators[device.index or 0]
    seed, offset = own.initial_seed(), own.get_offset()
    own.manual_seed((seed + (rank + 1) * 0x9E3779B97F4A7C15) % 2**63)
    own.set_offset(offset)
    try:
        yield
    finally:
        own.manual_seed(seed)
        own.set_offset(offset + STRIDE)
