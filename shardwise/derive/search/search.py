"""The best plans of a task: ranked by an estimate of their time, of which the first are predicted.

    refused     by the plan check, by the model (heads, layers), or by the memory of a device
    estimated   in closed form (plan_costs.py)
    predicted   the peak, by dry runs, and the time of the first plans that fit

A plan that recomputes is slower than the same plan with less recomputation, and not predicted if
that one fits. Plans with offload come last: only if no other fits. The best plans are predicted
once more with the budget of activations that the memory allows, and with uneven stages.

    blocks        b0    b1    b2    b3 + head       seconds 1 1 1 5
    even          b0    b1  | b2    b3 + head       slowest stage 6
    stages:3,1    b0    b1    b2  | b3 + head       slowest stage 5

The planner of DAPPLE (arXiv 2007.01045) divides layers by their measured time.  Here the seconds of
a block are predicted, those of a stage of the same plan with a stage for each block.  First an
exact partition makes the slowest stage as fast as possible (core/layouts/uneven.py).  Then blocks
move from one stage to another while that makes the schedule shorter, by its clock: of several
stages a rank, the slowest one does not decide alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise, permutations
from typing import TYPE_CHECKING, Final

from shardwise.core.errors import InputError
from shardwise.core.layouts.uneven import Counts, balanced
from shardwise.core.mesh import PIPELINE
from shardwise.core.plan.plan_check import problems, schedule_of
from shardwise.core.schedule.clock import ActionCosts, clock
from shardwise.derive.search.plan_costs import PlanCosts, too_large
from shardwise.derive.search.result import (
    OFFLOADED,
    RECOMPUTED,
    Candidate,
    PlanTask,
    RankedPlan,
    RefusedPlan,
    SearchResult,
    candidates,
)
from shardwise.prediction.cluster import Cluster
from shardwise.prediction.time.step_time import stage_times

if TYPE_CHECKING:
    from shardwise.derive.plan_search import SearchedModel

#: So many of the best plans are changed, of each kind.
REFINED: Final = 2
#: So many plans are predicted at most for each that is asked for.
TRIED: Final = 2
#: Plans whose estimate is so many times the shortest predicted time are slower.
SLOW: Final = 1.1
#: Of those that store least in closed form so many are predicted if none of these fits.
SMALLEST: Final = 4


def best_plans(
    task: PlanTask, model: "SearchedModel", cluster: Cluster, count: int
) -> SearchResult:
    """The ranking of the first plans by their estimates. Raises InputError."""
    costs = PlanCosts(model, cluster)
    plain = list(candidates(task))
    ranked, refused, slower = list[RankedPlan](), list[RefusedPlan](), 0
    for word in (None, *OFFLOADED):
        if not ranked:
            chosen = (Candidate(replace(plan, offload=word), rows) for plan, rows in plain)
            ranked, refused, slower = _ranked(chosen, costs, count, refused)
    refused.sort(key=lambda each: (not each.over_bytes, each.over_bytes))
    return SearchResult(cluster, task.ranks, task.batch, tuple(ranked), tuple(refused), slower)


def _ranked(
    every: Iterable[Candidate], costs: PlanCosts, count: int, refused: list[RefusedPlan]
) -> tuple[list[RankedPlan], list[RefusedPlan], int]:
    """The plans that fit, the refused ones, and the number of the others."""
    refused, estimated = [*refused], list[tuple[float, Candidate]]()
    for candidate in every:
        try:
            if wrong := problems(candidate.plan):
                raise InputError(str(wrong[0]))
            over = costs.least_bytes(candidate) - costs.room
            if over > 0:
                refused.append(too_large(candidate, over))
            else:
                estimated.append((costs.estimate_s(candidate), candidate))
        except InputError as error:
            refused.append(RefusedPlan(candidate.plan, str(error), candidate.rows))
    times = {candidate: s for s, candidate in sorted(estimated, key=lambda each: each[0])}
    smallest = sorted(times, key=costs.least_bytes)[:SMALLEST]
    results = _predicted(times, smallest, costs, count)
    refused += [each for each in results.values() if isinstance(each, RefusedPlan)]
    ranked = [each for each in results.values() if isinstance(each, RankedPlan)]
    ranked.sort(key=lambda each: each.seconds)
    return _refined(ranked, costs), refused, len(estimated) - len(results)


def _predicted(
    times: Mapping[Candidate, float], smallest: list[Candidate], costs: PlanCosts, count: int
) -> dict[Candidate, RankedPlan | RefusedPlan]:
    """The first plans that fit; those that are likely too large, and the smallest, if none does."""
    results, fitting = dict[Candidate, RankedPlan | RefusedPlan](), dict[Candidate, float]()
    large = list[Candidate]()

    def predict(candidate: Candidate) -> None:
        found = results[candidate] = costs.ranked(candidate)
        if isinstance(found, RankedPlan):
            fitting[candidate] = found.seconds

    for candidate in [*times][: TRIED * count]:
        slow = fitting and times[candidate] > SLOW * min(fitting.values())
        if slow or len(fitting) == count:
            break
        if any(each in fitting for each in _keeping_more(candidate)):
            continue
        if costs.least_bytes(candidate) * min(costs.ratios, default=1.0) > costs.room:
            large.append(candidate)
        else:
            predict(candidate)
    for candidate in dict.fromkeys([*large, *smallest]):
        if not fitting:
            predict(candidate)
    return results


def _refined(ranked: list[RankedPlan], costs: PlanCosts) -> list[RankedPlan]:
    """The plans, and the best with less recomputation or balanced stages, where that is faster."""

    def uneven(candidate: Candidate) -> Candidate:
        return with_uneven_stages(candidate, costs.model, costs.cluster)

    changes = (("recompute", costs.with_budget), ("pipeline", uneven))
    best = [(how, [each for each in ranked if getattr(each.plan, word)]) for word, how in changes]
    for changed, each in [(how, each) for how, own in best for each in own[:REFINED]]:
        with suppress(InputError):
            found = costs.ranked(changed(Candidate(each.plan, each.rows)))
            if isinstance(found, RankedPlan) and found.seconds < each.seconds:
                ranked = [*ranked, found]
    return sorted(ranked, key=lambda each: each.seconds)


def _keeping_more(candidate: Candidate) -> Iterator[Candidate]:
    kinds = [word.partition(":")[2] or None for word in RECOMPUTED]
    for kind in kinds[: kinds.index(candidate.plan.recompute)]:
        yield candidate._replace(plan=replace(candidate.plan, recompute=kind))


# --- uneven stages --------------------------------------------------------------------------------

#: Blocks move between stages if there are at most so many: every two are tried.
MOST_TRIED: Final = 16
#: A move makes the schedule shorter by this part at least, more than rounding.
LEAST: Final = 1e-6
#: The stages of a deep model that are predicted: the first block, any other, and the last.
FEW: Final = 3


def with_uneven_stages(candidate: Candidate, model: "SearchedModel", cluster: Cluster) -> Candidate:
    """The plan with stages balanced by time. Raises InputError if blocks are no stages."""
    plan, rows = candidate
    schedule = schedule_of(plan)
    assert schedule is not None
    stages = len(schedule.home)
    pieces = sum(model.counts(stages))
    deep = model.blocks is not None and model.blocks.number == pieces
    few = min(pieces, FEW) if deep else pieces  # of equal blocks all but the first and the last
    axes = tuple((axis, few if axis == PIPELINE else size) for axis, size in plan.axes)
    halves = any(action.op == "I" for action in schedule.actions(0))
    how = "zb-h1:1" if halves else "1f1b:1"
    finest = replace(plan, axes=axes, schedule=how, stages=None, row="ddp", offload=None)
    found = stage_times(model.of(finest, rows, depth=few if few < pieces else None), cluster)
    hop, seconds = found.hop_s, found.costs(range(few))
    times = [1, pieces - 2, 1] if few < pieces else [1] * pieces
    of_block = {
        op: [s for s, n in zip(own, times, strict=True) for _ in range(n)]
        for op, own in seconds.items()
    }

    def makespan_s(counts: Counts) -> float:
        places = list(pairwise(accumulate(counts, initial=0)))
        found = {op: tuple(sum(own[a:b]) for a, b in places) for op, own in of_block.items()}
        return clock(schedule, ActionCosts(**found, hop=hop)).makespan

    weights = [sum(own) for own in zip(*of_block.values(), strict=True)]
    counts = tuple(b - a for a, b in pairwise((0, *balanced(weights, stages), pieces)))
    if stages <= MOST_TRIED:
        counts = _moved(counts, makespan_s)
    return candidate._replace(plan=replace(plan, stages=counts))


def _moved(counts: Counts, cost: Callable[[Counts], float]) -> Counts:
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
