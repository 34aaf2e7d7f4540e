"""Operations of a model that reach beyond a rank's positions, and what replaces them.

    F.scaled_dot_product_attention      attention to the positions of all ranks
    F.cross_entropy(reduction="mean")   the mean over the labels of all ranks
    torch.arange(t), table[:t]          this rank's positions in place of the first t
    torch.diff                          neighbours are those of the whole sequence

A `TorchFunctionMode` replaces them while the model runs, so the model's code does not change.
Other operations along the sequence raise InputError: a recurrent layer, a convolution, a mean or a
softmax over positions, a slice of the positions.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.core.errors import bad
from shardwise.techniques.context.cut_batch import Sequences

#: Functions along one dim, by what they compute.
_ALONG: Final = {
    **dict.fromkeys((torch.mean, Tensor.mean), "a mean"),
    **dict.fromkeys((torch.sum, Tensor.sum), "a sum"),
    **dict.fromkeys((torch.amax, Tensor.amax, torch.max, Tensor.max), "a maximum"),
    **dict.fromkeys((torch.std, Tensor.std, torch.var, Tensor.var), "a variance"),
    **dict.fromkeys((torch.cumsum, Tensor.cumsum), "a cumulative sum"),
    **dict.fromkeys((torch.flip, Tensor.flip, torch.roll, Tensor.roll), "a change of the order"),
}
_SOFTMAX: Final = (torch.softmax, Tensor.softmax, F.softmax)
_RECURRENT: Final = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_CONVOLUTIONS: Final = (F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d)
_INSTEAD: Final = "a plan without cp; tp2 sp also divides the sequence, between layers"

#: attend(q, k, v, mask, causal=, scale=, dropout_p=, of=) over all ranks.
Attend = Callable[..., Tensor]


class OwnPositions(TorchFunctionMode):
    """Computes a model on this rank's positions.

    attend    attention to the positions of all ranks
    count     the sum of a number over the ranks
    tables    the buffers of the model, by id: with its parameters, what holds a row per position
    of        the part whose forward began last
    parts     all parts of the step: a recomputation may be of an earlier one, whose padding differs
    own_mean  a mean loss is over this rank's labels, as the engine weighs it; else over all ranks'
    """

    def __init__(self, attend: Attend, count: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attend, self.count = attend, count
        self.model: nn.Module | None = None
        self.tables: dict[int, Tensor] = {}
        self.of: Sequences | None = None
        self.parts: Sequence[Sequences] = ()
        self.own_mean = False
        self.handlers: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: self._attention,
            F.cross_entropy: self._cross_entropy,
            torch.arange: partial(self._arange, torch.arange),
            torch.diff: self._diff,
            Tensor.diff: self._diff,
            Tensor.__getitem__: self._item,
        }

    def of_model(self, model: nn.Module) -> None:
        """The next operations are those of `model`, whose buffers are tables."""
        if model is not self.model:
            self.model, self.tables = model, {id(b): b for b in model.buffers()}

    def end(self) -> None:
        """The passes of a step have run: hold no model and no part of a batch."""
        self.of, self.parts, self.model, self.tables = None, (), None, {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.of is None:
            return func(*args, **kwargs)
        if func in self.handlers:
            return self.handlers[func](*args, **kwargs)
        if why := self._along(func, args, kwargs):
            raise bad(
                f"{why} under cp{self.of.cut.ranks}, where each rank has some of the positions",
                "models in which only F.scaled_dot_product_attention reads other positions",
                _INSTEAD,
            )
        return func(*args, **kwargs)

    # --- attention and loss -------------------------------------------------------------------

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        of = self._sequences()
        if key.shape[-2] != of.numel:  # keys of another sequence, which is whole on every rank
            self._require_other(key.shape[-2], of)
            how = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **how)
        for part in self.parts:
            if part.stands_for_padding(attn_mask):
                attn_mask, is_causal = part.padding, True
        self._require(query, attn_mask, of)
        if query.dim() == 3:
            q, k, v = (x.unsqueeze(1) for x in (query, key, value))
            return self._attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale).squeeze(1)
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        how = {"causal": is_causal, "scale": scale, "dropout_p": dropout_p, "of": of}
        width, own = query.shape[-1], value.shape[-1]
        if width == own:
            return self.attend(query, key, value, attn_mask, **how)
        # columns of zeros add nothing to scores, and are zeros in the output
        q, k, v = (F.pad(x, (0, max(width, own) - x.shape[-1])) for x in (query, key, value))
        return self.attend(q, k, v, attn_mask, **how)[..., :own]

    def _require_other(self, keys: int, of: Sequences) -> None:
        """Raise InputError for another sequence that some rank would take for its positions."""
        if keys in [of.cut.numel(rank) for rank in range(of.cut.ranks)]:
            raise bad(
                f"attention to {keys} keys of another sequence under cp{of.cut.ranks}, of which "
                "some ranks have as many positions",
                "another sequence of more or fewer positions, or a length that the ranks divide",
                f"batches padded to {of.cut.length + 1} positions, or another sequence of "
                f"{keys + 1}",
            )

    def _require(self, query: Tensor, mask: Tensor | None, of: Sequences) -> None:
        """Raise InputError for other dims or positions, or a mask without all columns."""
        if query.dim() not in (3, 4):
            raise bad(
                f"attention of queries {list(query.shape)} under cp{of.cut.ranks}",
                "queries [rows, heads, positions, width]",
                "F.scaled_dot_product_attention once for all heads: flatten other dims into rows",
            )
        if query.shape[-2] != of.numel:
            raise bad(
                f"attention of {query.shape[-2]} queries to this rank's {of.numel} positions, of "
                f"{of.cut.length}, under cp{of.cut.ranks}",
                "a query for each position that has a key",
                _INSTEAD,
            )
        rows, columns = (1, 1, *mask.shape)[-2:] if mask is not None else (1, 1)
        if mask is not None and (columns not in (1, of.cut.length) or rows not in (1, of.numel)):
            raise bad(
                f"an attention mask {list(mask.shape)} for the {of.numel} positions of a rank of "
                f"cp{of.cut.ranks}, which is not of its rows and of all columns",
                f"is_causal=True, or a mask of all {of.cut.length} columns",
                "the mask [rows, 1, T, T], or of padding [rows, 1, 1, T], in the batch",
            )

    def _cross_entropy(
        self,
        input: Tensor,  # noqa: A002 -- PyTorch's name
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        *,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """The mean over this rank's labels, zero without any.

        Or that over the labels of all ranks, divided by this rank's part of the positions, by which
        the engine then weighs the losses of ranks.
        """
        of, by_class = self._sequences(), not target.is_floating_point()
        how = {"weight": weight, "label_smoothing": label_smoothing}
        how |= {"ignore_index": ignore_index} if by_class else {}
        if reduction != "mean":
            return F.cross_entropy(input, target, reduction=reduction, **how)
        summed = F.cross_entropy(input, target, reduction="sum", **how)
        if by_class:
            counted = target != ignore_index
            weights = counted if weight is None else weight[target.where(counted, 0)] * counted
            count = weights.sum(dtype=torch.float64)
        else:
            rows = target.numel() // target.shape[1 if target.dim() > 1 else 0]
            count = torch.full((), float(rows), dtype=torch.float64, device=target.device)
        if self.own_mean:
            return summed / count.clamp(min=1e-12).to(summed.dtype)
        total = self.count(count) * (of.numel / of.cut.length)
        return summed / total.to(summed.device, summed.dtype) if of.numel else summed

    # --- positions ----------------------------------------------------------------------------

    def _arange(self, make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """`torch.arange(t)` is of this rank's positions."""
        of = self._sequences()
        found = make(*args, **kwargs)
        if _arange_of(args, kwargs) != (0, of.numel, 1):
            return found
        return of.positions(found.device).to(found.dtype)

    def _diff(self, *args: Any, **kwargs: Any) -> Tensor:
        """Differences of positions, where those before a rank's chunk are on another rank."""
        found, of = torch.diff(*args, **kwargs), self._sequences()
        if found.shape[-1:] != (of.numel,) or found.is_floating_point() or found.is_meta:
            return found
        for start in of.starts[1:]:
            found[..., start] = 1
        return found

    def _item(self, x: Tensor, index: Any) -> Tensor:
        """The first t rows of a table are those of this rank's positions."""
        of = self._sequences()
        parts = index if isinstance(index, tuple) else (index,)
        if isinstance(x, nn.Parameter) or id(x) in self.tables:
            return self._table(x, parts, of)
        if (part := _of_positions(x, parts, of)) is not None:
            raise bad(
                f"positions [{_text(part)}] of a sequence under cp{of.cut.ranks}, where each rank "
                "has some of the positions",
                "models in which only F.scaled_dot_product_attention reads other positions, and "
                "labels that are shifted in the batch",
                _INSTEAD,
            )
        return x[index]

    def _table(self, x: Tensor, parts: tuple[Any, ...], of: Sequences) -> Tensor:
        plain = all(isinstance(part, slice) for part in parts)
        dims = [
            dim
            for dim, part in enumerate(parts)
            if plain
            and part.start in (None, 0)
            and part.stop == of.numel
            and part.step in (None, 1)
            if x.shape[dim] >= of.cut.length
        ]
        if not dims:
            return x[parts]
        rest = [slice(None) if dim in dims else part for dim, part in enumerate(parts)]
        if len(dims) > 1:  # a mask: rows of this rank, all columns
            rest[dims[-1]] = slice(of.cut.length)
        return x[tuple(rest)].index_select(dims[0], of.positions(x.device))

    # --- what is refused ----------------------------------------------------------------------

    def _along(self, func: Any, args: Any, kwargs: dict[str, Any]) -> str:
        """What the function computes along the sequence; "" if it does not."""
        of = self._sequences()
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if x is None or of.numel < 2:
            return ""
        if func in _RECURRENT:
            return "a recurrent layer"
        if func in _CONVOLUTIONS and of.numel in x.shape[2:] and max(args[1].shape[2:]) > 1:
            return "a convolution over positions"
        if func in _SOFTMAX and x.dim() > 2 and x.shape[-2:] == (of.numel, of.numel):
            return "attention without F.scaled_dot_product_attention, by a softmax of scores"
        if func in _ALONG and x.dim() == 3 and x.shape[1] == of.numel:
            dims = kwargs.get("dim", kwargs.get("dims", args[1] if len(args) > 1 else None))
            dims = dims if isinstance(dims, (tuple, list)) else (dims,)
            if any(dim in (1, -2) for dim in dims if not isinstance(dim, Tensor)):
                return f"{_ALONG[func]} over positions"
        return ""

    def _sequences(self) -> Sequences:
        assert self.of is not None
        return self.of


