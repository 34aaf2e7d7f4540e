"""DAPPLE's planner: against brute force, against the clock, and where the answer is known."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.schedule.clock import ActionCosts, clock
from shardwise.core.schedule.library import build
from shardwise.techniques.pipeline.price_stages import (
    LayerProfile,
    PlannedStage,
    StageLinks,
    latency,
    partition,
)

TIMES = st.integers(0, 9).map(float)
LAYERS = st.lists(st.builds(LayerProfile, TIMES, TIMES, TIMES, TIMES), min_size=1, max_size=5)
LINKS = st.builds(
    StageLinks,
    st.sampled_from([0.5, 4.0, math.inf]),
    st.sampled_from([0.5, 4.0, math.inf]),
    st.sampled_from([0.0, 1.0]),
)


def every_partition(first: int, n: int, devices: int) -> Iterator[list[PlannedStage]]:
    """All ways to cut layers `first` to n into stages on exactly so many devices."""
    if first == n and not devices:
        yield []
    for last in range(first + 1, n + 1):
        for replicas in range(1, devices + 1):
            for rest in every_partition(last, n, devices - replicas):
                yield [PlannedStage(first, last, replicas), *rest]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(LAYERS, st.integers(1, 4), st.integers(1, 6), LINKS)
def test_nothing_is_better_than_the_plan(
    layers: list[LayerProfile], devices: int, microbatches: int, links: StageLinks
):
    """The dynamic programme finds the least of all partitions, and says its latency."""
    found = partition(layers, devices, microbatches, links)
    assert found.latency_s == pytest.approx(latency(found.stages, layers, microbatches, links))
    assert sum(stage.replicas for stage in found.stages) == devices
    least = min(
        latency(stages, layers, microbatches, links)
        for stages in every_partition(0, len(layers), devices)
    )
    assert found.latency_s == pytest.approx(least)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(LAYERS, st.integers(1, 6), st.sampled_from(["1f1b", "gpipe", "dapple"]))
def test_no_schedule_undercuts_the_latency(
    layers: list[LayerProfile], microbatches: int, name: str
):
    """Run on the clock with each stage's own times, no schedule ends before the formula says."""
    stages = [PlannedStage(k, k + 1, 1) for k in range(len(layers))]
    costs = ActionCosts(
        F=tuple(layer.forward_s for layer in layers), B=tuple(layer.backward_s for layer in layers)
    )
    span = clock(build(f"{name}:{microbatches}", len(layers)), costs).makespan
    assert span >= latency(stages, layers, microbatches, StageLinks()) - 1e-9


def test_the_latency_is_1f1b_where_stages_are_alike():
    """Equal stages, no messages, no all-reduce: (m+p-1)(F+B)."""
    layers = [LayerProfile(1.0, 2.0, 0.0)] * 4
    stages = [PlannedStage(k, k + 1, 1) for k in range(4)]
    assert latency(stages, layers, 8) == clock(build("1f1b:8", 4)).makespan == 3 * 11


def test_one_heavy_stage_hides_the_others():
    """Where the first stage takes ten times as long the step takes what it takes: m(F+B)."""
    layers = [LayerProfile(10.0, 20.0, 0.0), LayerProfile(1.0, 2.0, 0.0)]
    stages = [PlannedStage(0, 1, 1), PlannedStage(1, 2, 1)]
    costs = ActionCosts(F=(10.0, 1.0), B=(20.0, 2.0))
    assert latency(stages, layers, 6) == clock(build("1f1b:6", 2), costs).makespan == 180


def test_heavy_weights_ask_for_stages_and_heavy_activations_for_replicas():
    """A slow all-reduce makes a pipeline, slow messages between stages make data parallelism."""
    heavy_weights = [LayerProfile(1.0, 2.0, 1.0, 1000.0)] * 4
    found = partition(heavy_weights, 4, 64, StageLinks(1e3, 1.0))
    assert found.stages == tuple(PlannedStage(k, k + 1, 1) for k in range(4))
    heavy_outputs = [LayerProfile(1.0, 2.0, 1000.0, 1.0)] * 4
    assert partition(heavy_outputs, 4, 64, StageLinks(1.0, 1e3)).stages == (PlannedStage(0, 4, 4),)


def test_a_heavy_layer_is_replicated():
    """Convolutions first, a small head last, as in the paper's VGG: the body is replicated."""
    layers = [LayerProfile(9.0, 18.0, 1.0, 1.0), LayerProfile(3.0, 6.0, 1.0, 1000.0)]
    assert partition(layers, 4, 32, StageLinks(1e3, 1e2)).stages == (
        PlannedStage(0, 1, 3),
        PlannedStage(1, 2, 1),
    )
