"""Interleaved schedules: v stages per rank, stage s on rank s mod p.

                 chunk 0   chunk 1        A microbatch passes every rank v times. Stages are
        rank 0   stage 0   stage 3        v times smaller, so the pipeline fills v times faster:
        rank 1   stage 1   stage 4        the bubble is v times smaller, for v times the
        rank 2   stage 2   stage 5        messages.

Legend: p ranks, m microbatches, v chunks a rank.
"""

from collections.abc import Iterator

from shardwise.core.errors import bad
from shardwise.core.schedule.action import Action, Op
from shardwise.core.schedule.schedule import Schedule


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
    """Raise InputError unless m is a multiple of p."""
    if m % p:
        given = f"{m} microbatches for interleaved 1F1B on {p} ranks"
        near = max(round(m / p), 1) * p
        raise bad(given, f"multiples of {p}: {p}, {2 * p}, {3 * p}, ...", f"interleaved:{near}x{v}")
