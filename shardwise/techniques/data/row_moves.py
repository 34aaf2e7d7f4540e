"""The moves of a row for one flat parameter, with this rank's axes.

gather       the move of the parameter to R: before use (zero3) or after the update (zero1, zero2)
reduce       the move of the gradient from P: after each backward pass, or once before the update
replicas     the axes over which the reduced block is then summed, once before the update
host_update  whether it is then copied to host memory, for an update there
on_disk      whether its optimizer's state rests on a disk, from where it comes for the update
fetch        the tier from which the parameter is copied to the device before use; None: it is there
"""

from dataclasses import dataclass

from shardwise.comm.world import Axis
from shardwise.core.layout import P, Placement
from shardwise.core.moves import what
from shardwise.core.zero import Moment, Row, RowMove, Tier


@dataclass(frozen=True)
class AxisMove:
    """A move between two placements on an axis of this rank."""

    axis: Axis
    src: Placement
    dst: Placement


@dataclass(frozen=True)
class RowMoves:
    """The moves of one flat parameter in a step; None where nothing is sent."""

    gather: AxisMove | None
    reduce: AxisMove | None
    each_backward: bool  # whether `reduce` runs after each backward pass
    replicas: tuple[Axis, ...]
    host_update: bool
    on_disk: bool = False
    fetch: Tier | None = None


def row_moves(row: Row, shard: Axis, replicate: Axis, *, trained: bool) -> RowMoves:
    """The moves of `row` on its two axes, for trained or for frozen parameters."""

    def axis_move(move: RowMove) -> AxisMove:
        return AxisMove(shard if move.axis == "shard" else replicate, move.src, move.dst)

    moves = [
        move
        for move in row.moves()
        if axis_move(move).axis.size > 1
        and move.src_tier == move.dst_tier
        and what(move.src, move.dst) != "take_block"
        and (trained or move.moment is Moment.USE)
    ]
    gather = next((axis_move(move) for move in moves if move.state == "param"), None)
    sums = [move for move in moves if move.src == P]
    return RowMoves(
        gather,
        axis_move(sums[0]) if sums else None,
        any(move.moment is Moment.BACKWARD for move in sums),
        tuple(axis_move(move).axis for move in sums[1:]),
        host_update=trained and row.optim_tier != "device",
        on_disk=trained and row.optim_tier == "disk",
        fetch=None if row.param_tier == "device" else row.param_tier,
    )
