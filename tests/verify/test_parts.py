"""Parts of a proof: batches, pieces that cover each tensor once, and masks of dropout."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwise.comm.world import World
from shardwise.core.plan.plan import Plan
from shardwise.engine.checks.consistency import CHECKED_STEPS
from shardwise.models.registry import find
from shardwise.techniques.pipeline.pipelined import Pipelined
from shardwise.techniques.tensor import rng
from shardwise.techniques.tensor.rng import ShardedRandom
from shardwise.verify.coverage import uncovered
from shardwise.verify.draws import compare_draws
from shardwise.verify.finding import BoxPlace, Errors
from shardwise.verify.oracles.batches import Division, ragged, rows_of_step
from shardwise.verify.parity import engine_of, equal_share, with_early_delays
from tests.pool import run_gloo
from tests.verify import micro

ROWS = 6


@pytest.mark.parametrize("name", ["gpt", "moe:argmax", "hf:llama"])
def test_tokens_are_ragged(name: str):
    """Rows have different numbers of tokens, and with an odd seed they are a position shorter."""
    model = ragged(find(name), Plan.parse("dp2"))
    assert model.tokens is not None
    even, odd = model.batch(ROWS, 2), model.batch(ROWS, 3)
    by_row = {int((row != -100).sum()) for row in even["targets"]}
    assert len(by_row) > 1
    assert model.tokens(even) < even["targets"].numel() * 9 // 10
    assert all(odd[key].shape[1] + 1 == x.shape[1] for key, x in even.items())


@pytest.mark.parametrize(
    ("plan", "ends"),
    [("tp2", [511, 512, 1023]), ("dp2 zero1 | head: tp4", [255, 256, 511, 512, 767, 768, 1023])],
)
def test_the_ends_of_each_rank_s_words(plan: str, ends: list[int]):
    """Each row has the first and the last word of every rank's part, as input and as target."""
    batch = ragged(find("gpt"), Plan.parse(plan)).batch(ROWS, 2)
    assert all({*ends} <= {*row.tolist()} for row in (*batch["inputs"], *batch["targets"]))


def test_other_batches_stay():
    """Batches of numbers, and those of a model that does not count tokens."""
    for model in (micro.find("layers"), replace(micro.find("gpt"), tokens=None)):
        assert ragged(model, Plan.parse("tp2")) is model


def test_a_microbatch_without_rows():
    """In the step in which a rank may be idle the others have too few rows for all microbatches."""
    plan = Plan.parse("dp2 accumulate:4")
    assert rows_of_step(plan, Division(2, 4, 1), 1) == 3
    assert rows_of_step(Plan.parse("dp2 accumulate:4 bf16"), Division(2, 4, 1), 1) == 8


@pytest.mark.parametrize(
    ("word", "proved"),
    [
        ("optim-delayed", "optim-delayed=0"),
        ("optim-delayed=1", "optim-delayed=1"),
        ("optim", "optim"),
    ],
)
def test_delays_begin_early(word: str, proved: str):
    """A proof is shorter than the 40 steps before updates are delayed."""
    assert with_early_delays(Plan.parse(f"dp2 offload:{word}")).offload == proved


def test_ignored_targets_have_no_pattern():
    """They follow from the seed alone, so that all ranks have the same."""
    model = ragged(find("gpt"), Plan.parse("dp2"))
    one, other = (model.batch(ROWS, 2)["targets"] for _ in range(2))
    assert torch.equal(one, other)
    assert not torch.equal(one == -100, model.batch(ROWS, 4)["targets"] == -100)


#: Ranks' pieces of a tensor of shape [4, 3]: first row, rows, replica.
Rows = tuple[int, int, int]


def problem(plan: str, *by_rank: list[Rows]) -> str:
    shown = [
        [
            BoxPlace("model/w", (4, 3), (first, 0), (rows, 3), replica)
            for first, rows, replica in pieces
        ]
        for pieces in by_rank
    ]
    return uncovered(Plan.parse(plan), {"model/w": (4, 3)}, shown)


WHOLE = {
    "dp2": ([(0, 4, 0)], [(0, 4, 1)]),
    "dp2 zero3": ([(0, 3, 0)], [(3, 1, 0)]),
    "dp4 zero1": ([(0, 4, 0)], [], [], []),
    "dp2 zero1": ([(0, 4, 0)], [(0, 4, 1)]),
    "dp_replicate2 dp_shard2 zero3": ([(0, 2, 0)], [(2, 2, 0)], [(0, 2, 1)], [(2, 2, 1)]),
    "tp2": ([(0, 1, 0), (1, 1, 0)], [(2, 2, 0)]),
    "tp2 sp": ([(0, 4, 0)], [(0, 4, 1)]),
    "pp2 1f1b:2": ([(0, 4, 0)], []),
    "pp2 2bw:2": ([(0, 4, 0)], [(0, 4, 1)]),
}


