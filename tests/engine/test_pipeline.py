"""Models that only a pipeline meets, and schedules on four ranks: parity, bytes, memory."""

import pytest

from tests.engine.cases import Case, ranks_of
from tests.engine.pipelines import ADAMW, MODELS, SCHEDULES, SGD, task
from tests.engine.tensors import (
    assert_counted,
    assert_parity,
    train,
    whole_run,
)
from tests.pool import run_threads

DEEP = [plan for plan in SCHEDULES if plan.startswith("pp4") and ":8" in plan]


@pytest.mark.parametrize("plan", DEEP)
def test_four_ranks(plan: str):
    """fp64: 3 steps under every schedule are one process's, 1e-10; bytes and memory as predicted.

    Nine rows, which eight microbatches do not divide; gradients are clipped.
    """
    case = Case(f"{plan} fp64", clip=0.5, **ADAMW)
    ranks = run_threads(ranks_of(plan), train, task(), case)
    assert_parity(ranks, whole_run(task(), case), 1e-10)
    assert_counted(ranks)


SOME = ["pp2 1f1b:3", "pp4 gpipe:2", "pp2 dp2 zero3 zb-h1:4"]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "deep"])
@pytest.mark.parametrize("plan", SOME)
def test_models(plan: str, name: str):
    """Frozen stages, tuples, dicts, skip connections, parameters that nobody uses."""
    work, case = task(name), Case(f"{plan} fp64", clip=0.5, **SGD)
    ranks = run_threads(ranks_of(plan), train, work, case)
    assert_parity(ranks, whole_run(work, case), 1e-10)
