"""this file is how a model's tensors on the tensor axis are known by those who draw for them.

    colwise                        what comes out is cut by its features, or by heads
    rowwise, colwise_gather_...    what comes out is of the stream again
    vocabulary (an embedding)      what comes out is of the stream
    gather, sequence:join          what goes in, or comes out, is the whole sequence
    split                          what goes in is a shard of it

The stream is whole, or under sp a shard of the sequence.  See parallel/tensor/dropout.py.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import broadcast
from shardwise.comm.world import Axis
from shardwise.core.styles import ModuleShape, Style
from shardwise.core.tensor_plan import Table, cuts
from shardwise.core.uneven import even, wide
from shardwise.engine.tensor_layout import Tensors
from shardwise.parallel.tensor.dropout import Columns, Cutting, Draws, Mark, Shard


def follow(
    model: nn.Module,
    styles: Mapping[str, Style],
    known: Mapping[str, ModuleShape],
    table: Table,
    tensors: Tensors,
) -> "Marks":
    """Hook the modules that have a style, so that `tensors.draws` knows what they make.

    Before the hooks that change what comes out, each of which is put first, ahead of the user's.
    """
    marks = Marks(tensors)
    tensors.draws = marks.draws = Draws(tensors.axis, model.modules())
    for name, style in styles.items():
        module = model.get_submodule(name)
        match style.name:
            case "colwise":
                columns = _columns(style, known[name], table, tensors.axis.size)
                module.register_forward_hook(marks.cut(columns), prepend=True)
            case "rowwise" | "rowwise_split_input":
                module.register_forward_hook(marks.made(style.by != "whole"), prepend=True)
            case "vocabulary" if isinstance(module, nn.Embedding):
                module.register_forward_hook(marks.made(style.by == "sequence"), prepend=True)
            case "colwise_gather_output":
                module.register_forward_hook(marks.made(shards=False), prepend=True)
            case "sequence" if style.by == "join":
                module.register_forward_hook(marks.made(shards=False), prepend=True)
            case _:
                pass
    return marks


def enter(model: nn.Module, styles: Mapping[str, Style], marks: "Marks") -> None:
    """The same of what goes in, after the hooks that change it, each of which is put last."""
    for name, style in styles.items():
        if style.name in ("gather", "split"):
            given = marks.given(style.name == "split")
            model.get_submodule(name).register_forward_pre_hook(given, with_kwargs=True)


def agree(axis: Axis, device: torch.device) -> None:
    """The first rank's generators are everyone's: the ranks of `axis` draw alike from here on."""
    everyones = broadcast(torch.get_rng_state().to(device), axis)
    torch.set_rng_state(everyones.cpu())
    if device.type == "cuda":
        everyones = broadcast(torch.cuda.get_rng_state(device).to(device), axis)
        torch.cuda.set_rng_state(everyones.cpu(), device)


class Marks:
    """Hooks that mark tensors, where somebody looks at marks."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.draws = tensors.draws

    def cut(self, columns: Columns) -> Any:
        """A forward hook: what comes out is cut so."""

        def after(_: nn.Module, __: Any, y: Any) -> None:
            if self.draws.on and isinstance(y, Tensor):
                self.draws.put(y, Cutting(columns, y.shape[:-1].numel()))

        return after

    def made(self, shards: bool) -> Any:
        """A forward hook: what comes out is whole, or shards of the sequence where it is split."""

        def after(_: nn.Module, __: Any, y: Any) -> None:
            if self.draws.on and isinstance(y, Tensor):
                self.draws.put(y, self._shard(y, shards))

        return after

    def given(self, shards: bool) -> Any:
        """The same of what goes in, as a forward pre-hook."""

        def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            tensors = (x for x in (*args[:1], *kwargs.values()) if isinstance(x, Tensor))
            first = next(tensors, None)
            if self.draws.on and first is not None:
                self.draws.put(first, self._shard(first, shards))

        return before

    def _shard(self, x: Tensor, shards: bool) -> Mark | None:
        stream = self.tensors.stream
        if not (shards and stream.split and x.dim() > 1):
            return None
        size = x.shape[-2]
        return Shard(stream.lengths.whole(size), stream.axis.size, size)


def _columns(style: Style, shape: ModuleShape, table: Table, ranks: int) -> Columns:
    """How the outputs of a colwise lie."""
    cut = cuts(style, shape, table, ranks)
    assert cut is not None
    own = cut.on(0)
    if not style.by_heads:
        part = even(0, shape.out_features // style.parts, ranks)
        return Columns((own, part) if style.parts > 1 else (own,))
    queries, keys = table.head_cuts(ranks)
    leading = partial(Columns, heads=(queries, keys), weight=2)
    serving = partial(Columns, heads=(keys, queries))
    if style.by == "kv_heads":
        return serving((own,))
    if style.by == "heads":
        return leading((own,))
    width = shape.out_features // (queries.whole + 2 * keys.whole)
    q, kv = leading((wide(queries, 0, width),)), serving((wide(keys, 0, width),))
    return leading((own,), parts=(q, kv, kv))
