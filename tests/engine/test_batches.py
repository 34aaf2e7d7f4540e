import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise as sw
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.engine.batch import cast, filled, rows, split
from tests.engine.cases import (
    ROWS,
    Case,
    Task,
    assert_same,
    build,
    oracle,
    share,
    text,
    train,
    vectors,
)
from tests.engine.zoo import make
from tests.pool import run_gloo, run_threads


def few_rows(step: int) -> dict[str, Tensor]:
    """Two rows for four ranks: two of them have none."""
    return text(step, rows=2)


def few_tokens(step: int) -> dict[str, Tensor]:
    """Eight rows, of which the last two have one token, and the two before them none at all."""
    batch = text(step, rows=8)
    batch["targets"][4:] = -100
    batch["targets"][7, step] = 5
    return batch


def poisoned(step: int) -> tuple[Tensor, Tensor]:
    return vectors(step, rows=3)


def hostile(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss whose value and gradient on a stand-in of zeros are not numbers."""
    x, y = batch
    return functional.mse_loss(model(x / x.abs().sum(1, keepdim=True)), y)


UNEVEN = {
    "ranks without rows": Task(batch=few_rows),
    "ranks without tokens": Task(batch=few_tokens),
    "not a number on a stand-in": Task(partial(make, "sequential"), poisoned, hostile, None),
}


@pytest.mark.parametrize("task", UNEVEN)
@pytest.mark.parametrize("plan", [f"dp4 {row}" for row in ROWS])
def test_ranks_that_run_out_of_data_take_part_with_weight_zero(plan, task):
    """Fewer rows than ranks, or none that count on some: the mean is still the global batch's."""
    case = Case(f"{plan} fp64", clip=0.5)
    assert_same(run_gloo(4, train, UNEVEN[task], case), oracle(UNEVEN[task], case), 1e-10)


@pytest.mark.parametrize("accumulate", [2, 4])
@pytest.mark.parametrize("task", UNEVEN)
def test_microbatches_may_be_empty(task, accumulate):
    """Fewer rows on a rank than microbatches: the empty ones count for nothing."""
    case = Case(f"dp_replicate2 dp_shard2 zero2 fp64 accumulate:{accumulate}", clip=0.5)
    assert_same(run_threads(4, train, UNEVEN[task], case), oracle(UNEVEN[task], case), 1e-10)


def nothing_at_all(world: World, plan: str) -> list[tuple[float, int, bool]]:
    """A step in whose global batch no token counts, between two ordinary ones."""
    engine = build(world, Task(), Case(plan))
    found = []
    for step in range(3):
        batch = text(step, rows=4)
        if step == 1:
            batch["targets"][:] = -100
        before = [flat.shard.clone() for flat in engine.flats]
        metrics = engine.step(share(batch, engine.data_rank, engine.data_ranks))
        moved = any(not torch.equal(a, f.shard) for a, f in zip(before, engine.flats, strict=True))
        found.append((metrics.loss, metrics.tokens, moved))
    return found


@pytest.mark.parametrize("plan", ["dp2 fp64", "dp2 zero3 fp64 accumulate:2"])
def test_a_batch_without_any_token_changes_nothing(plan):
    """Its loss is 0 over 0 tokens, the weights stay, and the next step goes on."""
    for found in run_threads(2, nothing_at_all, plan):
        assert found[1] == (0.0, 0, False)
        assert found[0][2] and found[2][2] and math.isfinite(found[2][0])


def evaluated(world: World, plan: str) -> list[tuple[float, int]]:
    engine = build(world, Task(), Case(plan))
    engine.model.train()
    found = []
    for batch in (text(0), few_rows(1), few_tokens(2)):
        found.append(engine.evaluate(share(batch, engine.data_rank, engine.data_ranks)))
        assert engine.model.training
    return found


@pytest.mark.parametrize(
    "plan", ["dp4 fp64", "dp4 zero3 fp64", "dp_replicate2 dp_shard2 zero1 fp64"]
)
def test_evaluation_is_the_mean_over_the_global_batch(plan):
    """Uneven rows, ranks without any: all ranks get one process's loss and number of tokens."""
    task, model = Task(), Task().make().double().eval()
    with torch.no_grad():
        batches = [text(0), few_rows(1), few_tokens(2)]
        expected = [
            (task.loss(model, b).item(), task.tokens(b) if task.tokens else 0) for b in batches
        ]
    for found in run_gloo(4, evaluated, plan):
        assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
        for (loss, _), (wanted, _) in zip(found, expected, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-12)


def test_a_batch_is_split_into_parts_that_differ_by_a_row_at_most():
    """Tensors are cut alike in any nesting; what has no rows goes to every part."""
    batch = {"a": torch.arange(5), "b": [torch.ones(5, 2), torch.tensor(7.0)], "c": "text"}
    parts = split(batch, 3)
    assert [rows(part) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part["a"] for part in parts]), batch["a"])
    assert [part["b"][1].item() for part in parts] == [7.0] * 3
    assert [part["c"] for part in parts] == ["text"] * 3


