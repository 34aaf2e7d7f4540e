"""DAPPLE's planner: against brute force, against the clock, and where the answer is known."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.schedule.clock import Costs, clock
from shardwise.core.schedule.library import build
from shardwise.techniques.pipeline.price_stages import Layer, Links, Stage, latency, partition

TIMES = st.integers(0, 9).map(float)
LAYERS = st.lists(st.builds(Layer, TIMES, TIMES, TIMES, TIMES), min_size=1, max_size=5)
LINKS = st.builds(
    Links,
    st.sampled_from([0.5, 4.0, math.inf]),
    st.sampled_from([0.5, 4.0, math.inf]),
    st.sampled_from([0.0, 1.0]),
)


def every_partition(first: int, n: int, devices: int) -> Iterator[list[Stage]]:
    """All ways to cut layers `first` to n into stages on exactly so many devices."""
    if first == n and not devices:
        yield []
    for last in range(first + 1, n + 1):
        for replicas in range(1, devices + 1):
            for rest in every_partition(last, n, devices - replicas):
                yield [Stage(first, last, replicas), *rest]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(LAYERS, st.integers(1, 4), st.integers(1, 6), LINKS)
def test_nothing_is_better_than_the_plan(
    layers: list[Layer], devices: int, microbatches: int, links: Links
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
def test_no_schedule_undercuts_the_latency(layers: list[Layer], microbatches: int, name: str):
    """Run on the clock with each stage's own times, no schedule ends before the formula says."""
    stages = [Stage(k, k + 1, 1) for k in range(len(layers))]
    costs = Costs(
        F=tuple(layer.forward_s for layer in layers), B=tuple(layer.backward_s for layer in layers)
    )
    span = clock(build(f"{name}:{microbatches}", len(layers)), costs).makespan
    assert span >= latency(stages, layers, microbatches, Links()) - 1e-9


def test_the_latency_is_1f1b_where_stages_are_alike():
    """Equal stages, no messages, no all-reduce: (m+p-1)(F+B)."""
    layers = [Layer(1.0, 2.0, 0.0)] * 4
    stages = [Stage(k, k + 1, 1) for k in range(4)]
    assert latency(stages, layers, 8) == clock(build("1f1b:8", 4)).makespan == 3 * 11


def test_one_heavy_stage_hides_the_others():
    """Where the first stage takes ten times as long the step takes what it takes: m(F+B)."""
    layers = [Layer(10.0, 20.0, 0.0), Layer(1.0, 2.0, 0.0)]
    stages = [Stage(0, 1, 1), Stage(1, 2, 1)]
    costs = Costs(F=(10.0, 1.0), B=(20.0, 2.0))
    assert latency(stages, layers, 6) == clock(build("1f1b:6", 2), costs).makespan == 180


def test_heavy_weights_ask_for_stages_and_heavy_activations_for_replicas():
    """A slow all-reduce makes a pipeline, slow messages between stages make data parallelism."""
    heavy_weights = [Layer(1.0, 2.0, 1.0, 1000.0)] * 4
    found = partition(heavy_weights, 4, 64, Links(1e3, 1.0))
    assert found.stages == tuple(Stage(k, k + 1, 1) for k in range(4))
    heavy_outputs = [Layer(1.0, 2.0, 1000.0, 1.0)] * 4
    assert partition(heavy_outputs, 4, 64, Links(1.0, 1e3)).stages == (Stage(0, 4, 4),)


def test_a_heavy_layer_is_replicated():
    """Convolutions first, a small head last, as in the paper's VGG: the body is replicated."""
    layers = [Layer(9.0, 18.0, 1.0, 1.0), Layer(3.0, 6.0, 1.0, 1000.0)]
    assert partition(layers, 4, 32, Links(1e3, 1e2)).stages == (Stage(0, 1, 3), Stage(1, 2, 1))
