"""The layouts of a flat parameter, and where this rank is in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.tiers.arena import Arena
from shardwise.comm.tiers.disk import Disk
from shardwise.comm.tiers.tiers import Tiers
from shardwise.comm.world import Axis
from shardwise.core.layouts.param_layout import Layout
from shardwise.core.zero import RowMove


@dataclass(frozen=True)
class LocalLayout:
    """The layouts of a flat parameter's parameters, which are of one kind, and this rank's part.

    sums         axes other than the data's over which the gradient is summed
    coordinates  this rank's coordinate on the axes other than the data's
    tiers        between which this rank copies what the row moves
    arena        where the gradients of a backward pass lie until they are reduced
    late         whether updates read gradients on the host while others arrive there
    disk         where parameters rest, if the row says so
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
        """The axis of a move."""
        return self.shard if move.axis == "shard" else self.replicate
