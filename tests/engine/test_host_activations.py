"""Activations in host memory with every other technique: parity, bytes by tier, leaks, dropout."""

from typing import Any

import pytest
import torch

from shardwise.comm.world import World, alone
from shardwise.core.plan import Plan
from shardwise.engine.meter import Meter
from tests.engine.cases import Case, build, foreseen
from tests.engine.tensors import (
    gpt_task,
    mine,
)
from tests.engine.test_dropout import gradients
from tests.engine.test_recompute import drawn, same, staged
from tests.pool import run_gloo, run_threads

SUM_BYTES = 8  # the double to which the losses of microbatches are added
WORDS = [
    "activations:host",
    *(
        f"activations:host recompute:{how}"
        for how in ("full", "selective", "blocks.*.mlp,blocks.1")
    ),
]


def kept(world: World, plan: str) -> list[dict[str, int]]:
    """Of a second step, measured and predicted: kept at the loss by tier, and back at once."""
    task, case = gpt_task("untied", rows=6), Case(f"{plan} fp64")
    engine, theory = build(world, task, case), foreseen(world, task, case)
    engine.step(mine(engine, task.batch(0)))
    batch, meter, at_loss = mine(engine, task.batch(1)), Meter(engine), dict[str, int]()
    own, loss = {x.untyped_storage()._cdata for x in batch.values()}, engine.passes.objective

    def watched(model: Any, part: Any) -> torch.Tensor:
        found = loss(model, part)
        meter.now()
        skipped = own | {found.untyped_storage()._cdata}
        for tier in ("device", "host"):
            live = (one for key, one in meter.storages.items() if key not in skipped)
            at_loss[tier] = sum(
                one.nbytes() or 0 for one in live if one.place[::2] == ("activations", tier)
            )
        return found

    engine.passes.objective = watched
    host = engine.recompute.host
    assert host is not None
    with meter:
        engine.step(batch)
    told = theory.of(batch)
    measured = at_loss | {"fetched": host.most_fetched_bytes, "peak": meter.host_bytes}
    assert host.fetched_bytes == 0
    predicted = {"device": told.activations + SUM_BYTES, "host": told.host_activations}
    return [measured, predicted | {"fetched": told.fetched, "peak": told.host_activations}]


TIERS = [
    *(f"{plan} {words}" for plan in ("dp2 zero3", "tp2", "tp2 sp") for words in WORDS),
    *(f"{plan} recompute:partitioned-host" for plan in ("tp2", "tp2 sp")),
]


@pytest.mark.full
@pytest.mark.parametrize("plan", TIERS)
def test_bytes_by_tier(plan: str):
    """At the loss the device keeps what is outside of blocks, the host the rest, to the byte."""
    for measured, predicted in run_threads(2, kept, plan):
        assert measured == predicted


def on_stages(world: World, plan: str) -> list[int]:
    """The most bytes on the host and back at once in a second step, measured and predicted."""
    task, case = gpt_task("untied", rows=8), Case(f"{plan} fp64")
    engine, theory = build(world, task, case), foreseen(world, task, case)
    for step in range(2):
        batch = mine(engine, task.batch(step))
        with Meter(engine) as meter:
            engine.step(batch)
    told, host = theory.of(batch), engine.recompute.host
    assert host is not None
    measured = [meter.host_bytes, host.most_fetched_bytes]
    return [*measured, told.host_activations, told.fetched]


@pytest.mark.crossed
@pytest.mark.full
@pytest.mark.parametrize("words", WORDS[:2])
@pytest.mark.parametrize("plan", ["pp2 1f1b:4", "pp2 gpipe:4", "pp2 zb-h1:4", "pp2 zb-v:4"])
def test_host_bytes_of_stages(plan: str, words: str):
    """The host keeps what the schedule has under way, and a rank fetches two blocks at most."""
    for host, fetched, told, ahead in run_threads(2, on_stages, f"{plan} {words}"):
        assert (host, fetched) == (told, ahead)


@pytest.mark.parametrize("words", WORDS[:3])
@pytest.mark.parametrize("plan", ["dp2 ddp", "dp2 zero3", "dp2 zero1 accumulate:2"])
def test_dropout(plan: str, words: str):
    """With dropout the run is equal to the last bit to the run that keeps its activations."""
    for one, other in zip(
        run_gloo(2, drawn, f"{plan} {words}"), run_gloo(2, drawn, plan), strict=True
    ):
        same(one, other)


@pytest.mark.full
@pytest.mark.parametrize("words", [WORDS[0], "recompute:partitioned-host"])
@pytest.mark.parametrize("plan", ["tp2", "tp2 sp"])
def test_dropout_on_the_tensor_axis(plan: str, words: str):
    """Whole and sharded activations are dropped as they were."""
    device, host = (run_gloo(2, gradients, f"{plan}{word}", False) for word in ("", f" {words}"))
    for one, other in zip(device, host, strict=True):
        for name, gradient in one.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("plan", ["pp2 1f1b:3", "pp2 zb-v:2"])
def test_dropout_in_pipelines(plan: str):
    """The masks of a stage and a microbatch come back with it, in I and W too."""
    without, found = (run_gloo(2, staged, f"{plan}{word}") for word in ("", " activations:host"))
    assert [held.losses for held in found] == [held.losses for held in without]


def test_evaluation_copies_nothing():
    """Without gradients nothing is kept."""
    task = gpt_task()
    engine = build(alone(), task, Case("activations:host fp64"))
    before = engine.ledger.copy()
    engine.evaluate(task.batch(0))
    assert not any(key.axis == "tier" for key in engine.ledger.since(before))


def test_every_word_round_trips():
    """The plan's text has the word."""
    plan = Plan.parse("dp2 activations:host recompute:full zero3")
    assert str(plan) == "dp2 zero3 recompute:full activations:host"
    assert Plan.parse(str(plan)) == plan
