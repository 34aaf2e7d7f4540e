"""`recompute:SIZE`: the choice against all choices; its bytes and operations as measured."""

import random
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.word_values import size_text
from shardwise.models import gpt
from shardwise.models.gpt import random_text
from shardwise.models.initial import fill
from shardwise.observe.meter import Meter
from shardwise.techniques.recompute.apply import KEPT, Recomputation
from shardwise.techniques.recompute.price_budget import BlockCost, cheapest
from tests.pool import run_threads

BLOCKS, LAYERS = 12, 6


def costs_of(seed: int, moments: int) -> list[list[BlockCost]]:
    """Blocks of a few sizes, with bytes and operations of full, selective and none."""
    own = random.Random(seed)
    kinds: list[list[BlockCost]] = []
    for _ in range(own.choice([1, 2, 4])):
        full, most = own.randint(1, 9), own.randint(40, 99)
        each = [
            (full, own.randint(50, 99)),
            (own.randint(full, most), own.choice([0, 20])),
            (most, 0),
        ]
        counts = [own.randint(1, 3) for _ in range(moments)]
        kinds.append(
            [BlockCost(tuple(n * stored for n in counts), flops) for stored, flops in each]
        )
    return [own.choice(kinds) for _ in range(BLOCKS)]


def best_of_all(costs: list[list[BlockCost]], room: tuple[int, ...]) -> tuple[int, int] | None:
    """The fewest operations, and the most bytes kept with these, over all 3 ** 12 choices."""
    kept = torch.zeros(1, len(room), dtype=torch.int64)
    flops = torch.zeros(1, dtype=torch.int64)
    for block in costs:
        kept = (kept[:, None] + torch.tensor([c.kept_bytes for c in block])).flatten(0, 1)
        flops = (flops[:, None] + torch.tensor([c.flops for c in block])).flatten()
    fits = (kept <= torch.tensor(room)).all(1)
    if not fits.any():
        return None
    fewest = int(flops[fits].min())
    return fewest, int(kept[fits & (flops == fewest)].sum(1).max())


