"""The shard of a tensor that a rank of the axis `cp` holds."""

from torch import Tensor

from shardwise.comm.move import part
from shardwise.techniques.context.positions import SequenceCut


def shard(x: Tensor, cut: SequenceCut, rank: int, dim: int) -> Tensor:
    """The positions of `rank` in dim `dim` of `x`, which has `cut.length`; a new tensor."""
    return part(x, cut.on(dim), rank)
