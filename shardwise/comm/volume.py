"""The volume of a collective that a library executes: what each of n ranks sends.

Messages between two ranks are counted one by one.  If one call executes a whole collective (NCCL,
gloo, or threads that read each other's tensors), its messages are not visible.  For N elements
passed to the call, a rank then sends by definition:

    all_reduce       2 N (n-1)/n   in a ring, one block of N/n in each of 2 (n-1) rounds: n-1 to
                                   add the blocks, n-1 to pass the sums on
    broadcast        N (n-1)       from the root, N to each other rank
    all_gather       N (n-1)       N is a rank's own part, and every other rank needs it
    reduce_scatter   N (n-1)/n     every block but its own goes to the rank that sums it
    all_to_all       the counts of the other ranks, added up

If the sizes of the blocks differ by one element, the count of a rank is the average over the ranks,
to the nearest element.  (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", JPDC 2009.)  This file is independent of the prices of a prediction, which are
compared with these counts.
"""

from collections.abc import Sequence


def volume(
    kind: str, numel: int, ranks: int, rank: int, root: int = 0, counts: Sequence[int] = ()
) -> tuple[int, int]:
    """Elements that `rank` sends, and the number of ranks that receive some of them.

    `numel` elements are passed to the call, `counts[r]` of them to rank r in an all_to_all.
    """
    others = ranks - 1
    match kind:
        case "all_reduce":
            return round(2 * (numel / ranks) * others), others
        case "broadcast":
            return (numel * others, others) if rank == root else (0, 0)
        case "all_gather":
            return numel * others, others
        case "reduce_scatter":
            return numel // ranks * others, others
        case "all_to_all":
            away = [count for r, count in enumerate(counts) if r != rank and count]
            return sum(away), len(away)
        case _:
            raise ValueError(f"{kind} is not a collective")
