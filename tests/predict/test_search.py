"""The search for the best plan: its choice, uneven stages, its words."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.core.errors import InputError
from shardwise.core.model_spec import Blocks
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import problems
from shardwise.derive import plan_search
from shardwise.derive.plan_search import SearchedModel, equal_blocks
from shardwise.derive.search.plan_costs import Copy, PlanCosts
from shardwise.derive.search.result import (
    Candidate,
    PlanTask,
    RankedPlan,
    RefusedPlan,
    SearchResult,
    candidates,
)
from shardwise.derive.search.search import with_uneven_stages
from shardwise.engine.options import EngineOptions
from shardwise.engine.predict import predict_with
from shardwise.models.gpt import GPT, GPTConfig, loss
from shardwise.prediction.cluster import PRESETS, Cluster
from shardwise.prediction.prediction import Prediction
from tests.train.runs import ended, printed
from tests.verify import small

CONFIG = GPTConfig(512, 4, 64, heads=4, kv_heads=4, intermediate_size=192, sequence=64)
OPTIONS = EngineOptions(loss=loss, clip=1.0, least_unit_bytes=0, kernels="cuda")
RANKS, ROWS = 2, 2
#: All plans fit, some, those with offload alone, and none.
AMPLE, ROOM, SCARCE, NONE = 10**9, 3_100_000, 2_300_000, 450_000
#: The best plan that fits recomputes.
NARROW = 3_030_000


def machine(memory_bytes: int, devices: int = 4) -> Cluster:
    """A host of small H100s, whose products and links are slow enough to matter."""
    whole = PRESETS["h100-sxm"]
    peak = {name: flops / 1e4 for name, flops in whole.device.peak_flops.items()}
    small = {"memory_bytes": memory_bytes, "launch_s": 0.0, "peak_flops": peak}
    link = whole.inside.model_copy(update={"bytes_per_s": 1e9})
    parts = {"device": whole.device.model_copy(update=small), "inside": link, "between": link}
    return whole.model_copy(update={**parts, "devices_per_host": devices})


def batch(rows: int = 1) -> dict[str, Any]:
    tokens = torch.zeros(rows, CONFIG.sequence, dtype=torch.long)
    return {"inputs": tokens, "targets": tokens}


def model(config: GPTConfig = CONFIG) -> GPT:
    with torch.device("meta"):
        return GPT(config)


@cache
def searched(memory_bytes: int, ranks: int = RANKS) -> SearchResult:
    return sw.search(model(), machine(memory_bytes), ranks, batch(), rows=ROWS, options=OPTIONS)


def predicted(plan: Any, rows: int) -> Prediction:
    return predict_with(model(), plan, batch(rows), OPTIONS)


def costs(plan: Plan, rows: int) -> tuple[float, int]:
    """The time and the peak of a plan, predicted for itself."""
    first = predicted(plan, rows * plan.microbatches)
    ranks = [first, first.on(plan.mesh.line("pp", 0)[-1])]
    return first.step_time(machine(AMPLE)).seconds, max(each.device_peak for each in ranks)


@cache
def exhaustive() -> dict[str, tuple[float, int]]:
    """The time and the peak of every plan of the task, each predicted for itself."""
    found = dict[str, tuple[float, int]]()
    for plan, rows in candidates(PlanTask(RANKS, 4, ROWS, CONFIG.sequence)):
        if problems(plan):
            continue
        with suppress(InputError):
            found[str(plan)] = costs(plan, rows)
    return found


@pytest.mark.full
@pytest.mark.parametrize("memory_bytes", [AMPLE, ROOM])
def test_the_choice_is_the_best_of_all_plans(memory_bytes: int) -> None:
    """The first plan has the least time of all plans of the task that fit, each predicted alone."""
    every = exhaustive()
    best = next(each for each in searched(memory_bytes).ranked if str(each.plan) in every)
    fitting = {plan: s for plan, (s, peak) in exhaustive().items() if peak <= memory_bytes}
    assert 0 < len(fitting) <= len(exhaustive())
    assert best.seconds == pytest.approx(min(fitting.values()), rel=1e-9)
    assert fitting[str(best.plan)] == pytest.approx(best.seconds, rel=1e-9)


@pytest.mark.full
def test_a_search_predicts_what_predict_does() -> None:
    """The time and the peak of each ranked plan are those of its own recorded pass."""
    ranked = searched(ROOM).ranked
    assert any(each.plan.pipeline for each in ranked)
    for each in ranked:
        own = exhaustive().get(str(each.plan)) or costs(each.plan, each.rows)
        assert (pytest.approx(each.seconds, rel=1e-12), each.peak_bytes) == own, each.plan


@pytest.mark.full
def test_what_is_recomputed_fills_the_memory() -> None:
    """The best plan recomputes as few blocks as fit: no other budget that fits is faster."""
    best = searched(NARROW).best
    assert best is not None and best.peak_bytes <= NARROW
    assert best.seconds < min(s for s, peak in exhaustive().values() if peak <= NARROW)
    budgets = (replace(best.plan, recompute=f"{kib}KiB") for kib in range(200, 1100, 75))
    every = [costs(plan, best.rows) for plan in budgets]
    fitting = [seconds for seconds, peak in every if peak <= NARROW]
    assert 0 < len(fitting) < len(every)
    assert best.seconds <= min(fitting)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    """Plans above the memory of a device are refused, with the bytes that are too many."""
    found = searched(ROOM)
    assert max(each.peak_bytes for each in found.ranked) <= ROOM
    large = [each for each in found.refused if each.over_bytes]
    assert large and not {each.plan for each in large} & {each.plan for each in found.ranked}
    for each in large[::8]:
        assert 0 < each.over_bytes <= costs(each.plan, each.rows)[1] - ROOM, each.plan


@pytest.mark.full
def test_offload_is_tried_where_nothing_else_fits() -> None:
    """Its copies over the link to host memory add to the time of its own prediction."""
    found, cluster = searched(SCARCE), machine(SCARCE)
    assert found.best is not None and not any(each.plan.offload for each in searched(ROOM).ranked)
    for each in found.ranked:
        assert each.plan.offload == "optim" and each.peak_bytes <= SCARCE
        own = predicted(each.plan, each.rows * each.plan.microbatches)
        copied = sum(n for line, n in own.bytes.items() if line.startswith("tier "))
        assert cluster.host_link is not None
        copies_s = copied / (cluster.host_link.bytes_per_s * cluster.derating.links)
        found_s = own.step_time(cluster)
        assert copied and 0 < found_s.exposed_s["tier"] <= copies_s * (1 + 1e-9)
        assert each.seconds == pytest.approx(found_s.seconds, rel=1e-9)


@pytest.mark.full
def test_where_nothing_fits_the_nearest_plan_is_named() -> None:
    """No plan is ranked, and the nearest exceeds the memory by least."""
    found = searched(NONE)
    assert found.best is None and found.nearest is not None
    over = [each.over_bytes for each in found.refused if each.over_bytes]
    assert found.nearest.over_bytes == min(over)


# --- uneven stages --------------------------------------------------------------------------------

DEEP_BLOCKS = 6
LARGE = machine(AMPLE)


@cache
def deep(vocabulary: int) -> GPT:
    """Six blocks, and a head whose work grows with the vocabulary: at 512 it is half a block's."""
    with torch.device("meta"):
        return GPT(replace(CONFIG, layers=DEEP_BLOCKS, vocabulary=vocabulary))


