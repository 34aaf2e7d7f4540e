"""Schedules with one stage per rank and one update per step: naive, GPipe, 1F1B, DAPPLE.

Legend: p ranks, m microbatches, r a rank, i a microbatch.
"""

from collections.abc import Callable, Iterator

from shardwise.core.errors import bad
from shardwise.core.schedule.action import Action
from shardwise.core.schedule.schedule import Schedule


def naive(p: int, m: int = 1) -> Schedule:
    """Model parallelism without pipelining: one microbatch, so one rank works at a time.

    rank 0   F . . . B B        bubble (p-1)/p
    rank 1   . F B B . .
    """
    is_one(m)
    return gpipe(p, m)


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards, the last microbatch first (arXiv 1811.06965, figure 2c).

    Bubble (p-1)/(m+p-1); every rank holds the activations of all m microbatches.
    """

    def order(r: int) -> Iterator[Action]:
        yield from (Action("F", r, i) for i in range(m))
        yield from (Action("B", r, i) for i in reversed(range(m)))

    return one_stage_a_rank(p, m, order)


def one_f_one_b(p: int, m: int) -> Schedule:
    """PipeDream-flush: p-r forwards, then backward and forward alternate.

    arXiv 2006.09503, section 3.2; 2104.04473, section 2.2.1. GPipe's bubble, and rank r holds
    the activations of min(p-r, m) microbatches.
    """
    return one_stage_a_rank(p, m, lambda r: alternate(r, m, p - r))


def dapple(p: int, m: int, policy: str = "A", most: int | None = None) -> Schedule:
    """Early backward (arXiv 2007.01045, section 3): k forwards before rank r's first backward.

    Policy A has k = min(p-r, D), the order of 1F1B; policy B has k = min(2(p-r)-1, D), which
    hides slow links at the price of more activations. D (`most`) is the number of microbatches
    whose activations fit in memory (default: all). A rank holds those of min(k, m).
    """
    limit = m if most is None else most
    if policy not in ("A", "B") or limit < 1:
        given = f"the policy '{policy}' with memory for {limit} microbatches"
        raise bad(given, "A or B, and one microbatch or more", 'policy="A"')

    def order(r: int) -> Iterator[Action]:
        return alternate(r, m, min(p - r if policy == "A" else 2 * (p - r) - 1, limit))

    return one_stage_a_rank(p, m, order)


def one_stage_a_rank(p: int, m: int, order: Callable[[int], Iterator[Action]]) -> Schedule:
    """The schedule with row order(r) on rank r, which owns stage r."""
    return Schedule(tuple(tuple(order(r)) for r in range(p)), tuple(range(p)), m)


def alternate(s: int, m: int, ahead: int) -> Iterator[Action]:
    """`ahead` forwards of stage s, then backward and forward alternate, then the last backwards."""
    ahead = min(ahead, m)
    yield from (Action("F", s, i) for i in range(ahead - 1))
    for i in range(m):
        if ahead - 1 + i < m:
            yield Action("F", s, ahead - 1 + i)
        yield Action("B", s, i)


def is_one(m: int) -> None:
    """Raise InputError unless there is one microbatch."""
    if m != 1:
        raise bad(f"{m} microbatches for naive", "one microbatch", f"naive, or gpipe:{m}")
