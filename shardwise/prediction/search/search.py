"""The best plans of a task: a best-first search by lower bounds of the time of a step.

    refused     by the plan check, by the model (heads, layers), or by the memory of a device
    rows        kernels of one row, times the rows of a data rank, over stages; the ramps of 1f1b
    step        what is stored and kept fits; kernels of the slowest stage, collectives within
                layers, updates, and moves between steps, without what overlaps
    predicted   the peak and the time

A plan goes from one line to the next when its bound is the least of all. The search ends when that
bound exceeds the time of the plan that is `count`th so far: no later plan can be among the first
`count`. A plan that recomputes is slower than the same plan with less recomputation, and not
predicted if that one fits. Plans with offload come last: only if no other fits. The best plans are
predicted once more with the budget of activations that the memory allows, with uneven stages
(plan_costs.py), and with whole blocks in place of zero3.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any, Final

from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems
from shardwise.prediction.cluster import Cluster
from shardwise.prediction.search.plan_costs import (
    PlanCosts,
    Recordings,
    too_large,
    with_uneven_stages,
)
from shardwise.prediction.search.result import (
    OFFLOADED,
    RECOMPUTED,
    Candidate,
    PlanTask,
    RankedPlan,
    RefusedPlan,
    SearchResult,
    candidates,
    offloaded,
)

#: How often the number of ranks is doubled where nothing fits.
DOUBLINGS: Final = 6
#: So many of the best plans are changed, of each kind.
REFINED: Final = 4


def best_plans(
    task: PlanTask, recordings: Recordings, cluster: Cluster, count: int
) -> SearchResult:
    """The ranking of the plans, certain for the first `count`. Raises InputError."""
    costs = PlanCosts(recordings, cluster)
    plain = list(candidates(task))
    every = [plain, *([offloaded(each, word) for each in plain] for word in OFFLOADED)]
    ranked, refused, slower = list[RankedPlan](), list[RefusedPlan](), 0
    for chosen in every:
        if not ranked:
            ranked, refused, slower = _ranked(chosen, costs, count, refused)
    refused.sort(key=lambda each: (not each.over_bytes, each.over_bytes))
    fits_on = None if ranked else _fitting(task, costs)
    totals = tuple(ranked), tuple(refused), slower
    return SearchResult(cluster, task.ranks, task.batch, *totals, fits_on=fits_on)


def _ranked(
    every: Iterable[Candidate], costs: PlanCosts, count: int, refused: list[RefusedPlan]
) -> tuple[list[RankedPlan], list[RefusedPlan], int]:
    """The plans that fit, the refused ones, and the number of the others."""
    refused, ranked, slower = [*refused], list[RankedPlan](), 0
    queue = list[tuple[float, int, int, Candidate]]()
    for number, candidate in enumerate(every):
        _push(queue, number, 0, candidate, costs, refused)
    heapify(queue)
    fitting = set[Candidate]()
    while queue:
        bound_s, number, known, candidate = heappop(queue)
        if len(ranked) >= count and bound_s >= ranked[count - 1].seconds:
            slower += 1 + len(queue)
            break
        if any(each in fitting for each in _keeping_more(candidate)):
            slower += 1
        elif known < 1:
            _push(queue, number, 1, candidate, costs, refused)
        else:
            result = costs.ranked(candidate)
            if isinstance(result, RefusedPlan):
                refused.append(result)
                continue
            fitting.add(candidate)
            ranked = sorted([*ranked, result], key=lambda each: each.seconds)
    ranked = _refined(ranked, costs)
    shown = (replace(each, sent_bytes=costs.sent_bytes(each)) for each in ranked[:count])
    return [*shown, *ranked[count:]], refused, slower


def _refined(ranked: list[RankedPlan], costs: PlanCosts) -> list[RankedPlan]:
    """The plans, and changed ones of the best that fit and are faster.
    Plans that recompute do so as little as the memory allows; stages are balanced by time; blocks
    of zero3 stay whole where there is room.
    """

    def uneven(candidate: Candidate) -> Candidate:
        return with_uneven_stages(candidate, costs.recordings, costs.cluster)

    changes: list[tuple[Callable[[Plan], object], Callable[[Candidate], Candidate]]] = [
        (lambda plan: plan.recompute, costs.with_budget),
        (lambda plan: plan.pipeline, uneven),
        (lambda plan: plan.row == "zero3" and not plan.pipeline, costs.with_whole_blocks),
    ]
    for applies, changed in changes:
        best = [each for each in ranked if applies(each.plan)][:REFINED]
        found = [costs.faster(each, changed) for each in best]
        ranked = sorted([*ranked, *filter(None, found)], key=lambda each: each.seconds)
    return ranked


def _push(
    queue: list[Any],
    number: int,
    known: int,
    candidate: Candidate,
    costs: PlanCosts,
    refused: list[RefusedPlan],
) -> None:
    try:
        if known:
            over = costs.over_bytes(candidate)
            if over > 0:
                refused.append(too_large(candidate, over))
                return
            bound_s = costs.step_bound_s(candidate)
        else:
            wrong = problems(candidate.plan)
            if wrong:
                raise InputError(str(wrong[0]))
            bound_s, over = costs.bound_s(candidate), costs.over(costs.least_bytes(candidate))
            if over > 0:
                refused.append(too_large(candidate, over))
                return
        heappush(queue, (bound_s, number, known, candidate))
    except InputError as error:
        refused.append(RefusedPlan(candidate.plan, str(error), candidate.rows))


def _keeping_more(candidate: Candidate) -> Iterator[Candidate]:
    kinds = [word.partition(":")[2] or None for word in RECOMPUTED]
    for kind in kinds[: kinds.index(candidate.plan.recompute)]:
        yield candidate._replace(plan=replace(candidate.plan, recompute=kind))


def _fitting(task: PlanTask, costs: PlanCosts) -> int | None:
    """The number of ranks, doubled, on which a plan fits; the batch grows in proportion."""
    for doubling in range(1, DOUBLINGS + 1):
        times = 2**doubling
        more = task._replace(ranks=task.ranks * times, batch=task.batch * times)
        if more.ranks > more.host and more.ranks % more.host:
            continue
        least = [each for each in candidates(more) if each.rows == 1]
        moved = (offloaded(each, word) for word in OFFLOADED for each in least)
        if any(costs.fits(each) for each in chain(least, moved)):
            return more.ranks
    return None
