"""Parts of a proof: batches, and pieces that cover each tensor once."""

from dataclasses import replace

import pytest
import torch

from shardwise.core.plan.plan import Plan
from shardwise.models.registry import find
from shardwise.verify.coverage import uncovered
from shardwise.verify.finding import BoxPlace
from shardwise.verify.oracles.batches import Division, ragged, rows_of_step
from shardwise.verify.parity import with_early_delays
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