@cache
def recorded(vocabulary: int) -> SearchedModel:
    return SearchedModel(deep(vocabulary), batch(), OPTIONS)


def deep_predicted(plan: Plan, vocabulary: int, rows: int = 1) -> Prediction:
    return predict_with(deep(vocabulary), plan, batch(rows * plan.microbatches), OPTIONS)


def cuts(stages: int) -> Iterator[tuple[int, ...]]:
    """All numbers of blocks of so many stages."""
    for ends in combinations(range(1, DEEP_BLOCKS), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *ends, DEEP_BLOCKS)))


@pytest.mark.parametrize(
    ("text", "vocabulary", "even_is_best"),
    [
        ("pp2 dp1 1f1b:4 bf16", 4096, False),
        ("pp2 dp1 interleaved:4x2 bf16", 4096, False),
        ("pp3 dp1 zb-h1:6 recompute:full bf16", 4096, False),
        ("pp3 dp1 zb-h1:6 recompute:full bf16", 512, True),
    ],
)
def test_the_cut_is_the_best_of_all_cuts(text: str, vocabulary: int, even_is_best: bool) -> None:
    """Its step is as short as that of the best cut, which may be the even one."""
    plan = Plan.parse(text)
    chosen, _ = with_uneven_stages(Candidate(plan, 1), recorded(vocabulary), LARGE)
    assert chosen.stages is not None
    every = {
        counts: deep_predicted(replace(plan, stages=counts), vocabulary).step_time(LARGE).seconds
        for counts in cuts(len(chosen.stages))
    }
    best = min(every.values())
    assert every[chosen.stages] == pytest.approx(best, rel=1e-9)
    even = deep_predicted(plan, vocabulary).step_time(LARGE).seconds
    assert (even <= best * (1 + 1e-9)) == even_is_best


@pytest.mark.full
def test_a_search_has_the_uneven_stages_of_its_best_pipelines() -> None:
    """Faster than the plan without them, with the time and the peak of their own prediction."""
    found = sw.search(deep(4096), LARGE, 2, batch(), rows=2, options=OPTIONS)
    even = {str(each.plan): each.seconds for each in found.ranked if each.plan.stages is None}
    uneven = [each for each in found.ranked if each.plan.stages is not None]
    assert uneven and list(found.ranked) == sorted(found.ranked, key=lambda each: each.seconds)
    for each in uneven:
        assert each.seconds < even[str(replace(each.plan, stages=None))]
        own = deep_predicted(each.plan, 4096, each.rows)
        assert each.seconds == pytest.approx(own.step_time(LARGE).seconds, rel=1e-9)
        assert each.peak_bytes == max(own.on(rank).device_peak for rank in range(2))


