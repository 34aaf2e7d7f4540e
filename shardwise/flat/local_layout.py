"""The layouts of a flat parameter, and the places of its parameters on this rank.

    whole   | p0 ........ | p1 ..... | p2 ............ |     view(1, whole): in p1's own shape
    blocks  | rank 0            | rank 1               |     piece(1, block): rank r's part of p1

A piece has as many dims as its parameter: k elements of a matrix are [k, 1], so that a choice by
p.ndim is the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.tiers.arena import Arena
from shardwise.comm.tiers.disk import Disk
from shardwise.comm.tiers.tiers import Tiers
from shardwise.comm.world import Axis
from shardwise.core.layouts.flatten import flatten
from shardwise.core.layouts.param_layout import Layout
from shardwise.core.zero import RowMove


@dataclass(frozen=True)
class LocalLayout:
    """The layouts of a flat parameter's parameters, which are of one kind, and this rank's part.

    sums         axes other than the data's over which the gradient is summed
    coordinates  this rank's coordinate on the axes other than the data's
    tiers        between which this rank copies what the row moves
    arena        holds the gradients of a backward pass until they are reduced
    late         whether updates read gradients on the host while others arrive there
    disk         holds the parameters, if the row says so
    compute      the dtype of parameters while they are used; None: their own
    """

    layouts: Sequence[Layout]
    shard: Axis
    replicate: Axis
    sums: Sequence[Axis]
    coordinates: Mapping[str, int]
    tiers: Tiers
    arena: Arena
    late: bool = False
    disk: Disk | None = None
    compute: torch.dtype | None = None

    def axis(self, move: RowMove) -> Axis:
        return self.shard if move.axis == "shard" else self.replicate


class FlatViews:
    """The views of flat tensors with the offsets of one flat parameter, in `ranks` blocks."""

    def __init__(
        self, shapes: Sequence[torch.Size], element_bytes: int, ranks: int, rank: int
    ) -> None:
        self.shapes, self.rank = list(shapes), rank
        self.strides = [
            torch.empty(shape, dtype=torch.int8, device="meta").stride() for shape in shapes
        ]
        self.plan = flatten([shape.numel() for shape in shapes], element_bytes, ranks)
        self.pieces = [self.plan.piece(index, rank) for index in range(len(self.shapes))]
        offsets, numels = self.plan.offsets, self.plan.numels
        ends = [0, *(offset + numel for offset, numel in zip(offsets, numels, strict=True))]
        pairs = zip(ends, [*offsets, self.plan.padded], strict=True)
        self.gaps = [(end, begin) for end, begin in pairs if begin > end]  # the padding

    def block(self, whole: Tensor) -> Tensor:
        if self.plan.ranks == 1:
            return whole
        return whole.view(self.plan.ranks, self.plan.share)[self.rank]

    def piece(self, index: int, block: Tensor) -> Tensor:
        """The part of parameter `index` in this rank's `block`: [k, 1, ..., 1], with as many dims.

        The k elements are along another dim where [k, 1, ..., 1] would broadcast to the parameter's
        shape: arithmetic on a piece and a full tensor is an error. A 0-d parameter stays 0-d on the
        rank that holds its element, and is [0] elsewhere.
        """
        (low, high), shape = self.pieces[index], self.shapes[index]
        count, dims = high - low, len(shape)
        if dims == 0 and count:
            return block[low]
        sizes = [1] * max(1, dims)
        sizes[next((dim for dim in range(dims) if shape[dim] not in (1, count)), 0)] = count
        return block[low:high].view(sizes)

    def view(self, index: int, whole: Tensor) -> Tensor:
        """The place of parameter `index` in `whole`, in its own shape."""
        offset = whole.storage_offset() + self.plan.offsets[index]
        return whole.as_strided(self.shapes[index], self.strides[index], offset)

    def every(self, whole: Tensor) -> list[Tensor]:
        first = whole.storage_offset()
        own = zip(self.shapes, self.strides, self.plan.offsets, strict=True)
        return [whole.as_strided(shape, stride, first + offset) for shape, stride, offset in own]

    def part(self, index: int, block: Tensor) -> Tensor:
        """The piece, or all of the parameter if it is not split: an optimizer works on it."""
        return self.view(index, block) if self.plan.ranks == 1 else self.piece(index, block)
