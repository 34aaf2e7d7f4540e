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
from shardwise.parallel.flat import Flat


def boxes(engine: Any) -> list[Box]:
    """All boxes of this rank; `replica` is 0 on exactly one of the ranks that hold the same."""
    found: list[Box] = []
    masters = {id(f): engine.optimizer.masters.get(k) for k, f in enumerate(engine.optimizer.flats)}
    for flat in engine.flats:
        values = masters.get(id(flat))
        values = flat.shard if values is None else values
        copy = _copy_of(engine, flat)
        for index, name in enumerate(flat.names):
            found += _pieces(flat, index, f"model/{name}", _piece(flat, index, values), copy)
    for flat, index, key, value in engine.optimizer.state():
        name = f"optim/{key}/{flat.names[index]}"
        if value.dim() == 0:
            found.append(Box(name, (), (), (), value, engine.data_rank))
        else:
            found += _pieces(flat, index, name, value.view(-1), _copy_of(engine, flat))
    for name, b in engine.model.named_buffers():
        zeros = (0,) * b.dim()
        found.append(
            Box(f"buffer/{name}", tuple(b.shape), zeros, tuple(b.shape), b, engine.data_rank)
        )
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
            found += _pieces(flat, index, f"grad/{name}", piece, _copy_of(engine, flat))
    return found


def _copy_of(engine: Any, flat: Flat) -> int:
    """Which of the ranks that hold the same block this one is."""
    return flat.replicate_axis.rank if flat.split else engine.data_rank


def _piece(flat: Flat, index: int, block: Tensor) -> Tensor:
    low, high = flat.pieces[index]
    return block[low:high]


def _pieces(flat: Flat, index: int, name: str, piece: Tensor, copy: int) -> Iterator[Box]:
    """One parameter's piece in this rank's block, cut into boxes of the whole parameter."""
    shape = tuple(flat.shapes[index])
    origin = flat.plan.origin(index, flat.rank)
    for box in cut(shape, origin, origin + piece.numel()):
        low = box.start - origin
        part = piece[low : low + box.numel]
        yield Box(name, shape, box.offsets, box.sizes, part.view(box.sizes), copy)


@torch.no_grad()
def refresh(engine: Any) -> None:
    """After loading: 16-bit weights follow their masters, gathered copies follow the pieces."""
    for k, flat in enumerate(engine.optimizer.flats):
        if k in engine.optimizer.masters:
            flat.shard.copy_(engine.optimizer.masters[k])
    engine.data.rest()
    engine.data.publish()
