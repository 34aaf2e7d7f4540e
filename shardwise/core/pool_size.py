"""The size of each rank's pool of communication buffers, which the plan fixes.

Messages that a rank receives beside its own copy of the data, and sums of 16-bit numbers in fp32,
lie in one pool (comm/pool.py). A message that would take more than a quarter of it is sent in
pieces, so neither a larger model nor a larger world takes more memory. (Constant-size buffers,
C_B: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 6.2.)
"""

from typing import Final

from shardwise.core.plan import Plan

#: A room of the pool, the memory of one piece, is at most one of so many parts of it.
ROOMS: Final = 4
#: The smallest message of a piece; every tensor in the pool begins at a multiple of it.
PIECE_BYTES: Final = 64
#: In units of a message in 16 bits: two sums of it in fp32.
SUMS: Final = 4
#: Without a plan word: so many buckets, which hold two full ones in flight; or what the model has.
BUCKETS: Final = 2


def pool_bytes(plan: Plan, model_bytes: int) -> int:
    """The bytes of each rank's pool; 0 for a plan of one rank, which sends nothing.

    `model_bytes` are those of the whole model's parameters. A small model needs no larger pool; a
    model of two buckets or more has no part in it.
    """
    if plan.size == 1:
        return 0
    model_bytes += -model_bytes % (ROOMS * PIECE_BYTES)
    usual = min(BUCKETS * plan.bucket_bytes, model_bytes)
    return plan.buffers_bytes or max(usual, smallest_pool_bytes(plan))


def smallest_pool_bytes(plan: Plan) -> int:
    """The smallest pool with which the ranks of the plan's longest axis can sum a piece.

    A piece has a message from each other rank, perhaps a copy of what each is sent, and the sums.
    """
    longest = max((size for _, size in plan.axes), default=1)
    return ROOMS * PIECE_BYTES * (2 * (longest - 1) + SUMS)


def room_bytes(pool: int) -> int:
    """The bytes of the largest room of a pool of `pool` bytes."""
    return pool // ROOMS // PIECE_BYTES * PIECE_BYTES


def piece_bytes(room: int, messages: int, *, sums: bool) -> int:
    """The largest size of `messages` messages (and, with `sums`, two fp32 sums) in one room."""
    return room // PIECE_BYTES // (messages + SUMS * sums) * PIECE_BYTES
