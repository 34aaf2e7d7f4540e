"""Boxes: a rectangle of a whole named tensor, and the live data that fills it; those of a block."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.core.layouts.flatten import Box1
from shardwise.core.layouts.flatten import boxes as blocks_of
from shardwise.core.layouts.param_layout import AxisLayout
from shardwise.engine.optimizer.norm import squared_norm
from shardwise.flat.flat_parameter import Flat

#: The offsets of a box, its values, and the index of this rank among its holders.
Part = tuple[tuple[int, ...], Tensor, int]


@dataclass(frozen=True)
class Box:
    """Elements [offsets, offsets + sizes) of the whole tensor `name` of `shape`.
    `tensor` is the live data viewed with `sizes`: saving reads it, loading writes to it.  Of the
    ranks that hold the same box, the one with `replica` 0 writes it.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Tensor
    replica: int = 0

    @classmethod
    def full(cls, name: str, tensor: Tensor, replica: int = 0) -> "Box":
        shape = tuple(tensor.shape)
        return cls(name, shape, (0,) * len(shape), shape, tensor, replica)


def block(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


# --- of a flat parameter --------------------------------------------------------------------------


def data_copy(flat: Flat, first: int = 0) -> int:
    """The index of this rank among the data ranks with the same data, from shard rank `first`."""
    shard, replicate = flat.shard_axis, flat.replicate_axis
    return replicate.rank * shard.size + (shard.rank - first) % shard.size


def block_copy(flat: Flat) -> int:
    """The index of this rank among the data ranks with the same block."""
    return flat.replicate_axis.rank if flat.split else data_copy(flat)


def pieces(flat: Flat, index: int, name: str, piece: Tensor) -> Iterator[Box]:
    """One parameter's piece in this rank's block, cut into boxes of the whole parameter."""
    here, layout = tuple(flat.shapes[index]), flat.layouts[index]
    whole = layout.full_shape(here)
    copy = block_copy(flat) + layout.replica(flat.local.coordinates)
    origin = flat.plan.origin(index, flat.rank)
    found = blocks_of(here, origin, origin + piece.numel())
    if not math.prod(here) and flat.rank == 0:
        found = [Box1((0,) * len(here), here, origin)]
    for box in found:
        low = box.start - origin
        values = piece[low : low + box.numel].view(box.sizes)
        parts: Iterable[Part] = [(box.offsets, values, copy)]
        for axis, on in layout.axes:
            parts = [
                part
                for each in parts
                for part in _spread(on, flat.local.coordinates.get(axis, 0), *each)
            ]
        for offsets, part, replica in parts:
            yield Box(name, whole, offsets, tuple(part.shape), part, replica)


def _spread(
    on: AxisLayout, rank: int, offsets: tuple[int, ...], values: Tensor, copy: int
) -> Iterator[Part]:
    """Convert a box of a rank's part on an axis to boxes of the tensor on the full axis."""
    if on.cut is None:
        yield offsets, values, copy
        return
    low, dim, shared = offsets[on.cut.dim], on.cut.dim, on.shared(rank)
    for here, there, length in on.cut.spans(rank, low, low + values.shape[dim]):
        also = shared.ranks.index(rank) if shared and shared.includes(here) else 0
        part = values.narrow(dim, here - low, length)
        yield (*offsets[:dim], there, *offsets[dim + 1 :]), part, copy + also


# --- the squares of a gradient --------------------------------------------------------------------


def squares(flat: Flat) -> Tensor:
    """Of the gradient in this rank's block, without the parts that another rank counts."""
    gshard, coordinates = flat.grads.gshard, flat.local.coordinates
    assert gshard is not None
    total = squared_norm(gshard)
    for index, layout in enumerate(flat.layouts):
        shared = any(on.shared(coordinates.get(axis, 0)) for axis, on in layout.axes)
        for box in pieces(flat, index, "", gshard[slice(*flat.pieces[index])]) if shared else ():
            if box.replica != block_copy(flat):
                total = total - squared_norm(box.tensor.flatten())
    return total


def counts(flat: Flat) -> bool:
    """Whether this rank, of all that hold its block, counts the block's squares."""
    return flat.layouts[0].replica(flat.local.coordinates) == 0