def _of_positions(x: Tensor, parts: tuple[Any, ...], of: Sequences) -> Any:
    """The index of an activation, or of labels, that selects some of its positions, or None."""
    whole = x.dim() == 3 or (x.dim() == 2 and not x.is_floating_point())
    if not whole or x.shape[1] != of.numel or of.numel < 2:
        return None
    if any(part is not ... and not isinstance(part, (int, slice)) for part in parts):
        return None
    if ... in parts:
        place = parts.index(...)
        full = (slice(None),) * (x.dim() - len(parts) + 1)
        parts = (*parts[:place], *full, *parts[place + 1 :])
    part = parts[1] if len(parts) > 1 else slice(None)
    every = isinstance(part, slice) and part.indices(of.numel) == (0, of.numel, 1)
    shifts = part in (slice(1, None), slice(None, -1), slice(0, -1))  # of labels
    return None if every or (x.dim() == 2 and not shifts) else part


def _text(part: Any) -> str:
    """The index as Python source: -1, 1:, :-1."""
    if not isinstance(part, slice):
        return str(part)
    return ":".join("" if end is None else str(end) for end in (part.start, part.stop))


def _arange_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Start, stop and step of a call of `torch.arange`."""
    numbers = [*args, *(kwargs[name] for name in ("start", "end", "step") if name in kwargs)]
    if len(numbers) == 1:
        numbers = [0, *numbers]
    start, stop, step, *_ = [*numbers, 1]
    return start, stop, step
