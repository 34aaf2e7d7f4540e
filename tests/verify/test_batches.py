"""The batches of a proof: what the commands' models do not have by themselves."""

from dataclasses import replace

import pytest
import torch

from shardwise.core.plan import Plan
from shardwise.models.registry import find
from shardwise.verify.batches import Division, ragged, rows_of_step
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
