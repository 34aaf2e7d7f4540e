"""What context parallelism sends in a pass, as numbers."""

from typing import NamedTuple

from shardwise.techniques.context.positions import SequenceCut


class AttentionCall(NamedTuple):
    """One attention of `rows` sequences in the module `layer`.

    `trained`: it has a backward pass. Ulysses sends the rows of a mask that differ:
    `mask_bytes` for each position and, if `mask_heads`, for each head.
    """

    layer: str
    cut: SequenceCut
    rows: int
    heads: int
    key_heads: int
    width: int
    element_bytes: int
    trained: bool
    mask_bytes: int = 0
    mask_heads: int = 1


class LossCount(NamedTuple):
    """One loss, whose labels the ranks count together."""
