"""Traces the axes of every tensor, and the events, through one forward pass of the plain model.

A linear layer has an input and an output axis, the same in all its calls; its inner operations are
not traced.  A layer whose output is divided (chunk, split, slices) has an axis for each segment.
The trace ends with the model's forward, before the loss.

The sequence axis is dim 1 of what an embedding returns.  Operations without a rule pass it on.  An
operation *mixes* positions if a rank with a part of them computes something else: it is not
elementwise in them, or it combines them with a constant of their length.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.core.layouts.tensor_table import ModuleShape
from shardwise.derive.axis_rules import Dim, Dims, TracedAxis, fresh, leaves, mix, propagate, unite
from shardwise.observe import work
from shardwise.observe.meta_pass import as_on
from shardwise.techniques.data.outputs import tensors_in

Key = tuple[int, int, tuple[int, ...], tuple[int, ...]]


#: Operations that mix features or positions: their results are compared with the sharded model's.
CHECKED: Final = ("bmm", "baddbmm", "_softmax", "cat", "_scaled_dot_product_flash_attention")

#: Operations whose results have one value, which a rank makes of its own length.
UNIFORM: Final = ("zeros", "ones", "full", "empty", "scalar_tensor")

ATTENTION: Final = torch.ops.aten._scaled_dot_product_flash_attention.default


def checked(func: Any) -> bool:
    return named(func) in CHECKED


class TracedLayer:
    """A linear layer or an embedding: its axes, and the segments that the code divides it into."""

    def __init__(self, name: str, shape: ModuleShape) -> None:
        self.name, self.shape = name, shape
        self.inputs = TracedAxis(shape.in_features)
        self.outputs = TracedAxis(shape.out_features)
        self.segments: dict[tuple[int, int], TracedAxis] = {}
        self.called = False

    def segment(self, start: int, stop: int) -> Dim:
        return (self.segments.setdefault((start, stop), TracedAxis(stop - start)),)


class OperationTrace:
    """The axes of a model's tensors, layer by layer; see `traced`."""

    def __init__(self, model: nn.Module, shapes: Mapping[str, ModuleShape]) -> None:
        self.layers = {n: TracedLayer(n, s) for n, s in shapes.items() if s.kind != "other"}
        self.inside = [""]
        #: dims of the tensors that a module reads or makes itself, and that pass through a layer
        self.touched: dict[str, list[Dims]] = {}
        #: pairs of a tensor that a gradient reaches and of what was computed with it
        self.met: list[tuple[Dims, Dims]] = []
        self.returned: list[Dims] = []
        #: names, dims and shapes of the results of `CHECKED` operations, in their order
        self.checked: list[tuple[str, Dims, tuple[int, ...]]] = []
        self.done = False
        self.events: list[TraceEvent] = []
        #: the positions of each embedding's output, in the order of calls; and what is made of them
        self.sequences: list[TracedAxis] = []
        self.positions: list[TracedAxis] = []
        self._known: dict[Key, Dims] = {}
        self._active: set[Key] = set()  # tensors that depend on parameters
        self._whole: dict[Key, TracedLayer] = {}  # undivided outputs of layers
        self._alive: list[Tensor] = []
        self._params = {_key(p): name for name, p in model.named_parameters()}
        #: parameters that code reads other than by calling their layer, and their dims
        self.read: dict[str, Dims] = {}

    # --- modules -------------------------------------------------------------------------------

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Set hooks on every module during the pass."""
        handles: list[Any] = []
        for name, module in model.named_modules():
            begin = partial(self._begin, name)
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            end = partial(self._end, name)  # before hooks of the model that gather its output
            handles.append(module.register_forward_hook(end, with_kwargs=True, prepend=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        first = next((x for x in tensors_in((args, kwargs)) if x.numel()), None)
        dims = () if first is None or self.done else (self._of(first),)
        self._note("call", name, dims)
        self.inside.append(name)

    def _note(self, kind: str, name: str, dims: tuple[Dims, ...], **more: bool) -> None:
        if not self.done and not self._in_layer:
            self.events.append(TraceEvent(kind, name, tuple(self.inside), dims, **more))

    def _end(self, name: str, _: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        self.inside.pop()
        self._note("end", name, ())
        if not name:
            self.returned = [self._of(x) for x in tensors_in(out) if x.numel()]
            self.done = True
        layer, given = self.layers.get(name), next(tensors_in((args, kwargs)), None)
        if layer is not None and given is not None and not self.done and not self._in_layer:
            self._call(layer, given, next(tensors_in(out)))

    @property
    def _in_layer(self) -> bool:
        return any(name in self.layers for name in self.inside)

    def _call(self, layer: TracedLayer, x: Tensor, y: Tensor) -> None:
        layer.called = True
        given, own = self._of(x), layer.outputs
        if layer.shape.kind == "linear":
            unite(given[-1], (layer.inputs,))
            given = given[:-1]
        else:
            own.mix("it is the width of an embedding")
            self.sequences += [leaf for dim in given[1:2] for leaf in leaves(dim)]
            self.positions += self.sequences[-1:]
        self.touched.setdefault(layer.name, []).append(given)
        self._keep(y, (*given, () if own.size == 1 else (own,)), active=True)
        self._whole[_key(y)] = layer

    # --- operations ----------------------------------------------------------------------------

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Trace the axes through an operation below autograd."""
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.numel()]
        if self.done or self._in_layer or func is work.ATTENTION:  # see `attention`
            return
        if named(func) in UNIFORM and not given:
            for y in (x for x in tree_leaves(out) if isinstance(x, Tensor) and x.numel()):
                self._keep(y, tuple(fresh(n) for n in y.shape), active=False)
            return
        if not any(
            _key(x) in self._known or _key(x) in self._params for x in given
        ) and not checked(func):
            return
        for place, y in enumerate(x for x in tree_leaves(out) if isinstance(x, Tensor)):
            if y.numel():
                self._result(func, given, args, y, place)

    def attention(self, given: Sequence[Tensor], out: Tensor) -> None:
        """A fused attention on the meta device; it raises as on others for a mask of all heads."""
        query, key, *rest = given
        scores = (*query.shape[:-1], key.shape[-2])
        for mask in rest[1:]:
            if torch.broadcast_shapes(mask.shape, scores) != scores:
                raise RuntimeError(f"a mask {tuple(mask.shape)} for scores {scores}")
        if not self.done:
            self._result(ATTENTION, given, (), out, 0)

    def _result(self, func: Any, given: Sequence[Tensor], args: Any, y: Tensor, place: int) -> None:
        dims = [self._of(x) for x in given]
        segment = self._segment(func, given, args, y, place)
        if segment is not None:
            found = (*dims[0][:-1], segment)
        elif place and "split" not in str(func) and "unbind" not in str(func):
            found = tuple(fresh(n, "it is a second result") for n in y.shape)
        else:
            mixes = mixes_positions(self.positions, func, dims, args, y)
            active = any(_key(x) in self._active for x in given)
            self._note("op", named(func), tuple(dims), mixes=mixes, active=active)
            found = propagate(func, dims, args, y)
        if len(found) != y.dim():
            mix([d for one in dims for d in one], f"{func} is not understood")
            found = tuple(fresh(n, f"{func} is not understood") for n in y.shape)
        if not place and checked(func):
            self.checked.append((named(func), found, tuple(y.shape)))
        active = [x for x in given if _key(x) in self._active or _key(x) in self._params]
        if active and self.positions and segment is None:
            self._follow_positions(dims, found)
        for x, own in zip(given, dims, strict=True):
            if _key(x) in self._params:
                self.read[self._params[_key(x)]] = own
                self.touched.setdefault(self.inside[-1], []).append(found)
            elif _key(x) in self._active and segment is None:
                self.met.append((own, found))
        self._keep(y, found, active=bool(active) and y.is_floating_point())

    def _follow_positions(self, given: Sequence[Dims], found: Dims) -> None:
        """A convolution returns as many positions [B, T, W], of an axis of their own."""
        before = {leaf for dims in given for dim in dims for leaf in leaves(dim)}
        new = [leaf for dim in found for leaf in leaves(dim) if leaf not in before and leaf.mixed]
        if len(found) == 3:
            self.positions += [leaf for leaf in new if leaf.size == self.positions[0].size]

    def _segment(
        self, func: Any, given: Sequence[Tensor], args: Any, y: Tensor, place: int
    ) -> Dim | None:
        """The segment of a layer's output that an operation takes; None for other operations."""
        name, whole = func._schema.name.partition("::")[2], given[0]
        layer = self._whole.get(_key(whole))
        if layer is None or name not in ("slice", "split", "split_with_sizes"):
            return None
        dim = args[1] if name == "slice" else args[2] if len(args) > 2 else 0
        size = y.shape[-1]
        if dim % whole.dim() != whole.dim() - 1 or size == whole.shape[-1]:
            return None
        if name == "slice":
            start = args[2] or 0
            start, steps = start % whole.shape[-1], args[4] if len(args) > 4 else 1
        else:
            steps, start = 1, int(y.storage_offset() - whole.storage_offset())
        return layer.segment(start, start + size) if steps == 1 else None

    # --- tensors -------------------------------------------------------------------------------

    def _of(self, x: Tensor) -> Dims:
        """The dims of a tensor; an unknown tensor has the axes of a constant."""
        key = _key(x)
        if key not in self._known:
            why = "" if key in self._params else "a constant or the batch has its size"
            self._keep(x, tuple(fresh(n, why) for n in x.shape), active=False)
        return self._known[key]

    def _keep(self, x: Tensor, dims: Dims, *, active: bool) -> None:
        key = _key(x)
        self._known[key] = dims
        self._whole.pop(key, None)
        self._alive.append(x)
        (self._active.add if active else self._active.discard)(key)

    def settle(self) -> None:
        """Mix axes after the pass: divided outputs, and those combined with replicated tensors."""
        for layer in self.layers.values():
            spans = sorted(layer.segments)
            stops = [0, *(stop for _, stop in spans)]
            exact = [start for start, _ in spans] == stops[:-1] and stops[-1] == layer.outputs.size
            if spans and (not exact or len(layer.outputs.leaves) > 1):
                for axis in layer.segments.values():
                    axis.mix("its layer is divided in several ways")
            if spans:
                layer.outputs.mix("the code divides it")
        for whole, made in self.met:
            mine = {leaf for dim in whole for leaf in leaves(dim)}
            for leaf in (leaf for dim in made for leaf in leaves(dim) if leaf not in mine):
                leaf.mix("a replicated tensor is combined with it")


