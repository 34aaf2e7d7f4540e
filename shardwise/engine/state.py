"""this file is what an engine keeps, as boxes of whole named tensors, for a checkpoint.

    model/NAME           the weight, as precise as there is one (the fp32 master of a 16-bit one)
    optim/KEY/NAME       a state tensor of the optimizer, in the shape of the weight, or 0-d
    buffer/NAME          a buffer of the model

A name and its whole shape are all that survives: which row, how many ranks and which units there
were does not, so any plan can load what any other saved.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.core.boxes import boxes as cut
from shardwise.engine.box import Box
from shardwise.engine.tensor_layout import Held
from shardwise.parallel.data.flat_parameter import Flat


def boxes(engine: Any) -> list[Box]:
    """All boxes of this rank; `replica` is 0 on exactly one of the ranks that hold the same."""
    return [*weights(engine), *_optimizer(engine), *buffers(engine)]


def weights(engine: Any) -> list[Box]:
    """The boxes of this rank's pieces of the parameters."""
    found: list[Box] = []
    masters = {id(f): engine.optimizer.masters.get(k) for k, f in enumerate(engine.optimizer.flats)}
    for flat in engine.flats:
        values = masters.get(id(flat))
        values = flat.shard if values is None else values
        copy = _copy_of(engine, flat)
        for index, name in enumerate(flat.names):
            found += _pieces(
                engine, flat, index, f"model/{name}", _piece(flat, index, values), copy
            )
    return found


def _optimizer(engine: Any) -> list[Box]:
    """The boxes of this rank's states of the optimizer."""
    found: list[Box] = []
    for flat, index, key, value in engine.optimizer.tensors():
        name = f"optim/{key}/{flat.names[index]}"
        if value.dim() == 0:
            holder = flat.plan.offsets[index] // max(1, flat.plan.share)  # of its first element
            copy = _copy(engine, holder) + _tied(engine, flat.names[index])
            found.append(Box(name, (), (), (), value, copy))
        else:
            found += _pieces(engine, flat, index, name, value.view(-1), _copy_of(engine, flat))
    return found


def buffers(engine: Any) -> list[Box]:
    """The model's buffers."""
    found: list[Box] = []
    for name, b in engine.model.named_buffers():
        zeros = (0,) * b.dim()
        copy = _copy(engine) + (engine.staging.copy(name) if engine.staging else 0)
        found.append(Box(f"buffer/{name}", tuple(b.shape), zeros, tuple(b.shape), b, copy))
    return found


def gradients(engine: Any) -> list[Box]:
    """This rank's pieces of the gradients, named "grad/NAME", as the last update used them."""
    found: list[Box] = []
    for k, flat in enumerate(engine.optimizer.flats):
        if flat.gshard is None:
            continue
        # 16-bit gradients are multiplied on their way to the master, others in place
        factor = engine.optimizer.factor if k in engine.optimizer.masters else 1.0
        used = flat.gshard.float() * factor if factor != 1.0 else flat.gshard
        for index, name in enumerate(flat.names):
            piece = _piece(flat, index, used)
            found += _pieces(engine, flat, index, f"grad/{name}", piece, _copy_of(engine, flat))
    return found


def _copy_of(engine: Any, flat: Flat) -> int:
    """Which of the ranks that hold the same block this one is."""
    return flat.replicate_axis.rank if flat.split else engine.data_rank


def _piece(flat: Flat, index: int, block: Tensor) -> Tensor:
    low, high = flat.pieces[index]
    return block[low:high]


def _copy(engine: Any, first: int = 0) -> int:
    """Which of all ranks this one is, as far as they hold the same, from shard rank `first` on."""
    shard, replicate = engine.axes
    rank = replicate.rank * shard.size + (shard.rank - first) % shard.size
    return rank + engine.data_ranks * engine.tensors.axis.rank


def _tied(engine: Any, name: str) -> int:
    """Which of the pipeline's ranks that hold the parameter this one is."""
    tie = engine.staging.ties.get(name) if engine.staging else None
    return tie.replica if tie else 0


def _pieces(
    engine: Any, flat: Flat, index: int, name: str, piece: Tensor, copy: int
) -> Iterator[Box]:
    """One parameter's piece in this rank's block, cut into boxes of the whole parameter."""
    here, held = tuple(flat.shapes[index]), engine.tensors.of(flat.names[index])
    whole = held.cut.whole_shape(here) if held.cut else here
    copy += held.replica + _tied(engine, flat.names[index])
    origin = flat.plan.origin(index, flat.rank)
    for box in cut(here, origin, origin + piece.numel()):
        low = box.start - origin
        values = piece[low : low + box.numel].view(box.sizes)
        for offsets, part, also in _spread(held, engine.tensors.axis.rank, box.offsets, values):
            yield Box(name, whole, offsets, tuple(part.shape), part, copy + also)


def _spread(
    held: Held, rank: int, offsets: tuple[int, ...], values: Tensor
) -> Iterator[tuple[tuple[int, ...], Tensor, int]]:
    """A box of a tensor rank's part as boxes of the whole.

    Where each begins, its values, and which of the ranks that hold it in common this one is.
    """
    cut, common = held.cut, held.common
    if cut is None:
        yield offsets, values, 0
        return
    low, dim = offsets[cut.dim], cut.dim
    for here, there, length in cut.spans(rank, low, low + values.shape[dim]):
        also = common.line.rank if common is not None and common.includes(here) else 0
        part = values.narrow(dim, here - low, length)
        yield (*offsets[:dim], there, *offsets[dim + 1 :]), part, also


@torch.no_grad()
def refresh(engine: Any) -> None:
    """After loading: 16-bit weights follow their masters, gathered copies follow the pieces."""
    for k, flat in enumerate(engine.optimizer.flats):
        if k in engine.optimizer.masters:
            flat.shard.copy_(engine.optimizer.masters[k])
    engine.data.units.rest()
    engine.data.units.publish()
