"""Models that do what models do, and losses of several passes: trained as in one process."""

import pytest
import torch

from tests.engine.cases import Case, oracle, ranks_of, rows_task, settled
from tests.engine.tensors import assert_parity, equals_one, run
from tests.engine.zoo import DECAY, TASKS, Block, Gated, Mixed, gated
from tests.pool import run_gloo, run_threads

PLANS = ["dp2 ddp", "dp2 zero1", "dp2 zero2", "dp2 zero3", "dp_replicate2 dp_shard2 zero3"]
SGD = {"kind": torch.optim.SGD, "options": {"lr": 0.1, "momentum": 0.9}}


@pytest.mark.crossed
@pytest.mark.cases(6)
@pytest.mark.parametrize("model", TASKS)
@pytest.mark.parametrize("plan", ["dp_replicate2 dp_shard2 zero3", "dp2 ddp", "dp2 zero2"])
def test_parity_of_every_kind_of_model(plan: str, model: str):
    """Sharing, freezing, lists of parameters, recomputation, any output: as in one process."""
    equals_one(run_threads, TASKS[model], Case(f"{plan} fp64", clip=1.0, **SGD))


@pytest.mark.parametrize("model", TASKS)
def test_parity_on_processes_with_accumulation(model: str):
    """The same on gloo, every state sharded, in two microbatches, gathered three units ahead."""
    equals_one(run_gloo, TASKS[model], Case("dp2 zero3 fp64 accumulate:2", prefetch=3, **SGD))


OTHERWISE = [
    *({"units": units} for units in ("auto", Block, "blocks.*", 600, lambda n, _: n == "blocks.1")),
    *({"prefetch": ahead} for ahead in (0, 1, 3)),
]


@pytest.mark.parametrize("options", OTHERWISE)
def test_how_units_are_chosen_and_gathered_changes_no_number(options):
    """Automatic, by class, pattern, size or function; not ahead or up to three: the same."""
    equals_one(run_threads, TASKS["stack"], Case("dp2 zero3 fp64", **options))


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
    assert_parity(run_threads(ranks_of(plan), run, task, case), expected, 1e-10)


@pytest.mark.parametrize("plan", PLANS)
def test_several_dtypes_in_one_unit(plan):
    """Without a precision word each parameter keeps its dtype; units hold a group for each."""
    task, case = rows_task(lambda: settled(Mixed())), Case(plan, **SGD)
    results = run_threads(ranks_of(plan), run, task, case)
    dtypes = {piece.name: piece.values.dtype for piece in results[0].weights}
    assert dtypes == {"narrow": torch.float32, "wide": torch.float64}
    assert_parity(results, oracle(task, case, None), 1e-6)
