"""Uneven stages: the blocks of each stage of a pipeline that make a run of its schedule shortest.

    blocks        b0    b1    b2    b3 + head       seconds 1 1 1 5
    even          b0    b1  | b2    b3 + head       slowest stage 6
    stages:3,1    b0    b1    b2  | b3 + head       slowest stage 5

The planner of DAPPLE (arXiv 2007.01045) divides layers by their measured time. Here the seconds of
a block are predicted, those of a stage of the same plan with a stage for each block. First an exact
partition makes the slowest stage as fast as possible (core/layouts/uneven.py). Then blocks move
from one stage to another while that makes the schedule shorter, by its clock: of several stages a
rank, the slowest one does not decide alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise, permutations
from typing import Final, Protocol

from shardwise.core.layouts.uneven import balanced
from shardwise.core.mesh import PIPELINE
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_schedule import schedule_of
from shardwise.core.schedule.clock import ActionCosts, clock
from shardwise.prediction.cluster import Cluster
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.search.space import Candidate
from shardwise.prediction.time.staged import hop_s, stage_kernels
from shardwise.prediction.time.step_time import RankWork

#: Blocks move between stages if there are at most so many: every two are tried.
MOST_TRIED: Final = 16
#: A move makes the schedule shorter by this part at least, more than rounding.
LEAST: Final = 1e-6

Counts = tuple[int, ...]


class CutModel(Protocol):
    """Predictions of a model that is cut into stages."""

    def of(self, plan: Plan, rows: int, rank: int = 0) -> Prediction:
        """That of a rank, with microbatches of `rows` rows. Raises InputError if it cannot run."""
        ...

    def pieces(self, stages: int) -> int:
        """The number of blocks that so many stages divide; of layers if there are fewer blocks."""
        ...


def with_uneven_stages(candidate: Candidate, model: CutModel, cluster: Cluster) -> Candidate:
    """The pipeline plan with the blocks of each stage that its time asks for.

    Raises InputError for a model whose blocks cannot be stages.
    """
    plan, rows = candidate
    schedule = schedule_of(plan)
    assert schedule is not None
    pieces, stages = model.pieces(len(schedule.home)), len(schedule.home)
    axes = tuple((axis, pieces if axis == PIPELINE else size) for axis, size in plan.axes)
    finest = replace(plan, axes=axes, schedule="1f1b:1", stages=None, row="ddp", offload=None)
    of_block = stage_kernels(RankWork(model.of(finest, rows), cluster)).seconds
    hop = hop_s(RankWork(model.of(plan, rows), cluster))

    def makespan_s(counts: Counts) -> float:
        places = list(pairwise(accumulate(counts, initial=0)))
        found = {op: tuple(sum(own[a:b]) for a, b in places) for op, own in of_block.items()}
        return clock(schedule, ActionCosts(**found, hop=hop)).makespan

    weights = [forward + back for forward, back in zip(of_block["F"], of_block["B"], strict=True)]
    counts = tuple(b - a for a, b in pairwise((0, *balanced(weights, stages), pieces)))
    if stages <= MOST_TRIED:
        counts = _moved(counts, makespan_s)
    return candidate._replace(plan=replace(plan, stages=counts))


def _moved(counts: Counts, cost: Callable[[Counts], float]) -> Counts:
    """The counts after the best move of a block, while one makes the cost less."""
    least = cost(counts)
    while near := {other: cost(other) for other in _moves(counts)}:
        other = min(near, key=near.__getitem__)
        if near[other] >= least * (1 - LEAST):
            break
        counts, least = other, near[other]
    return counts


def _moves(counts: Counts) -> Iterator[Counts]:
    """The counts with one block less in a stage of several, and one more in another stage."""
    for giver, taker in permutations(range(len(counts)), 2):
        if counts[giver] > 1:
            changed = {giver: counts[giver] - 1, taker: counts[taker] + 1}
            yield tuple(changed.get(stage, count) for stage, count in enumerate(counts))
