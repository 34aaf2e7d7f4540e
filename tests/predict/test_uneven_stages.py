"""Uneven stages of a search: the cut it chooses, against all cuts, each predicted for itself."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest
import torch

import shardwise as sw
from shardwise.core.plan.plan import Plan
from shardwise.derive.recorded_model import RecordedModel
from shardwise.engine.predict import predict_with
from shardwise.models.gpt import GPT
from shardwise.prediction.prediction import Prediction
from shardwise.prediction.search.plan_costs import PlanCosts
from shardwise.prediction.search.result import RankedPlan, RefusedPlan
from shardwise.prediction.search.space import Candidate
from shardwise.prediction.search.uneven_stages import with_uneven_stages
from tests.predict.test_search import AMPLE, CONFIG, OPTIONS, batch, machine

BLOCKS = 6
CLUSTER = machine(AMPLE)


@cache
def model(vocabulary: int) -> GPT:
    """Six blocks, and a head whose work grows with the vocabulary: at 512 it is half a block's."""
    with torch.device("meta"):
        return GPT(replace(CONFIG, layers=BLOCKS, vocabulary=vocabulary))


@cache
def recorded(vocabulary: int) -> RecordedModel:
    return RecordedModel(model(vocabulary), batch(), OPTIONS)


def predicted(plan: Plan, vocabulary: int, rows: int = 1) -> Prediction:
    """The prediction of one plan, recorded for it alone."""
    return predict_with(model(vocabulary), plan, batch(rows * plan.microbatches), OPTIONS)


def cuts(stages: int) -> Iterator[tuple[int, ...]]:
    """All numbers of blocks of so many stages."""
    for ends in combinations(range(1, BLOCKS), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *ends, BLOCKS)))


@pytest.mark.parametrize(
    ("text", "vocabulary", "even_is_best"),
    [
        ("pp2 dp1 1f1b:4 bf16", 4096, False),
        ("pp2 dp1 interleaved:4x2 bf16", 4096, False),
        ("pp3 dp1 zb-h1:6 recompute:full bf16", 4096, True),
        ("pp3 dp1 zb-h1:6 recompute:full bf16", 512, True),
    ],
)
def test_the_cut_is_the_best_of_all_cuts(text: str, vocabulary: int, even_is_best: bool) -> None:
    """Its step is as short as that of the best cut, which may be the even one."""
    plan = Plan.parse(text)
    chosen, _ = with_uneven_stages(Candidate(plan, 1), recorded(vocabulary), CLUSTER)
    assert chosen.stages is not None
    every = {
        counts: predicted(replace(plan, stages=counts), vocabulary).step_time(CLUSTER).seconds
        for counts in cuts(len(chosen.stages))
    }
    best = min(every.values())
    assert every[chosen.stages] == pytest.approx(best, rel=1e-9)
    even = predicted(plan, vocabulary).step_time(CLUSTER).seconds
    assert (even <= best * (1 + 1e-9)) == even_is_best


def test_a_search_has_the_uneven_stages_of_its_best_pipelines() -> None:
    """Faster than the plan without them, with the time and the peak of their own prediction."""
    found = sw.search(model(4096), CLUSTER, 2, batch(), rows=2, options=OPTIONS)
    even = {str(each.plan): each.seconds for each in found.ranked if each.plan.stages is None}
    uneven = [each for each in found.ranked if each.plan.stages is not None]
    assert uneven and list(found.ranked) == sorted(found.ranked, key=lambda each: each.seconds)
    for each in uneven:
        assert each.seconds < even[str(replace(each.plan, stages=None))]
        own = predicted(each.plan, 4096, each.rows)
        assert each.seconds == own.step_time(CLUSTER).seconds
        assert each.peak_bytes == max(own.on(rank).device_peak for rank in range(2))


def test_no_stage_of_an_uneven_plan_exceeds_the_memory() -> None:
    """A plan whose middle stage stores most fits where that stage does, not with a byte less."""
    plan = Plan.parse("pp3 dp1 1f1b:3 stages:1,4,1 bf16")
    own = predicted(plan, 512)
    first, middle, last = (own.on(rank).device_peak for rank in range(3))
    assert middle > max(first, last)
    results = [
        PlanCosts(recorded(512), machine(room)).ranked(Candidate(plan, 1))
        for room in (middle, middle - 1)
    ]
    assert [type(each) for each in results] == [RankedPlan, RefusedPlan]
