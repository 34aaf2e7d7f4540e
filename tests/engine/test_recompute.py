"""Recomputation, and activations in host memory: dropout, gathers, bytes by tier, what is freed."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.models import gpt
from shardwise.observe.meter import Meter
from tests.engine.cases import ROWS, Case, build, foreseen, ranks_of, rows_task, small_gpt
from tests.engine.pipelines import Dropped, Dropping, chain
from tests.engine.tensors import Held, gpt_task, mine, run, train
from tests.pool import run_gloo, run_threads


def drawn(world: World, plan: str) -> Held:
    """Steps of blocks with dropout, on generators in a state that follows from the rank."""
    made = chain(Dropping, Dropped)()
    torch.manual_seed(world.rank)
    return run(
        world, rows_task(lambda: made), Case(f"{plan} fp64", options={"lr": 0.01, "eps": 1e-4})
    )


HOST = ["activations:host", *(f"activations:host recompute:{how}" for how in ("full", "selective"))]
DROPPING = [
    *(("dp1", f"recompute:{how}") for how in ("full", "selective", "every2", "3KiB")),
    *(
        (plan, f"recompute:{how}")
        for plan in (*(f"dp2 {row}" for row in ROWS), "dp2 zero1 accumulate:2")
        for how in ("full", "selective", "3KiB")
    ),
    *((plan, words) for plan in ("dp2", "dp2 zero3", "dp2 zero1 accumulate:2") for words in HOST),
    *(
        (plan, words)
        for plan in ("pp2 1f1b:3", "pp2 zb-v:2")
        for words in ("recompute:full", "recompute:selective", "activations:host")
    ),
]


@pytest.mark.cases(8)
@pytest.mark.parametrize(("plan", "words"), DROPPING)
def test_dropout(plan: str, words: str):
    """Masks of a stage and a microbatch come again, I and W included: equal to the last bit."""
    without, found = (run_gloo(ranks_of(plan), drawn, text) for text in (plan, f"{plan} {words}"))
    for one, other in zip(found, without, strict=True):
        assert one.losses == other.losses
        for a, b in zip(one.weights, other.weights, strict=True):
            assert torch.equal(a.values, b.values), a.name


@pytest.mark.parametrize("how", ["full", "selective"])
def test_zero3_gathers_as_often(how: str):
    """One gather serves the recomputation and the backward pass: the ledger is the same."""
    case = Case("dp2 zero3 fp64", units="auto")
    without, found = (
        run_threads(2, train, gpt_task(), Case(f"{case.plan}{word}", units="auto"))
        for word in ("", f" recompute:{how}")
    )
    for held, other in zip(found, without, strict=True):
        assert held.bytes == other.bytes
        assert held.lines == other.lines


def freed(world: World) -> bool:
    """Whether the block of the other rank is freed when the engine has been built."""
    model = small_gpt()
    other = ref(model.get_submodule(f"blocks.{1 - world.rank}"))
    sw.parallelize(model, "pp2 fp64 1f1b:2 recompute:full", world, loss=gpt.loss)
    return other() is None


def test_a_pipeline_rank_frees_recomputed_layers_of_others():
    """Without waiting for the garbage collector: nothing refers to them."""
    gc.disable()
    try:
        assert run_threads(2, freed) == [True, True]
    finally:
        gc.enable()


# --- activations in host memory -----------------------------------------------------------------

SUM_BYTES = 8  # the double to which the losses of microbatches are added


def on_tiers(world: World, plan: str) -> list[dict[str, int]]:
    """Of a second step, measured and predicted: kept by tier at the loss, fetched, peak."""
    task, case = gpt_task("untied", rows=8), Case(f"{plan} fp64")
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
    measured = {"fetched": host.most_fetched_bytes, "peak": meter.host_bytes}
    predicted = {"fetched": told.fetched, "peak": told.host_activations}
    assert host.fetched_bytes == 0
    if "pp" in plan:  # whose microbatches under way the schedule says
        return [measured, predicted]
    predicted |= {"device": told.activations + SUM_BYTES, "host": told.host_activations}
    return [measured | at_loss, predicted]


TIERS = [
    *(
        f"{plan} {words}"
        for plan in ("dp2 zero3", "tp2", "tp2 sp")
        for words in (*HOST, "activations:host recompute:blocks.*.mlp,blocks.1")
    ),
    *(f"{plan} recompute:partitioned-host" for plan in ("tp2", "tp2 sp")),
    *(f"pp2 {word} activations:host" for word in ("1f1b:4", "gpipe:4", "zb-v:4")),
    *(f"pp2 {word} activations:host recompute:full" for word in ("1f1b:4", "zb-h1:4")),
]


@pytest.mark.full
@pytest.mark.parametrize("plan", TIERS)
def test_bytes_by_tier(plan: str):
    """At the loss the device keeps what is outside of blocks, the host the rest, to the byte.

    The host keeps what a schedule has under way, and a rank fetches two blocks at most.
    """
    for measured, predicted in run_threads(2, on_tiers, plan):
        assert measured == predicted


def test_evaluation_copies_nothing():
    """Without gradients nothing is kept."""
    task = gpt_task()
    engine = build(alone(), task, Case("activations:host fp64"))
    before = engine.ledger.copy()
    engine.evaluate(task.batch(0))
    assert not any(key.axis == "tier" for key in engine.ledger.since(before))
