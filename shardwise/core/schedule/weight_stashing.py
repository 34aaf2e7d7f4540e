"""This file is the schedules that do not wait for the update: PipeDream and its 2BW.

They never drain. A microbatch that is under way while the weights change must go back through the
weights it came forward through, so old versions are kept (stashed) as long as one is under way.
Microbatch i uses on stage s the weights after max(0, i // update - lag[s]) updates:

                             update    lag[s]    versions held by stage s
    PipeDream                1         p-1-s     p-s
    PipeDream, vertical      1         p-1       p
    2BW                      m         1         2

Legend: p ranks, m microbatches, s a stage.
"""

from dataclasses import replace

from shardwise.core.errors import bad
from shardwise.core.schedule.action import Action
from shardwise.core.schedule.classic import alternate, one_stage_a_rank
from shardwise.core.schedule.schedule import Schedule


def pipedream(p: int, m: int, *, vertical: bool = False) -> Schedule:
    """1F1B with an update after every backward (SOSP 2019; arXiv 1806.03377): m updates.

    A microbatch uses the newest weights that a stage has as it comes by, on its way forward, and
    the same on its way back. With `vertical` sync it uses on every stage the version that was the
    newest on the first. Drained after m microbatches, as a step of m must be; the versions held
    reach their formula where m >= 2(p-1).
    """
    lag = tuple(p - 1 if vertical else p - 1 - s for s in range(p))
    return _updated(one_stage_a_rank(p, m, lambda r: alternate(r, m, p - r)), 1, lag)


def two_buffered(p: int, m: int, batches: int = 1) -> Schedule:
    """PipeDream-2BW: 1F1B with an update after every m microbatches, m >= p (arXiv 2006.09503).

    Every microbatch of a batch uses the weights the batch before began with, so two versions are
    enough. `batches` of m microbatches each follow one another without draining in between.
    """
    covers(p, m)
    order = one_stage_a_rank(p, m * batches, lambda r: alternate(r, m * batches, p - r))
    return _updated(order, m, (1,) * p)


def _updated(schedule: Schedule, update: int, lag: tuple[int, ...]) -> Schedule:
    """The schedule with U after the backward of every `update`-th microbatch."""
    rows = (
        (part for action in schedule.actions(rank) for part in (action, *_update(action, update)))
        for rank in range(schedule.ranks)
    )
    return replace(schedule, rows=tuple(map(tuple, rows)), update=update, lag=lag)


def _update(action: Action, update: int) -> tuple[Action, ...]:
    ends = action.op == "B" and (action.microbatch + 1) % update == 0
    return (action._replace(op="U"),) if ends else ()


def covers(p: int, m: int) -> None:
    """Raise InputError unless a batch is as long as the pipeline: two versions are then enough."""
    if m < p:
        given = f"{m} microbatches a batch for 2BW on {p} ranks"
        raise bad(given, f"as many as there are ranks, or more: from {p} up", f"2bw:{p}")