def test_fewer_rows_than_parts_leave_the_last_parts_empty():
    """Two rows in four parts."""
    assert [rows(part) for part in split(torch.ones(2, 3), 4)] == [1, 1, 0, 0]


def test_tensors_that_disagree_on_rows_are_refused():
    """The error names the numbers of rows."""
    with pytest.raises(InputError, match=r"\[2, 3\] rows under accumulate:2"):
        split({"a": torch.ones(2), "b": torch.ones(3)}, 2)
    with pytest.raises(
        InputError,
        match=r"without a tensor that has rows .Tensor of shape \[\]. under accumulate:2",
    ):
        split(torch.tensor(1.0), 2)


@pytest.mark.parametrize(
    ("plan", "word"),
    [("1f1b:4", "1f1b:4"), ("gpipe:2 accumulate:2", "gpipe:2 accumulate:2"), ("accumulate:4", "")],
)
@pytest.mark.parametrize("batch", [None, "text", {}, torch.tensor(1.0)], ids=str)
def test_a_batch_that_cannot_be_cut_names_what_cuts_it(plan: str, word: str, batch: Any):
    """The plan's own words, and that there are no tensors, not that they have no rows."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    engine = sw.parallelize(model, plan, alone(), loss=lambda m, b: m(b).mean())
    said = (
        rf"a batch without a tensor that has rows \({type(batch).__name__}.* under {word or plan}\."
    )
    with pytest.raises(InputError, match=said):
        engine.step(batch)


def test_a_stand_in_has_the_shape_of_what_it_stands_for():
    """A batch without rows becomes zeros of the same dtypes and widths; others are left alone."""
    batch = {"a": torch.ones(0, 4, dtype=torch.int64), "b": torch.ones(0), "c": torch.tensor(2.0)}
    stand_in = filled(batch)
    assert stand_in["a"].shape == (2, 4) and stand_in["a"].dtype == torch.int64
    assert stand_in["b"].tolist() == [0.0, 0.0] and stand_in["c"] is batch["c"]
    whole = torch.ones(3)
    assert filled(whole) is whole
    assert filled("text") == "text"


def test_only_floating_point_is_cast():
    """Token numbers stay whole."""
    out = cast({"x": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}, torch.bfloat16)
    assert out["x"].dtype == torch.bfloat16 and out["n"].dtype == torch.int64
    assert cast(out, None) is out


def test_the_first_step_knows_its_own_number_of_tokens():
    """Gradients are scaled by the power of two next to the last step's tokens; the first asks."""
    engine = build(alone(), Task(), Case("fp64"))
    assert engine.expected == 0
    engine.step(text(0, rows=3))
    assert engine.expected == int((text(0, rows=3)["targets"] != -100).sum())
