"""`recompute:SIZE`: the bytes and the operations of its choice, as measured."""

import random
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.core.plan.words import size_text
from shardwise.models import gpt
from shardwise.models.gpt import random_text
from shardwise.models.trainable import fill
from shardwise.observe.meter import Meter
from shardwise.techniques.recompute.apply import KEPT, Foreseen, Recomputation
from tests.pool import run_threads

LAYERS = 4


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "heads": 8,
    "kv_heads": 4,
    "intermediate_size": 96,
    "sequence": 16,
}


def made() -> gpt.GPT:
    model = gpt.GPT(gpt.GPTConfig(vocabulary=61, layers=LAYERS, **SIZES))
    fill(model, 0)
    return model


def batch(rows: int = 3) -> dict[str, torch.Tensor]:
    """Text whose tensors own their memory."""
    return {name: x.clone() for name, x in random_text(rows, 16, 61, 0).items()}


def predicted(plan: str, rank: int = 0, rows: int = 3) -> Any:
    return sw.predict(made(), plan, batch(rows), loss=gpt.loss, rank=rank)


def live(world: World, plan: str) -> tuple[int, dict[str, str]]:
    """Live bytes of activations after a forward pass that follows a step, and what was chosen."""
    engine = sw.parallelize(made(), plan, world, loss=gpt.loss, tokens=gpt.tokens)
    engine.step(batch())
    meter = Meter(engine)
    with meter:
        text = batch()
        loss = gpt.loss(engine.model, text)
    live = sum(n for place, n in meter.now().items() if place.category == "activations")
    beside = loss.nbytes + sum(x.nbytes for x in text.values())
    return live - beside, dict(engine.recompute.kinds)


@pytest.mark.cases(1)
@pytest.mark.parametrize("share", [0.5, 0.0, 1.0])
def test_a_budget_is_met_and_used(share: float):
    """The activations live after a forward are those predicted: the budget, less those of a block
    at most. Those that backward comes to last are recomputed.
    """
    least, most = (predicted(plan).activations for plan in ("fp64 recompute:full", "fp64"))
    budget = round(least + share * (most - least))
    plan = f"fp64 recompute:{size_text(budget)}"
    ((kept, kinds),) = run_threads(1, live, plan)
    found = predicted(plan)
    assert kept == found.activations
    assert kinds == found.recomputed
    assert 0 <= budget - kept < (most - least) / LAYERS
    order = ["full", "selective", "none"]
    indices = [order.index(kinds.get(f"blocks.{k}", "none")) for k in range(LAYERS)]
    assert indices == sorted(indices)


@pytest.mark.parametrize("schedule", ["1f1b:4", "zb-v:4", "interleaved:4x2"])
def test_a_budget_of_each_rank_of_a_pipeline(schedule: str):
    """Every rank keeps its budget with all its microbatches under way, and recomputes no more than
    it must: some blocks only if all do not fit, and some in full only if selective does not.
    """
    budget = 1000 * 2**10
    plan, less = f"pp2 {schedule} fp64", {"full": " recompute:selective", "selective": ""}
    for rank in range(2):
        found = predicted(f"{plan} recompute:{size_text(budget)}", rank, 8)
        assert found.activations <= budget
        for kind in {*found.recomputed.values()}:
            assert predicted(f"{plan}{less[kind]}", rank, 8).activations > budget


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    batch, heads, rows, width = query
    return sdpa_flop_count(query, (batch, heads, rows, width), (batch, heads, rows, value[-1]))


COUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


def counted(plan: str) -> int:
    """The operations of a second step."""
    engine = sw.parallelize(made(), plan, alone(), loss=gpt.loss, tokens=gpt.tokens)
    engine.step(batch())
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        engine.step(batch())
    return counter.get_total_flops()


@pytest.mark.parametrize("what", ["full", "1MiB", "selective", "every3", "blocks.*.attn"])
def test_operations_that_are_added(what: str):
    """Those predicted are those counted."""
    plan = f"fp64 recompute:{what}"
    assert counted(plan) - counted("fp64") == predicted(plan).recomputed_flops


def test_operations_of_microbatches():
    """Each microbatch of a step adds its own."""
    one, two = (predicted(f"recompute:full accumulate:{n}", rows=4) for n in (1, 2))
    assert one.recomputed_flops == two.recomputed_flops > 0


@pytest.mark.full
def test_a_budget_that_cannot_be_met():
    """It is refused with the smallest that can, before a step has begun."""
    least = predicted("fp64 recompute:full").activations
    with pytest.raises(InputError, match=f"Write instead: recompute:{size_text(least)}") as caught:
        predicted(f"fp64 recompute:{size_text(least - 1)}")
    assert f"at least {least:,} bytes" in str(caught.value)
    assert predicted(f"fp64 recompute:{size_text(least)}").activations == least
    engine = sw.parallelize(made(), "recompute:1KiB", alone(), loss=gpt.loss, tokens=gpt.tokens)
    with pytest.raises(InputError, match="Write instead: recompute:"):
        engine.step(batch())
    assert not engine.data.in_step


def test_lengths_without_end_cost_a_bounded_number_of_predictions():
    """The first shapes have one each; later ones get that of the next larger, if it is near."""
    asked: list[int] = []

    def choose(text: torch.Tensor) -> Foreseen:
        asked.append(len(text))
        return Foreseen({"block": str(len(text))}, {})

    recomputation = Recomputation({}, choose)

    def begun(length: int) -> str:
        recomputation.begin(torch.zeros(length), (), trains=True)
        assert len(recomputation.known) <= KEPT
        return recomputation.kinds["block"]

    lengths = range(8, 8 * (KEPT + 1), 8)
    assert [begun(n) for n in lengths] == [*map(str, lengths)] and asked == [*lengths]
    for length in random.Random(0).choices(range(8, lengths[-1]), k=500):
        assert begun(length) == str(-(-length // 8) * 8)
    assert asked == [*lengths]
    assert begun(1) == "1" and begun(1000) == "1000" and begun(999) == "1000"
    assert asked == [*lengths, 1, 1000]