def test_no_stage_of_an_uneven_plan_exceeds_the_memory() -> None:
    """A plan whose middle stage stores most fits where that stage does, not with a byte less."""
    plan = Plan.parse("pp3 dp1 1f1b:3 stages:1,4,1 bf16")
    own = deep_predicted(plan, 512)
    first, middle, last = (own.on(rank).device_peak for rank in range(3))
    assert middle > max(first, last)
    results = [
        PlanCosts(recorded(512), machine(room)).ranked(Candidate(plan, 1))
        for room in (middle, middle - 1)
    ]
    assert [type(each) for each in results] == [RankedPlan, RefusedPlan]


@pytest.mark.parametrize(
    ("text", "layers", "vocabulary", "copies", "rel"),
    [
        ("dp4 tp2 sp zero3 bf16 recompute:full", 12, 512, 2, 1e-6),
        ("dp2 zero1 bf16", 12, 512, 2, 1e-6),
        ("dp2 zero1 bf16 recompute:400KiB", 12, 512, 4, 0.01),
        ("pp2 dp1 1f1b:4 bf16", 13, 2048, 2, 0.01),
        pytest.param("pp16 dp4 zb-h1:16 bf16", 80, 512, 2, 0.01, marks=pytest.mark.full),
    ],
)
def test_a_deep_plan_is_predicted_from_copies_with_few_blocks(
    text: str, layers: int, vocabulary: int, copies: int, rel: float
) -> None:
    """Its time and peak continue along the lines through those of copies."""
    deep = model(replace(CONFIG, layers=layers, vocabulary=vocabulary))
    found = PlanCosts(SearchedModel(deep, batch(), OPTIONS), LARGE)
    candidate = Candidate(Plan.parse(text), 1)
    assert len(found._copies(candidate)) == copies
    result, whole = (found.ranked(candidate, few) for few in (None, [Copy(1.0, candidate.plan)]))
    assert isinstance(result, RankedPlan) and isinstance(whole, RankedPlan)
    assert result.sent_bytes == whole.sent_bytes
    assert result.peak_bytes == pytest.approx(whole.peak_bytes, rel=rel)
    assert result.seconds == pytest.approx(whole.seconds, rel=rel)


# --- equal blocks ---------------------------------------------------------------------------------


def test_equal_blocks_share_their_class_shapes_and_numbers() -> None:
    """Blocks whose numbers are no line, or that share parameters, are not equal."""
    whole, shared = (model(replace(CONFIG, layers=10)) for _ in range(2))
    for number, block in enumerate(whole.blocks):
        vars(block)["number"] = number
    assert equal_blocks(whole) == Blocks("blocks", 10)
    vars(whole.blocks[-1])["number"] = 1
    assert equal_blocks(whole) is None
    shared.blocks[8] = shared.blocks[0]
    assert equal_blocks(shared) is None


# --- the command ----------------------------------------------------------------------------------

MODEL = f"{small.__file__}:build"
TASK = ["search", "--model", MODEL, "--cluster", "h100-sxm", "--ranks", "2"]


def test_the_command_prints_the_best_plans(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of plans, the first as a line to paste, which JSON has too."""
    results, real = list[SearchResult](), plan_search.search

    def search(*args: Any, **options: Any) -> SearchResult:
        """The result of the first search, for all."""
        results.extend([] if results else [real(*args, **options)])
        return results[0]

    monkeypatch.setattr(plan_search, "search", search)
    found = json.loads(printed(capsys, *TASK, "--json"))
    best = found["ranked"][0]["plan"]
    text = printed(capsys, *TASK)
    assert f'The best: shardwise predict "{best}" --model {MODEL}' in text
    assert "bound by" in text
    times = [each["step_time"]["step_s"] for each in found["ranked"]]
    assert times == sorted(times)


@pytest.mark.full
def test_the_best_plans_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """The two best run on two new ranks; the line to paste has the faster one."""
    found = json.loads(printed(capsys, *TASK, "--measure", "2", "--json"))
    best = {each["plan"]: each["step_time"]["step_s"] for each in found["ranked"][:2]}
    assert {each["plan"]: each["predicted_s"] for each in found["measured"]} == best
    times = [each["measured_s"] for each in found["measured"]]
    assert times == sorted(times) and times[0] > 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*TASK[:4], "h100", *TASK[5:]], "Given: the cluster 'h100'"),
        (["search", "--ranks", "2"], "Missing option '--cluster'"),
        ([*TASK[:-1], "12"], "12 ranks on hosts of 8 devices"),
        ([*TASK[:-1], "0"], "ranks=0"),
        ([*TASK[:-1], "1024", "--batch", "3"], "a batch of 3 rows on 1024 ranks, which no plan"),
        ([*TASK, "--measure", "0"], "--measure 0"),
        ([*TASK[:-1], "512", "--measure", "2"], "512 processes on this machine"),
    ],
)
def test_wrong_options_are_one_paragraph(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and what to write instead."""
    code, _, text = ended(capsys, *argv)
    assert code == 2 and said in text and "Write instead:" in text
