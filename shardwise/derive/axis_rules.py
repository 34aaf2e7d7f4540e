"""Axes that the dims of tensors range over, and the rule of each operation of torch for them.

Every dim of a tensor is a product of axes, from major to minor:

    y = up(x)                   [B, T, F]           F is the output axis of the layer up
    y.view(B, T, H, D)          [B, T, H, D]        F is split into H and D
    y.view(B, T, K, G, D)       [B, T, K, G, D]     H is split into K and G
    y * z                                           axes of the same dim are united
    y.softmax(-1)                                   the last axis is mixed: it cannot be sharded

An axis that nothing mixes can be sharded: each rank holds a part of every tensor that has it.

A rule takes the dims of an operation's input tensors, and returns the dims of its first result.  An
operation without a rule mixes every axis of its inputs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

# --- axes -----------------------------------------------------------------------------------------


class TracedAxis:
    """One axis, split into parts or united with another; `mixed` says why none is sharded."""

    __slots__ = ("_mixed", "_parts", "_same", "size")

    def __init__(self, size: int, mixed: str = "") -> None:
        self.size = size
        self._same: TracedAxis | None = None
        self._parts: tuple[TracedAxis, TracedAxis] | None = None
        self._mixed = mixed

    @property
    def root(self) -> "TracedAxis":
        """The representative of all axes that are united with this one."""
        axis = self
        while axis._same is not None:
            axis = axis._same
        return axis

    @property
    def leaves(self) -> tuple["TracedAxis", ...]:
        root = self.root
        if root._parts is None:
            return (root,)
        return tuple(leaf for part in root._parts for leaf in part.leaves)

    @property
    def mixed(self) -> str:
        return self.root._mixed

    def mix(self, why: str) -> None:
        for leaf in self.leaves:
            leaf._mixed = leaf._mixed or why

    def split(self, major: int) -> None:
        """Split a leaf into `major` times the rest; both are mixed if it is."""
        root = self.root
        assert root._parts is None and root.size % major == 0
        root._parts = TracedAxis(major, root._mixed), TracedAxis(root.size // major, root._mixed)

    def unite(self, other: "TracedAxis") -> None:
        mine, theirs = self.root, other.root
        if mine is not theirs:
            mine._mixed = mine._mixed or theirs._mixed
            theirs._same = mine


#: The axes of one dim, from major to minor; a dim of size one has none.
Dim = tuple[TracedAxis, ...]


def fresh(size: int, mixed: str = "") -> Dim:
    return () if size == 1 else (TracedAxis(size, mixed),)


def leaves(dim: Iterable[TracedAxis]) -> list[TracedAxis]:
    return [leaf for axis in dim for leaf in axis.leaves]


def mix(dims: Iterable[Dim], why: str) -> None:
    for dim in dims:
        for axis in dim:
            axis.mix(why)


def unite(one: Dim, other: Dim) -> None:
    """Unite the axes of two dims of one size, after splitting them until they match."""
    left, right = leaves(one), leaves(other)
    while left and right:
        a, b = left[0], right[0]
        if a.size == b.size:
            a.unite(b)
            left, right = left[1:], right[1:]
        elif max(a.size, b.size) % min(a.size, b.size):
            mix((tuple(left), tuple(right)), "it is divided in two ways")
            return
        else:
            max(a, b, key=lambda axis: axis.size).split(min(a.size, b.size))
            left, right = leaves(left), leaves(right)


def regroup(dims: Sequence[Dim], sizes: Sequence[int]) -> tuple[Dim, ...]:
    """The dims of a view with these sizes. Axes that it divides unevenly are mixed."""
    rest = [leaf for dim in dims for leaf in leaves(dim)]
    found: list[Dim] = []
    for size in sizes:
        taken: list[TracedAxis] = []
        while (held := math.prod(axis.size for axis in taken)) < size and rest:
            wanted = size // held
            if size % held == 0 and wanted % rest[0].size == 0:
                taken.append(rest.pop(0))
            elif size % held == 0 and rest[0].size % wanted == 0:
                rest[0].split(wanted)
                rest = leaves(rest)
            else:
                break
        if math.prod(axis.size for axis in taken) != size:
            mix(dims, "a view divides it unevenly")
            return tuple(fresh(size, "a view divides it unevenly") for size in sizes)
        found.append(tuple(taken))
    return tuple(found)


Dims = tuple[Dim, ...]
#: rule(name, dims of each tensor argument, all arguments, result) -> dims of the result
Rule = Callable[[str, Sequence[Dims], Sequence[Any], Tensor], Dims]


def propagate(func: Any, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    """The dims of `out`, the result of `func`; unites and mixes the axes of `given`."""
    name = func._schema.name.partition("::")[2].removesuffix("_")
    rule = _RULES.get(name)
    if rule is None and torch.Tag.pointwise in func.tags:
        rule = _pointwise
    if rule is None and name.startswith("_scaled_dot_product"):
        rule = _attention
    return (rule or _unknown)(name, given, args, out)


def broadcast(given: Sequence[Dims], sizes: Sequence[int]) -> Dims:
    """The dims of an elementwise result: axes of the same dim are united."""
    found: list[Dim] = []
    for place, size in enumerate(sizes):
        held = [dims[place - len(sizes)] for dims in given if len(dims) >= len(sizes) - place]
        full = [dim for dim in held if dim]
        for other in full[1:]:
            unite(full[0], other)
        found.append(full[0] if full else fresh(size))
    return tuple(found)


def _pointwise(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    return broadcast(given, out.shape)


def _unknown(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    for dims in given:
        mix(dims, f"{name} may mix it")
    return tuple(fresh(size, f"{name} may mix it") for size in out.shape)


def _constant(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    """A tensor of one value, which a rank makes of its own length."""
    return tuple(fresh(size) for size in out.shape)


def _view(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    return regroup(given[0], out.shape)


def _expand(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    dims = ((),) * (out.dim() - len(given[0])) + tuple(given[0])
    return tuple(dim or fresh(size) for dim, size in zip(dims, out.shape, strict=True))


def _transpose(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    dims, (a, b) = list(given[0]), (args[1:3] if name == "transpose" else (0, 1))
    if len(dims) > 1:
        dims[a], dims[b] = dims[b], dims[a]
    return tuple(dims)


def _permute(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    return tuple(given[0][place] for place in args[1])


def _part(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    """A part of one dim: slice, narrow, split."""
    at = 2 if name.startswith("split") else 1
    dims, place = list(given[0]), (args[at] if len(args) > at else 0) % len(given[0])
    whole = _size(dims[place])
    if out.shape[place] != whole:
        mix([dims[place]], "the code takes a part of it")
        dims[place] = fresh(out.shape[place], "it is a part of an axis")
    return tuple(dims)


def _select(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    """One index of a dim: select, unbind."""
    place = (args[1] if len(args) > 1 else 0) % len(given[0])
    mix([given[0][place]], "the code takes one index of it")
    return given[0][:place] + given[0][place + 1 :]


def _cat(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    place = (args[1] if len(args) > 1 else 0) % out.dim()
    whole = [dims for dims in given if len(dims) == out.dim()]
    for dims in whole:
        mix([dims[place]], "it is joined with others")
    rest = [dims[:place] + dims[place + 1 :] for dims in whole]
    found = broadcast(rest, [*out.shape[:place], *out.shape[place + 1 :]])
    return (*found[:place], fresh(out.shape[place], "it is joined of several"), *found[place:])


def _stack(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    place = (args[1] if len(args) > 1 else 0) % out.dim()
    found = broadcast(given, [*out.shape[:place], *out.shape[place + 1 :]])
    return (*found[:place], fresh(out.shape[place], "it is stacked of several"), *found[place:])


def _along(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    mix([given[0][args[1] % len(given[0])]], f"{name.strip('_')} mixes it")
    return given[0]


def _reduce(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    """A sum, a mean, a maximum over dims; a vector norm has its order before them."""
    at = 2 if "norm" in name else 1
    dims, places = given[0], args[at] if len(args) > at else None
    listed = [places] if isinstance(places, int) else places
    reduced = {p % len(dims) for p in listed} if listed else set(range(len(dims)))
    mix([dims[p] for p in reduced], f"{name} mixes it")
    if out.dim() == len(dims):
        return tuple(() if p in reduced else dim for p, dim in enumerate(dims))
    return tuple(dim for p, dim in enumerate(dims) if p not in reduced)


def _norm(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    mix(given[0][len(given[0]) - len(args[1]) :], "a norm mixes it")
    return given[0]


def _triangle(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    mix(given[0][-2:], f"{name} mixes it")
    return given[0]


def _product(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    """A matrix product of the last two tensors; a third one, before them, is added."""
    left, right = given[-2:]
    mix([left[-1], right[-2]], "a product mixes it")
    unite(left[-1], right[-2])
    rows = (*broadcast([left[:-2], right[:-2]], out.shape[:-2]), left[-2], right[-1])
    return broadcast([rows, *given[:-2]], out.shape)


def _attention(name: str, given: Sequence[Dims], args: Sequence[Any], out: Tensor) -> Dims:
    """Attention of query [..., H, T, E] to key and value [..., K, S, E]; H is a multiple of K."""
    query, key, value = given[:3]
    mix([query[-1], key[-1], key[-2], value[-2]], "attention mixes it")
    unite(key[-2], value[-2])
    unite(key[-1], query[-1])
    for other in (key, value):
        for mine, theirs in zip(query[:-2], other[:-2], strict=True):
            groups = _size(mine) // max(1, _size(theirs))
            split = regroup([mine], [_size(theirs), groups])[0] if groups > 1 else mine
            unite(split, theirs)
            if not theirs:
                mix([mine], "heads share one key")
    scores, mask = (*query[:-1], key[-2]), [dims for dims in given[3:] if len(dims) > 1]
    for each in mask:
        broadcast([scores, each], [_size(dim) for dim in scores])
    return (*query[:-1], value[-1])


def _size(dim: Dim) -> int:
    return math.prod(axis.size for axis in dim)


_RULES: Final[dict[str, Rule]] = {
    "expand": _expand,
    "permute": _permute,
    "cat": _cat,
    "stack": _stack,
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _view),
    **dict.fromkeys(("unsqueeze", "squeeze"), _view),
    **dict.fromkeys(("transpose", "t"), _transpose),
    **dict.fromkeys(("slice", "narrow", "split", "split_with_sizes"), _part),
    **dict.fromkeys(("select", "unbind"), _select),
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum"), _along),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "var", "linalg_vector_norm"), _reduce),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm"), _norm),
    **dict.fromkeys(("tril", "triu"), _triangle),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), _product),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), _constant),
    **dict.fromkeys(("_to_copy", "detach", "alias", "lift_fresh", "clone", "copy"), _pointwise),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like"), _pointwise),
    **dict.fromkeys(("masked_fill", "native_dropout", "dropout", "fill", "zero"), _pointwise),
    **dict.fromkeys(("bernoulli", "div", "where", "contiguous"), _pointwise),
}