def traced(
    model: nn.Module, shapes: Mapping[str, ModuleShape], call: Callable[[nn.Module], Any]
) -> OperationTrace:
    """The axes of `model` in `call(model)`."""
    trace = OperationTrace(model, shapes)
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        trace.watching(model),
        as_on(torch.device("cpu"), trace),
    ):
        call(model)
    trace.settle()
    return trace


def named(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def _key(x: Tensor) -> Key:
    """The memory of a tensor's elements: tensors with equal keys are views of the same elements."""
    return x.untyped_storage()._cdata, int(x.storage_offset()), tuple(x.shape), tuple(x.stride())


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceEvent:
    """A call of a module begins or ends ("call", "end"), or an operation runs ("op").
    `name` is the module's, or the operation's; `inside` has the modules that run, outermost first;
    `dims` are those of the first tensor argument, or of every argument of an operation.  `active`:
    a gradient may reach a parameter from it.
    """

    kind: str
    name: str
    inside: tuple[str, ...]
    dims: tuple[Dims, ...]
    active: bool = True
    mixes: bool = False

    def has(self, axes: set[TracedAxis]) -> bool:
        return any(leaf in axes for dims in self.dims for dim in dims for leaf in leaves(dim))


def mixes_positions(
    positions: Sequence[TracedAxis], func: Any, dims: Sequence[Dims], args: Any, out: Tensor
) -> bool:
    """Whether an operation mixes positions: its rule is applied with an axis of their own."""
    if not positions:
        return False
    roots = {axis.root for axis in positions}
    own = {size: TracedAxis(size) for size in {axis.size for axis in roots}}
    swapped = [_each(one, lambda leaf: own[leaf.size] if leaf in roots else leaf) for one in dims]
    used = {leaf for one in swapped for dim in one for leaf in dim} & {*own.values()}
    if not used:
        return False
    kept = {leaf for dim in propagate(func, swapped, args, out) for leaf in leaves(dim)}
    return any(a.mixed or len(a.leaves) > 1 or a.root not in kept for a in used)


def _each(dims: Dims, change: Callable[[TracedAxis], TracedAxis]) -> Dims:
    return tuple(tuple(change(leaf) for leaf in leaves(dim)) for dim in dims)
