"""Recomputation, and activations in host memory: dropout, gathers, bytes by tier, what is freed."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.mesh import Mesh
from shardwise.core.tools.tape import SMALL_BYTES
from shardwise.models import gpt
from shardwise.observe.meter import Meter
from shardwise.techniques.recompute.partitioned import Inputs
from tests.engine.cases import (
    Case,
    build,
    foreseen,
    ranks_of,
    rows_task,
    settled,
    small_gpt,
)
from tests.engine.pipelines import Dropped, Dropping, chain
from tests.engine.tensors import Held, gpt_task, mine, run, train
from tests.engine.zoo import Stack
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
    *(("dp2 zero3", words) for words in ("recompute:selective", *HOST)),
    *(("dp2 zero1 accumulate:2", f"recompute:{how}") for how in ("full", "3KiB")),
    *(
        (plan, words)
        for plan in ("pp2 zb-v:2", "pp2 1f1b:3")
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


def taken(world: World) -> tuple[bool, bool]:
    """Whether an input is freed after the first forward, and comes back for the second."""
    x = torch.arange(15.0, requires_grad=True)
    inputs, whole = Inputs(world.on(Mesh((("tp", 2),))).axis("tp"), x), ref(x)
    expected = inputs.take().tolist()
    del x
    return whole() is None, inputs.take().tolist() == expected


def test_an_input_is_not_kept_whole():
    """`recompute:partitioned`: of the tensor that a module was given only a piece is left."""
    assert run_threads(2, taken) == [(True, True)] * 2


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
    *("dp2 zero3 activations:host", "tp2 sp activations:host recompute:blocks.*.mlp,blocks.1"),
    *(f"{plan} activations:host recompute:selective" for plan in ("tp2", "dp2 zero3")),
    *("tp2 sp recompute:partitioned-host", "pp2 gpipe:4 activations:host"),
    *(f"pp2 {word} activations:host recompute:full" for word in ("1f1b:4", "zb-h1:4")),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", TIERS)
def test_bytes_by_tier(plan: str):
    """At the loss the device keeps what is outside of blocks, the host the rest, to the byte.

    The host keeps what a schedule has under way, and a rank fetches two blocks at most.
    """
    for measured, predicted in run_threads(2, on_tiers, plan):
        assert measured == predicted


class Gated(nn.Module):
    """The halves of one product, multiplied: autograd saves views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(6, 256), nn.Linear(128, 6)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.both(x).chunk(2, -1)
        return x + self.down(first * second)


def most(words: str, blocks: int) -> tuple[list[float], int, int]:
    """Losses of two steps, and the most bytes of activations of the second by tier."""
    task = rows_task(lambda: settled(Stack(*(Gated() for _ in range(blocks)))))
    engine = build(alone(), task, Case(f"{words} fp64", units=Gated))
    meter = Meter(engine)
    losses = [engine.step(task.batch(0)).loss]
    with meter:
        losses.append(engine.step(task.batch(1)).loss)
    return losses, meter.most["activations"], meter.host_peak.get("activations", 0)


def test_two_blocks_are_on_the_device():
    """More blocks need no more of the device; the host keeps those of one microbatch."""
    (plain, *_), (found, few, _) = most("dp1", 4), most("activations:host", 4)
    _, more, host = most("activations:host", 6)
    _, _, half = most("activations:host accumulate:2", 6)
    assert found == plain
    assert more - few < 2 * SMALL_BYTES
    assert half <= 4 / 7 * host
