"""The best plans of a task: ranked by an estimate of their time, of which the first are predicted.

    refused     by the plan check, by the model (heads, layers), or by the memory of a device
    estimated   in closed form (plan_costs.py)
    predicted   the peak, by dry runs, and the time of the first plans that fit

A plan that recomputes is slower than the same plan with less recomputation, and not predicted if
that one fits. Plans with offload come last: only if no other fits. The best plans are predicted
once more with the budget of activations that the memory allows, with uneven stages, and with whole
blocks in place of zero3.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems
from shardwise.prediction.cluster import Cluster
from shardwise.prediction.search.plan_costs import (
    PlanCosts,
    PredictedModel,
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
REFINED: Final = 2
#: So many plans are predicted at most for each that is asked for, if one fits of those that store
#: least in closed form.
TRIED: Final = 2
SMALLEST: Final = 4


def best_plans(task: PlanTask, model: PredictedModel, cluster: Cluster, count: int) -> SearchResult:
    """The ranking of the first plans by their estimates. Raises InputError."""
    costs = PlanCosts(model, cluster)
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
    refused, estimated = [*refused], list[tuple[float, Candidate]]()
    for candidate in every:
        try:
            if wrong := problems(candidate.plan):
                raise InputError(str(wrong[0]))
            over = costs.over(costs.least_bytes(candidate))
            if over > 0:
                refused.append(too_large(candidate, over))
            else:
                estimated.append((costs.estimate_s(candidate), candidate))
        except InputError as error:
            refused.append(RefusedPlan(candidate.plan, str(error), candidate.rows))
    fastest = [candidate for _, candidate in sorted(estimated, key=lambda each: each[0])]
    smallest = sorted(fastest, key=costs.least_bytes)[:SMALLEST]
    fits = any(isinstance(costs.ranked(each), RankedPlan) for each in smallest)
    tried = dict.fromkeys([*fastest[: TRIED * count * fits], *smallest])
    results = dict[Candidate, RankedPlan | RefusedPlan]()
    for candidate in tried:
        fitting = [each for each, found in results.items() if isinstance(found, RankedPlan)]
        if len(fitting) == count:
            break
        if not any(each in fitting for each in _keeping_more(candidate)):
            results[candidate] = costs.ranked(candidate)
    refused += [each for each in results.values() if isinstance(each, RefusedPlan)]
    ranked = [each for each in results.values() if isinstance(each, RankedPlan)]
    ranked.sort(key=lambda each: each.seconds)
    return _refined(ranked, costs), refused, len(estimated) - len(results)


def _refined(ranked: list[RankedPlan], costs: PlanCosts) -> list[RankedPlan]:
    """The plans, and changed ones of the best that fit and are faster.
    Plans that recompute do so as little as the memory allows; stages are balanced by time; blocks
    of zero3 stay whole where there is room.
    """

    def uneven(candidate: Candidate) -> Candidate:
        return with_uneven_stages(candidate, costs.model, costs.cluster)

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
        moved = [offloaded(each, word) for word in OFFLOADED for each in least]
        possible = [each for each in [*least, *moved] if not problems(each.plan)]
        possible.sort(key=costs.least_bytes)
        if any(costs.fits(each) for each in possible[:SMALLEST]):
            return more.ranks
    return None
