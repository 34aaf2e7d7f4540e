"""Schedules with whole backward passes: 1F1B and its kin, asynchronous and interleaved ones.

Asynchronous schedules update without draining the pipeline.  The backward pass of a microbatch must
use the same weights as its forward pass, so old versions are stashed while a microbatch needs them.
On stage s, microbatch i uses the weights after max(0, i // update - lag[s]) updates:

                             update    lag[s]    versions held by stage s
    PipeDream                1         p-1-s     p-s
    2BW                      m         1         2

Interleaved schedules have v stages per rank, stage s on rank s mod p: a microbatch passes every
rank v times.  Stages are v times smaller, so the pipeline fills v times faster: the bubble is v
times smaller, for v times the messages.

Legend: p ranks, m microbatches, v chunks a rank, r a rank, s a stage, i a microbatch.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from shardwise.core.errors import bad
from shardwise.core.schedule.schedule import Action, Op, Schedule


def naive(p: int, m: int = 1) -> Schedule:
    """Model parallelism without pipelining: one rank works at a time, so the bubble is (p-1)/p."""
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
    arXiv 2006.09503, section 3.2; 2104.04473, section 2.2.1. GPipe's bubble, and rank r holds the
    activations of min(p-r, m) microbatches.
    """
    return one_stage_a_rank(p, m, lambda r: alternate(r, m, p - r))


def one_stage_a_rank(p: int, m: int, order: Callable[[int], Iterator[Action]]) -> Schedule:
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
    if m != 1:
        raise bad(f"{m} microbatches for naive", "one microbatch", f"naive, or gpipe:{m}")


# --- asynchronous schedules -----------------------------------------------------------------------


def pipedream(p: int, m: int) -> Schedule:
    """1F1B with an update after every backward (SOSP 2019; arXiv 1806.03377): m updates.
    Both passes of a microbatch use the weights of each stage that were newest in its forward pass.
    The pipeline drains after m microbatches, the end of a step.  The number of versions reaches its
    formula if m >= 2(p-1).
    """
    lag = tuple(p - 1 - s for s in range(p))
    return _updated(one_stage_a_rank(p, m, lambda r: alternate(r, m, p - r)), 1, lag)


def two_buffered(p: int, m: int, batches: int = 1) -> Schedule:
    """PipeDream-2BW: 1F1B with an update after every m microbatches, m >= p (arXiv 2006.09503).
    Every microbatch of a batch uses the weights that the previous batch began with, so two versions
    suffice. The pipeline does not drain between the `batches` of m microbatches.
    """
    covers(p, m)
    order = one_stage_a_rank(p, m * batches, lambda r: alternate(r, m * batches, p - r))
    return _updated(order, m, (1,) * p)


def _updated(schedule: Schedule, update: int, lag: tuple[int, ...]) -> Schedule:
    """Add U after the backward pass of every `update`-th microbatch."""
    rows = (
        (part for action in schedule.actions(rank) for part in (action, *_update(action, update)))
        for rank in range(schedule.ranks)
    )
    return replace(schedule, rows=tuple(map(tuple, rows)), update=update, lag=lag)


def _update(action: Action, update: int) -> tuple[Action, ...]:
    ends = action.op == "B" and (action.microbatch + 1) % update == 0
    return (action._replace(op="U"),) if ends else ()


def covers(p: int, m: int) -> None:
    if m < p:
        given = f"{m} microbatches a batch for 2BW on {p} ranks"
        raise bad(given, f"as many as there are ranks, or more: from {p} up", f"2bw:{p}")


# --- interleaved schedules ------------------------------------------------------------------------


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B, depth first (arXiv 2104.04473, section 2.2): groups of p microbatches.
    m must be a multiple of p. Bubble (p-1)/(v·m+p-1); rank r holds the activations of
    min(2(p-r-1)+(v-1)p+1, v·m) chunks. With one chunk it is 1F1B.
    """
    divides(p, m, v)

    def nth(k: int, r: int, op: Op) -> Action:
        chunk = k // p % v
        stage = (chunk if op == "F" else v - 1 - chunk) * p + r
        return Action(op, stage, k // (p * v) * p + k % p)

    def order(r: int) -> Iterator[Action]:
        """The row of rank r, chunk by chunk in groups of p microbatches."""
        ahead = min((p - r - 1) * (2 if v > 1 else 1) + (v - 1) * p, m * v)
        yield from (nth(k, r, "F") for k in range(ahead))
        for k in range(m * v):
            if ahead + k < m * v:
                yield nth(ahead + k, r, "F")
            yield nth(k, r, "B")

    return _loop(p, m, v, [list(order(r)) for r in range(p)])


def breadth_first(p: int, m: int, v: int) -> Schedule:
    """All microbatches through one chunk, then through the next (arXiv 2211.05953).
    Suits zero3: a rank gathers each stage's parameters once forward and once backward. Bubble
    (p-1)/(v·m+p-1) if m >= p; every rank holds the activations of all v·m chunks.
    """

    def order(r: int) -> Iterator[Action]:
        stages = range(r, p * v, p)
        yield from (Action("F", s, i) for s in stages for i in range(m))
        yield from (Action("B", s, i) for s in reversed(stages) for i in range(m))

    return _loop(p, m, v, [list(order(r)) for r in range(p)])


def _loop(p: int, m: int, v: int, rows: list[list[Action]]) -> Schedule:
    return Schedule(tuple(map(tuple, rows)), tuple(s % p for s in range(p * v)), m)


def divides(p: int, m: int, v: int) -> None:
    if m % p:
        given = f"{m} microbatches for interleaved 1F1B on {p} ranks"
        near = max(round(m / p), 1) * p
        raise bad(given, f"multiples of {p}: {p}, {2 * p}, {3 * p}, ...", f"interleaved:{near}x{v}")
