"""Asynchronous schedules with weight stashing: PipeDream and PipeDream-2BW.

They update without draining the pipeline. The backward pass of a microbatch must use the same
weights as its forward pass, so old versions are kept (stashed) while a microbatch needs them. On
stage s, microbatch i uses the weights after max(0, i // update - lag[s]) updates:

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

    The forward pass of a microbatch uses the newest weights of each stage, the backward pass the
    same ones. With `vertical` sync, it uses on every stage the version that was newest on the
    first. The pipeline drains after m microbatches, the end of a step. The number of versions
    reaches its formula if m >= 2(p-1).
    """
    lag = tuple(p - 1 if vertical else p - 1 - s for s in range(p))
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
    """Raise InputError unless m >= p, so that two versions suffice."""
    if m < p:
        given = f"{m} microbatches a batch for 2BW on {p} ranks"
        raise bad(given, f"as many as there are ranks, or more: from {p} up", f"2bw:{p}")
