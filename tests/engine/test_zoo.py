from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.cases import (
    Case,
    Task,
    assert_same,
    oracle,
    ranks_of,
    rows_task,
    settled,
    train,
    vectors,
)
from tests.engine.zoo import ZOO, Block, Gated, Mixed, Stack, make, unwrapped
from tests.pool import run_gloo, run_threads

PLANS = ["dp2 ddp", "dp2 zero1", "dp2 zero2", "dp2 zero3", "dp_replicate2 dp_shard2 zero3"]
SGD = {"kind": torch.optim.SGD, "options": {"lr": 0.1, "momentum": 0.9}}


def any_output(how: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(unwrapped(model(batch[0]), how), batch[1])


def task_of(name: str) -> Task:
    task = rows_task(partial(make, name))
    if name.startswith("returns"):
        return Task(task.make, task.batch, partial(any_output, name.rpartition(" ")[2]), None)
    return task


@pytest.mark.parametrize("model", ZOO)
@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "dp2 zero1"])
def test_parity_of_every_kind_of_model(plan, model):
    """Sharing, freezing, lists of parameters, recomputation, any output: as in one process."""
    task, case = task_of(model), Case(f"{plan} fp64", clip=1.0, **SGD)
    assert_same(run_threads(ranks_of(plan), train, task, case), oracle(task, case), 1e-10)


@pytest.mark.parametrize("model", ZOO)
def test_parity_on_processes_with_accumulation(model):
    """The same on gloo, every state sharded, in two microbatches, gathered three units ahead."""
    task, case = task_of(model), Case("dp2 zero3 fp64 accumulate:2", prefetch=3, **SGD)
    assert_same(run_gloo(2, train, task, case), oracle(task, case), 1e-10)


@pytest.mark.parametrize("units", ["auto", Block, "blocks.*", 600, lambda n, _: n == "blocks.1"])
def test_how_units_are_chosen_changes_no_number(units):
    """Automatic, by class, pattern, size or function: the same training."""
    task, case = task_of("stack"), Case("dp2 zero3 fp64", units=units)
    assert_same(run_threads(2, train, task, case), oracle(task, case), 1e-10)


def gated(step: int) -> tuple[Tensor, Tensor]:
    """Only the first row asks for `side`, and not in step 1."""
    x, y = vectors(step)
    x[:, 0] = x[:, 0].clamp(max=0.9)
    x[0, 0] = 2.0 if step != 1 else 0.0
    return x, y


DECAY = {
    "AdamW": {"kind": torch.optim.AdamW, "options": {"lr": 0.1, "weight_decay": 0.5}},
    "SGD": {"kind": torch.optim.SGD, "options": {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.9}},
}


@pytest.mark.parametrize("optimizer", DECAY)
@pytest.mark.parametrize("accumulate", ["", " accumulate:2"])
@pytest.mark.parametrize("plan", PLANS)
def test_parameters_without_gradient(plan, accumulate, optimizer):
    """Used on one rank: updated on all.  Used on none: untouched, its step count too.

    Decay would move an unused weight; AdamW corrects by step count, momentum carries on.
    """
    task = rows_task(lambda: settled(Gated()), gated)
    whole = 2**20 if "zero3" in plan else 1  # a unit that one rank skips must be whole on all
    case = Case(f"{plan} fp64{accumulate}", units=whole, **DECAY[optimizer])
    expected = oracle(task, case)
    assert [g["side.weight"] is None for g in expected.grads] == [False, True, False]
    assert expected.grads[0]["never.weight"] is None
    assert_same(run_threads(ranks_of(plan), train, task, case), expected, 1e-10)


@pytest.mark.parametrize("plan", PLANS)
def test_several_dtypes_in_one_unit(plan):
    """Without a precision word each parameter keeps its dtype; units hold a group for each."""
    task, case = rows_task(lambda: settled(Mixed())), Case(plan, **SGD)
    results = run_threads(ranks_of(plan), train, task, case)
    assert results[0].weights["narrow"].dtype == torch.float32
    assert results[0].weights["wide"].dtype == torch.float64
    assert_same(results, oracle(task, case, None), 1e-6)


def two_views(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return functional.mse_loss(model(x), y) + functional.mse_loss(model(-x), y)


@pytest.mark.parametrize("plan", PLANS)
def test_two_forward_passes_before_one_backward(plan):
    """A loss of two passes through the model: every gradient is the sum of both."""
    task = Task(partial(make, "stack"), vectors, two_views, None)
    case = Case(f"{plan} fp64 accumulate:2", **SGD)
    assert_same(run_threads(ranks_of(plan), train, task, case), oracle(task, case), 1e-10)


def penalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The outputs of the blocks enter the loss on their own, and one block runs without a use."""
    x, y = batch
    assert isinstance(model, Stack)
    first, *rest = model.blocks
    hidden = first(x)
    with torch.no_grad():
        rest[-1](hidden)
    return functional.mse_loss(model(x), y) + hidden.square().mean()


@pytest.mark.parametrize("plan", PLANS)
def test_parts_of_a_model_may_be_called_on_their_own(plan):
    """A block called outside of the root's forward is whole there, and its gradients count."""
    task = Task(partial(make, "stack"), vectors, penalised, None)
    case = Case(f"{plan} fp64", **SGD)
    assert_same(run_threads(ranks_of(plan), train, task, case), oracle(task, case), 1e-10)
