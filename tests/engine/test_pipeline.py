"""Pipelines alone and with every other technique: parity with one process, bytes, memory."""

import pytest

from tests.engine.cases import Case, ranks_of
from tests.engine.pipelines import ADAMW, MODELS, SCHEDULES, SGD, task
from tests.engine.tensors import (
    assert_counted,
    assert_parity,
    gpt_task,
    train,
    whole_run,
)
from tests.pool import run_gloo, run_threads


@pytest.mark.parametrize("plan", SCHEDULES)
def test_parity(plan: str):
    """fp64: 3 steps under every schedule are one process's, 1e-10; bytes and memory as predicted.

    Nine rows, which no number of microbatches but 1 and 3 divides; gradients are clipped.
    """
    case = Case(f"{plan} fp64", clip=0.5, **ADAMW)
    ranks = run_threads(ranks_of(plan), train, task(), case)
    assert_parity(ranks, whole_run(task(), case), 1e-10)
    assert_counted(ranks)


PROCESSES = [
    *("pp2 1f1b:3", "pp2 interleaved:4x2", "pp4 zb-h1:4", "pp2 dp2 zero3 1f1b:2"),
    *("pp2 tp2 zero1 interleaved:4x2", "pp2 dp2 zero2 zb-v:4"),
]


@pytest.mark.parametrize("plan", PROCESSES)
def test_parity_on_processes(plan: str):
    """The same of a GPT whose head is its embedding, on real processes."""
    work, case = gpt_task("tied", rows=11), Case(f"{plan} fp64", clip=0.5, **ADAMW)
    ranks = run_gloo(ranks_of(plan), train, work, case)
    assert_parity(ranks, whole_run(work, case), 1e-10)
    assert_counted(ranks)


DATA = ["ddp", "zero1", "zero2", "zero3"]
SPREAD = [f"dp_replicate2 dp_shard2 {row}" for row in DATA[1:]]
BESIDE = [
    *(f"pp2 dp2 {row} {word}" for row in DATA for word in ("1f1b:3", "zb-v:4")),
    *(f"pp2 {spread} gpipe:2" for spread in SPREAD),
    *(f"pp2 dp2 {row} accumulate:2 1f1b:2" for row in DATA),
    *("pp4 dp2 zero3 dualpipe-v:8", "pp4 dp2 zero2 bfs:4x2", "pp2 dp2 zero3 zb-h1:4"),
]


@pytest.mark.parametrize("plan", BESIDE)
def test_with_data_rows(plan: str):
    """Every row of the data table under a schedule, with uneven shares and clipping."""
    rows = 17
    case = Case(f"{plan} fp64", clip=0.5, **ADAMW)
    ranks = run_threads(ranks_of(plan), train, task(rows=rows), case)
    assert_parity(ranks, whole_run(task(rows=rows), case), 1e-10)
    assert_counted(ranks)


TENSOR = [
    *(f"pp2 tp2{sp} {word}" for sp in ("", " sp") for word in ("1f1b:3", "zb-v:2")),
    *("pp2 tp2 zero1 interleaved:4x2", "pp2 tp2 accumulate:2 gpipe:2"),
    *("pp2 dp2 tp2 sp zero3 1f1b:2", "pp2 dp2 tp2 zero2 zb-h1:2"),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", TENSOR)
def test_with_tensor_parallelism(plan: str):
    """Layers cut on the tensor axis inside of stages; a head that is the embedding, or not."""
    shape = "untied" if " sp" in plan else "tied"
    work, case = gpt_task(shape, rows=9), Case(f"{plan} fp64", clip=0.5, **ADAMW)
    ranks = run_threads(ranks_of(plan), train, work, case)
    assert_parity(ranks, whole_run(work, case), 1e-10)
    assert_counted(ranks)


SOME = ["pp2 1f1b:3", "pp4 gpipe:2", "pp2 dp2 zero3 zb-h1:4"]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "deep"])
@pytest.mark.parametrize("plan", SOME)
def test_models(plan: str, name: str):
    """Frozen stages, tuples, dicts, skip connections, parameters that nobody uses."""
    work, case = task(name), Case(f"{plan} fp64", clip=0.5, **SGD)
    ranks = run_threads(ranks_of(plan), train, work, case)
    assert_parity(ranks, whole_run(work, case), 1e-10)
