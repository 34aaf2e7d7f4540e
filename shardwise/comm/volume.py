"""The volume of a collective: what one of n ranks hands to the others, where a library does it.

Ranks that hand each other messages are counted message by message.  Where one call gives a whole
collective to NCCL, to gloo or to threads that read each other's tensors, the messages are out of
sight, and what a rank hands over is this, of N elements passed to the call:

    all_reduce       2 N (n-1)/n   in a ring, one block of N/n in each of 2 (n-1) rounds: n-1 to add
                                   the blocks up, n-1 to pass the sums on
    reduce           N             from each rank but the root, whose sum it becomes
    broadcast        N (n-1)       from the root, N to each other rank
    all_gather       N (n-1)       N is a rank's own part, and every other rank needs it
    reduce_scatter   N (n-1)/n     every block but its own goes to the rank that sums it
    all_to_all       the split sizes of the other ranks, added up

Blocks may be uneven by an element; a rank is then counted with the average over the ranks, to the
nearest element.  (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", JPDC 2009.)  This is written apart from the prices of a prediction, which are
compared with what is counted here.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Volume(NamedTuple):
    """Elements that one rank hands over, and the number of ranks that receive some of them."""

    elements: int
    peers: int


NOTHING = Volume(0, 0)


def all_reduce(numel: int, ranks: int) -> Volume:
    """Of `numel` elements, in place."""
    return Volume(round(2 * (numel / ranks) * (ranks - 1)), ranks - 1)


def reduce(numel: int, is_root: bool) -> Volume:
    """Of `numel` elements to the root."""
    return NOTHING if is_root else Volume(numel, 1)


def broadcast(numel: int, ranks: int, is_root: bool) -> Volume:
    """Of `numel` elements from the root."""
    return Volume(numel * (ranks - 1), ranks - 1) if is_root else NOTHING


def all_gather(part_numel: int, ranks: int) -> Volume:
    """Of a rank's own part of `part_numel` elements."""
    return Volume(part_numel * (ranks - 1), ranks - 1)


def reduce_scatter(block_numel: int, ranks: int) -> Volume:
    """Of `ranks` blocks of `block_numel` elements."""
    return Volume(block_numel * (ranks - 1), ranks - 1)


def all_to_all(counts: Sequence[int], rank: int) -> Volume:
    """Of `counts[r]` elements to rank r, by rank `rank`."""
    others = [count for r, count in enumerate(counts) if r != rank and count]
    return Volume(sum(others), len(others))