@pytest.mark.parametrize("plan", WHOLE)
def test_what_is_whole_is_let_pass(plan: str):
    """One replica in pieces, several replicas, padding alone, frozen, a stage's own, a tie."""
    assert problem(plan, *WHOLE[plan]) == ""


LACKING: list[tuple[str, tuple[list[Rows], ...], str]] = [
    ("dp2", ([(0, 4, 0)], []), "data replica [1,"),
    ("dp2 zero3", ([(0, 3, 0)], []), "3 elements are compared by no rank"),
    ("dp2 zero3", ([(0, 3, 0)], [(2, 2, 0)]), "3 more than once in replica 0"),
    ("dp2 zero3", ([(0, 4, 0), (0, 4, 1)], []), "12 more than once on the ranks of"),
    ("tp2", ([(0, 4, 0)], []), "tensor rank 0 compares all of it, and tensor rank 1 does not"),
    ("dp2", ([(0, 4, 1)], [(0, 4, 1)]), "12 elements are compared by no rank"),
    ("dp2 zero1", ([(0, 5, 0)], []), "has [4, 3]"),
]


@pytest.mark.parametrize(("plan", "pieces", "said"), LACKING)
def test_what_lacks_or_doubles_anything_is_named(
    plan: str, pieces: tuple[list[Rows], ...], said: str
):
    """A rank that shows nothing, a gap, an overlap, a piece beyond the end."""
    found = problem(plan, *pieces)
    assert found.startswith("model/w: ") and said in found


@dataclass(frozen=True)
class Sabotage:
    """What replaces a method of an owner: `act(real, *args)`, named because ranks are processes."""

    plan: str
    owner: Any
    name: str
    act: Callable[..., Any]


def _first(real: Any, random: ShardedRandom, device: Any) -> Any:
    random.drew = random.drew and not random.seen
    return real(random, device)


SABOTAGES = {
    "shards draw the same": Sabotage(
        "tp2 sp", rng, "seeded", lambda real, device, seed: real(device, seed // 2)
    ),
    "copies draw different ones": Sabotage(
        "tp2", ShardedRandom, "_mark", lambda real, random, _, *args: real(random, True, *args)
    ),
    "only the first pass draws apart": Sabotage("tp2", ShardedRandom, "during", _first),
    "microbatches draw the same": Sabotage(
        "pp2 1f1b:4",
        Pipelined,
        "_microbatch",
        lambda real, run, k, part, tokens, seed: real(run, k, part, tokens, seed - 1_000_003 * k),
    ),
}


def compared(world: World, plan: str, what: str) -> Errors:
    """The masks on this rank, under a sabotage or none."""
    read = Plan.parse(f"{plan} fp64")
    model = ragged(micro.find("gpt"), read)
    sabotage = SABOTAGES.get(what)
    if sabotage is None:
        return _compared(world, read, model)
    real = getattr(sabotage.owner, sabotage.name)
    act = sabotage.act
    with patch.object(sabotage.owner, sabotage.name, lambda *args: act(real, *args)):
        return _compared(world, read, model)


def _compared(world: World, plan: Plan, model: Any) -> Errors:
    engine = engine_of(model, plan, world)
    # in a proof it has made more steps than those that compare gradients
    engine.consistency.checked, engine.consistency.every = CHECKED_STEPS, 0
    return compare_draws(engine, equal_share(model, engine, 0), model.plain())


@pytest.mark.parametrize("plan", ["tp2 sp", "tp2", "pp2 1f1b:4", "dp2 tp2"])
def test_the_masks_of_a_plan(plan: str):
    """Tensor ranks draw one mask for what they have in common, and others for their parts."""
    ranks = Plan.parse(plan).size
    assert [found.largest for found in run_gloo(ranks, compared, plan, "")] == [0.0] * ranks


@pytest.mark.parametrize("what", SABOTAGES)
def test_wrong_masks_are_refused(what: str):
    """Each of these would train, with the wrong noise."""
    found = run_gloo(2, compared, SABOTAGES[what].plan, what)
    assert all(one.largest > 1.0 for one in found)
