"""Operations of a model that reach beyond a rank's positions, and what replaces them.

    F.scaled_dot_product_attention      attention to the positions of all ranks
    nn.MultiheadAttention               the same, if it returns no weights
    F.cross_entropy(reduction="mean")   the mean over the labels of all ranks
    torch.arange(t), table[:t]          this rank's positions in place of the first t
    torch.diff                          of position ids: whether documents are packed into a row

A `TorchFunctionMode` replaces them while the model runs, so the model's code does not change. Other
operations along the sequence raise InputError: a recurrent layer, a convolution, a mean, a
normalisation or a softmax over positions, a slice of the positions.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.core.errors import InputError, bad
from shardwise.techniques.context.cut_batch import Sequences

#: Functions along one dim.
_ALONG: Final = frozenset(
    getattr(where, name)
    for where in (torch, Tensor)
    for name in ("mean", "sum", "amax", "max", "std", "var", "cumsum", "flip", "roll")
)
_MULTIHEAD: Final = signature(F.multi_head_attention_forward)
_SOFTMAX: Final = (torch.softmax, Tensor.softmax, F.softmax)
#: Of them, those that are not the mean of what ranks find; all else that normalises positions.
_OF_ALL: Final = ("amax", "max", "std", "var")
_NORMS: Final = (F.batch_norm, F.instance_norm, F.group_norm)
_RECURRENT: Final = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_CONVOLUTIONS: Final = (F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d)

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
        #: tensors that modules keep, and the sequence length of the pass that made them; 0: earlier
        self.kept: dict[int, tuple[ref[Tensor], int]] = {}
        self.looked = dict[int, int]()  # by id of a model, the length when it was last searched
        self.handlers: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: self._attention,
            F.multi_head_attention_forward: self._multihead,
            F.cross_entropy: self._cross_entropy,
            torch.arange: partial(self._arange, torch.arange),
            torch.diff: self._diff,
            Tensor.diff: self._diff,
            Tensor.__getitem__: self._item,
        }

    def of_model(self, model: nn.Module) -> None:
        if model is not self.model:
            self.model, self.tables = model, {id(b): b for b in model.buffers()}
            if id(model) not in self.looked:
                self._require_tables(0)

    def _require_tables(self, length: int) -> None:
        """Raise InputError for a tensor that a module keeps from a batch of another length."""
        if self.model is None or self.looked.get(id(self.model)) == length:
            return
        self.looked[id(self.model)] = length
        modules = self.model.named_modules()
        tables = ((n, table) for n, m in modules for table in (vars(m), m._buffers))
        for path, x in ((f"{n}.{name}", x) for n, own in tables for name, x in own.items()):
            if not isinstance(x, Tensor) or isinstance(x, nn.Parameter) or x.requires_grad:
                continue
            known, made = self.kept.get(id(x), (None, length))
            if known is None or known() is not x:
                self.kept[id(x)] = ref(x), length
            elif made not in (0, length):
                raise bad(
                    f"{path}, which the model made of a batch of {made} positions and has in one "
                    f"of {length}, under cp: it is of this rank's positions in the first batch",
                    "tables for the longest sequence that __init__ makes, or made in each forward",
                    f"self.register_buffer({path.rpartition('.')[2]!r}, table) in __init__",
                )

    def end(self) -> None:
        if self.of is not None:
            self._require_tables(self.of.cut.length)
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
            raise self._reaches(why)
        return func(*args, **kwargs)

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        if self.of is not None and isinstance(raised[1], Exception):
            said = f"under cp, where a rank has {self.of.numel} of {self.of.cut.length} positions"
            raised[1].add_note(f"{said}, and no attention_mask: docs/explanation/context.md")

    def _reaches(self, what: str) -> InputError:
        return bad(
            f"{what} under cp{self._sequences().cut.ranks}, where a rank has some of the positions",
            "models in which only F.scaled_dot_product_attention reads other positions",
            "labels that are shifted in the batch, or a plan without cp",
        )

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
        if query.dim() == 3:
            q, k, v = (x.unsqueeze(1) for x in (query, key, value))
            return self._attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale).squeeze(1)
        kept = self._kept(attn_mask, of)
        self._require(query, attn_mask if kept is None else None, of)
        attn_mask, is_causal = (attn_mask, is_causal) if kept is None else (kept, True)
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        how = {"causal": is_causal, "scale": scale, "dropout_p": dropout_p, "of": of}
        width, own = query.shape[-1], value.shape[-1]
        if width == own:
            return self.attend(query, key, value, attn_mask, **how)
        # columns of zeros add nothing to scores, and are zeros in the output
        q, k, v = (F.pad(x, (0, max(width, own) - x.shape[-1])) for x in (query, key, value))
        return self.attend(q, k, v, attn_mask, **how)[..., :own]

    def _kept(self, mask: Tensor | None, of: Sequences) -> Tensor | None:
        """The mask for which the model's `mask` stands; None if it is the model's own. The first
        mask of documents that a transformers model makes of its own positions becomes the marker.
        """
        local = (of.numel, of.numel)
        for part in self.parts:
            if part.stands_for_padding(mask):
                return part.padding
        if mask is None or of.ids is None or of.marker is not None or mask.shape[-2:] != local:
            return None
        of.marker, of.padding = mask, of.same_document()
        return of.padding

    def _require_other(self, keys: int, of: Sequences) -> None:
        if keys in [of.cut.numel(rank) for rank in range(of.cut.ranks)]:
            raise bad(
                f"attention to {keys} keys of another sequence; some ranks have {keys} positions",
                "another sequence of more or fewer positions, or a length that the ranks divide",
                f"batches padded to {of.cut.length + 1} positions",
            )

    def _require(self, query: Tensor, mask: Tensor | None, of: Sequences) -> None:
        if query.dim() not in (3, 4):
            raise bad(
                f"attention of queries {list(query.shape)} under cp{of.cut.ranks}",
                "queries [rows, heads, positions, width]",
                "F.scaled_dot_product_attention once for all heads: flatten other dims into rows",
            )
        if query.shape[-2] != of.numel:
            raise self._reaches(
                f"attention of {query.shape[-2]} queries to this rank's {of.numel} positions"
            )
        rows, columns = (1, 1, *mask.shape)[-2:] if mask is not None else (1, 1)
        if mask is not None and (columns not in (1, of.cut.length) or rows not in (1, of.numel)):
            raise bad(
                f"an attention mask {list(mask.shape)} for the {of.numel} positions of a rank",
                f"is_causal=True, or a mask of these rows and all {of.cut.length} columns",
                "the mask [rows, 1, T, T], or of padding [rows, 1, 1, T], in the batch",
            )

    def _multihead(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        bound = _MULTIHEAD.bind(*args, **kwargs)
        bound.apply_defaults()
        given = SimpleNamespace(**bound.arguments)
        more = (given.key_padding_mask, given.bias_k, given.static_k, given.static_v)
        if given.need_weights or given.add_zero_attn or any(x is not None for x in more):
            raise bad(
                f"nn.MultiheadAttention under cp{self._sequences().cut.ranks} that returns "
                "weights, or has a key_padding_mask",
                "need_weights=False, and attention that is causal or full",
                "attention(x, x, x, need_weights=False)",
            )
        qkv, bias = (given.query, given.key, given.value), given.in_proj_bias
        if given.use_separate_proj_weight:
            weights = given.q_proj_weight, given.k_proj_weight, given.v_proj_weight
        else:
            weights = given.in_proj_weight.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        qkv = [F.linear(*each) for each in zip(qkv, weights, biases, strict=True)]
        single = qkv[0].dim() == 2
        qkv = [x.unsqueeze(1) if single else x for x in qkv]
        q, k, v = (x.unflatten(-1, (given.num_heads, -1)).permute(1, 2, 0, 3) for x in qkv)
        mask = None if given.is_causal else given.attn_mask
        if mask is not None:
            mask = ~mask if mask.dtype == torch.bool else mask
            mask = mask.unflatten(0, (len(q), -1)) if mask.dim() == 3 else mask[None, None]
        dropout_p = given.dropout_p if given.training else 0.0
        out = self._attention(q, k, v, mask, dropout_p, given.is_causal).permute(2, 0, 1, 3)
        out = F.linear(out.flatten(2), given.out_proj_weight, given.out_proj_bias)
        return out.squeeze(1) if single else out, None

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
        """The mean over this rank's labels, or that over all ranks' labels divided by this rank's
        part of the positions, by which the engine then weighs the losses of ranks.
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
        of = self._sequences()
        found = make(*args, **kwargs)
        if _arange_of(args, kwargs) != (0, of.numel, 1) or _makes_a_mask():
            return found
        return of.positions(found.device).to(found.dtype)

    def _diff(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Differences of position ids: ones, or zeros if documents are packed into a row. A model
        of transformers looks for documents by them. Those before a rank's chunk are on another
        rank, so that its mask only says that there are some (`_kept`).
        """
        found, of = torch.diff(x, *args, **kwargs), self._sequences()
        if found.shape[-1:] != (of.numel,) or found.is_floating_point() or found.is_meta:
            return found
        if not of.transformers:
            raise self._reaches("a difference of neighbours")
        return (~of.is_packed(x)).to(found.dtype).expand(found.shape)

    def _item(self, x: Tensor, index: Any) -> Tensor:
        """The rows of this rank's positions for the first t rows of a table."""
        of = self._sequences()
        parts = index if isinstance(index, tuple) else (index,)
        if isinstance(x, nn.Parameter) or id(x) in self.tables:
            return self._table(x, parts, of)
        if (part := _of_positions(x, parts, of)) is not None:
            raise self._reaches(f"positions [{_text(part)}] of a sequence")
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
        of = self._sequences()
        given: list[Any] = [*args, *kwargs.values(), None]
        x = given[0]
        if not isinstance(x, Tensor) or of.numel < 2:
            return ""
        if func in _RECURRENT:
            return "a recurrent layer"
        if func is F.embedding_bag and of.numel == x.shape[-1]:
            return "an embedding bag over positions"
        if func in _CONVOLUTIONS and of.numel in x.shape[2:] and max(given[1].shape[2:]) > 1:
            return "a convolution over positions"
        if func in _NORMS and of.numel in x.shape[2:]:
            return "a normalisation over positions"
        if func in _SOFTMAX and x.dim() > 2 and x.shape[-2:] == (of.numel, of.numel):
            return "attention without F.scaled_dot_product_attention, by a softmax of scores"
        if func in _ALONG and x.dim() == 3 and x.shape[1] == of.numel:
            dims = kwargs.get("dim", kwargs.get("dims", args[1] if len(args) > 1 else None))
            dims = dims if isinstance(dims, (tuple, list)) else (dims,)
            over = (1, -2, None) if func.__name__ in _OF_ALL else (1, -2)
            if any(dim in over for dim in dims if not isinstance(dim, Tensor)):
                return f"'{func.__name__}' over positions"
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


def _makes_a_mask() -> bool:
    """Whether the function that asks makes a mask for transformers, by indices of own positions."""
    names = (sys._getframe(n).f_globals.get("__name__") for n in range(4, 7))  # or behind a stage
    return "transformers.masking_utils" in names


def _text(part: Any) -> str:
    if not isinstance(part, slice):
        return str(part)
    return ":".join("" if end is None else str(end) for end in (part.start, part.stop))


def _arange_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    numbers = [*args, *(kwargs[name] for name in ("start", "end", "step") if name in kwargs)]
    if len(numbers) == 1:
        numbers = [0, *numbers]
    start, stop, step, *_ = [*numbers, 1]
    return start, stop, step