@pytest.mark.parametrize("moments", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_the_choice_is_the_best_of_all(seed: int, moments: int):
    """Of 12 blocks no choice that fits has fewer operations, or keeps more with as many."""
    costs = costs_of(seed, moments)
    most = [sum(block[-1].kept_bytes[k] for block in costs) for k in range(moments)]
    for share in (0.05, 0.3, 0.6, 0.9, 1.0):
        room = tuple(round(share * n) for n in most)
        found, expected = cheapest(costs, room), best_of_all(costs, room)
        if found is None:
            assert expected is None
            continue
        chosen = [block[kind] for block, kind in zip(costs, found, strict=True)]
        kept = [sum(c.kept_bytes[k] for c in chosen) for k in range(moments)]
        assert all(n <= most for n, most in zip(kept, room, strict=True))
        assert (sum(c.flops for c in chosen), sum(kept)) == expected


def test_blocks_that_all_differ():
    """Of 60 blocks of different sizes the choice fits, and uses 95 % of the budget."""
    own = random.Random(0)
    costs = [
        [
            BlockCost((own.randint(10**5, 10**6),), own.randint(10**6, 10**7)),
            BlockCost((5 * 10**6 + n,), 0),
        ]
        for n in range(60)
    ]
    room = 10**8
    found = cheapest(costs, (room,))
    assert found is not None
    kept = sum(block[kind].kept_bytes[0] for block, kind in zip(costs, found, strict=True))
    assert 0.95 * room <= kept <= room


SIZES: dict[str, Any] = {"width": 64, "heads": 8, "kv_heads": 4, "hidden": 96, "sequence": 16}


def made(layers: int = LAYERS) -> gpt.GPT:
    """A GPT of so many blocks."""
    model = gpt.GPT(gpt.GPTConfig(vocabulary=61, layers=layers, **SIZES))
    fill(model, 0)
    return model


def batch() -> dict[str, torch.Tensor]:
    """Text whose tensors own their memory."""
    return {name: x.clone() for name, x in random_text(3, 16, 61, 0).items()}


def engine_of(plan: str, world: World) -> sw.Engine:
    return sw.parallelize(made(), plan, world, loss=gpt.loss, tokens=gpt.tokens)


def predicted(plan: str, rank: int = 0) -> Any:
    return sw.predict(made(), plan, batch(), loss=gpt.loss, rank=rank)


def live(world: World, plan: str) -> tuple[int, dict[str, str]]:
    """Live bytes of activations after a forward pass that follows a step, and what was chosen."""
    engine = engine_of(plan, world)
    engine.step(batch())
    meter = Meter(engine)
    with meter:
        text = batch()
        loss = gpt.loss(engine.model, text)
    live = sum(n for place, n in meter.now().items() if place.category == "activations")
    beside = loss.nbytes + sum(x.nbytes for x in text.values())
    return live - beside, dict(engine.recompute.kinds)


def least_and_most() -> tuple[int, int]:
    return predicted("fp64 recompute:full").activations, predicted("fp64").activations


@pytest.mark.cases(1)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_budget_is_met_and_used(share: float):
    """The activations live after a forward are those predicted: the budget, less 5 % at most."""
    least, most = least_and_most()
    budget = round(least + share * (most - least))
    plan = f"fp64 recompute:{size_text(budget)}"
    ((kept, kinds),) = run_threads(1, live, plan)
    found = predicted(plan)
    assert kept == found.activations
    assert kinds == found.recomputed
    assert 0.95 * budget <= kept <= budget


@pytest.mark.full
def test_a_budget_on_the_tensor_axis():
    """Each rank keeps its own part of a block; both keep the budget, and choose the same."""
    budget = 600 * 2**10
    ranks = run_threads(2, live, "tp2 sp fp64 recompute:600KiB")
    assert all(0.9 * budget <= kept <= budget for kept, _ in ranks)
    assert ranks[0][1] == ranks[1][1] != {}


@pytest.mark.parametrize("schedule", ["1f1b:4", "interleaved:4x2", "zb-v:4"])
def test_a_budget_of_each_rank_of_a_pipeline(schedule: str):
    """Every rank keeps its budget with all its microbatches under way, and uses most of it."""
    budget, rows = 1000 * 2**10, 8
    own = random_text(rows, 16, 61, 0)
    plan = f"pp2 {schedule} fp64 recompute:{size_text(budget)}"
    for rank in range(2):
        found = sw.predict(made(), plan, own, loss=gpt.loss, rank=rank).activations
        assert 0.7 * budget <= found <= budget


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    batch, heads, rows, width = query
    return sdpa_flop_count(query, (batch, heads, rows, width), (batch, heads, rows, value[-1]))


COUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


def counted(plan: str) -> int:
    """The operations of a second step."""
    engine = engine_of(plan, alone())
    engine.step(batch())
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        engine.step(batch())
    return counter.get_total_flops()


@pytest.mark.parametrize("what", ["full", "selective", "every3", "blocks.*.attn", "1MiB"])
def test_operations_that_are_added(what: str):
    """Those predicted are those counted."""
    plan = f"fp64 recompute:{what}"
    assert counted(plan) - counted("fp64") == predicted(plan).recomputed_flops


def test_operations_of_microbatches():
    """Each microbatch of a step adds its own."""
    one, two = (
        sw.predict(
            made(2), f"recompute:full accumulate:{n}", random_text(4, 16, 61, 0), loss=gpt.loss
        )
        for n in (1, 2)
    )
    assert one.recomputed_flops == two.recomputed_flops > 0


@pytest.mark.full
def test_a_budget_that_cannot_be_met():
    """It is refused with the smallest that can, before a step has begun."""
    least, _ = least_and_most()
    with pytest.raises(InputError, match=f"Write instead: recompute:{size_text(least)}") as caught:
        predicted(f"fp64 recompute:{size_text(least - 1)}")
    assert f"at least {least:,} bytes" in str(caught.value)
    assert predicted(f"fp64 recompute:{size_text(least)}").activations == least
    engine = engine_of("recompute:1KiB", alone())
    with pytest.raises(InputError, match="Write instead: recompute:"):
        engine.step(batch())
    assert not engine.data.in_step


def test_the_first_blocks_keep_least():
    """Blocks are alike here: those that backward comes to last are recomputed."""
    found = predicted("fp64 recompute:1MiB").recomputed
    order = ["full", "selective", "none"]
    kinds = [order.index(found.get(f"blocks.{k}", "none")) for k in range(LAYERS)]
    assert kinds == sorted(kinds) and len({*kinds}) > 1


@pytest.mark.parametrize(
    ("word", "text"),
    [("8GiB", "8GiB"), ("1024MiB", "1GiB"), ("100B", "100B")],
)
def test_the_word(word: str, text: str):
    """A size is a budget; its text is in the largest unit."""
    assert Plan.parse(f"recompute:{word}").recompute == text


def test_a_size_without_its_unit_is_refused():
    """With the units there are."""
    with pytest.raises(InputError, match="with its unit, B, KiB, MiB or GiB"):
        Plan.parse("recompute:8G")


def test_lengths_without_end_cost_a_bounded_number_of_predictions():
    """The first shapes have one each; later ones get that of the next larger, if it is near."""
    asked: list[int] = []

    def choose(text: torch.Tensor) -> dict[str, str]:
        asked.append(len(text))
        return {"block": str(len(text))}

    recomputation = Recomputation({}, choose)

    def begun(length: int) -> str:
        recomputation.begin(torch.zeros(length), (), trains=True)
        assert len(recomputation.known) <= KEPT
        return recomputation.kinds["block"]

    lengths = range(8, 8 * (KEPT + 1), 8)
    assert [begun(n) for n in lengths] == [*map(str, lengths)] and asked == [*lengths]
    own = random.Random(0)
    for length in own.choices(range(8, lengths[-1]), k=500):
        assert begun(length) == str(-(-length // 8) * 8)
    assert asked == [*lengths]
    assert begun(1) == "1" and begun(1000) == "1000" and begun(999) == "1000"
    assert asked == [*lengths, 1, 1000]
