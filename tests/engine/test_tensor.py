"""Tensor and sequence parallelism, alone and with every row of the data table."""

from typing import Any

import pytest
import torch

from tests.engine.cases import Case
from tests.engine.tensors import (
    ADAMW,
    assert_counted,
    assert_parity,
    gpt_task,
    ranks_of,
    train,
    whole_run,
)
from tests.parallel.layers import KINDS, task
from tests.pool import run_gloo, run_threads

SGD: dict[str, Any] = {"kind": torch.optim.SGD, "options": {"lr": 0.1, "momentum": 0.9}}


@pytest.mark.parametrize("plan", ["tp2", "tp2 sp", "tp4", "tp4 sp", "dp2 tp2 sp zero3"])
@pytest.mark.parametrize("shape", ["tied", "untied"])
def test_parity(shape: str, plan: str):
    """fp64: 3 steps on real processes are one process's, to ten digits; bytes and memory hold."""
    case = Case(f"{plan} fp64", clip=0.5, **ADAMW)
    ranks = run_gloo(ranks_of(plan), train, gpt_task(shape), case)
    assert_parity(ranks, whole_run(gpt_task(shape), case), 1e-10)
    assert_counted(ranks)


UNEVEN = [("3 heads", "tp2"), ("3 heads", "tp2 sp"), ("3 heads", "tp3 sp")]
UNEVEN += [("6 heads, 2 for keys", f"tp{n}{sp}") for n in (2, 4) for sp in ("", " sp")]


@pytest.mark.parametrize(("shape", "plan"), UNEVEN)
def test_parity_of_heads_that_the_degree_does_not_divide(shape: str, plan: str):
    """3 heads on 2 ranks, 6 with 2 for keys on 4: ranks hold what they can, and it is the same."""
    case = Case(f"{plan} fp64", **ADAMW)
    ranks = run_threads(ranks_of(plan), train, gpt_task(shape), case)
    assert_parity(ranks, whole_run(gpt_task(shape), case), 1e-10)
    assert_counted(ranks)


@pytest.mark.parametrize("plan", ["tp2", "tp2 sp", "tp4 sp", "dp2 tp2 zero2"])
def test_parity_in_fp32(plan: str):
    """fp32: the same to five digits."""
    case = Case(f"{plan} fp32", units="auto", **SGD)
    ranks = run_threads(ranks_of(plan), train, gpt_task(), case)
    assert_parity(ranks, whole_run(gpt_task(), case, torch.float32), 1e-5)
    assert_counted(ranks)


@pytest.mark.parametrize("tensor", ["tp2", "tp2 sp"])
@pytest.mark.parametrize("name", KINDS)
def test_tables_of_ones_own_train(name: str, tensor: str):
    """Models with biases, packed weights, recomputation, frozen parts: parity, bytes and memory."""
    case = Case(f"{tensor} fp64 accumulate:2", clip=0.5, **SGD)
    ranks = run_threads(2, train, task(name), case)
    assert_parity(ranks, whole_run(task(name), case), 1e-10)
    assert_counted(ranks)
