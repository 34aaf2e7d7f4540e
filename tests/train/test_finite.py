"""Runs whose loss or gradient is not finite: stopped with the good checkpoint, or gone on."""

import math
from pathlib import Path

import pytest

from shardwise.checkpoint.folder import all_in
from shardwise.train.metrics import read
from tests.pool import run_gloo
from tests.train import runs


@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", ["dp2 zero2 fp64", "pp2 1f1b:2 fp64"])
def test_a_loss_that_is_not_a_number_names_step_and_rank(plan: str, tmp_path: Path) -> None:
    """Rank 1's loss is NaN in step 4: both ranks stop there, and the checkpoint of step 2 stays.

    Of a pipeline it is the last rank that has a loss, and no loss on meta is taken for one.
    """
    given = runs.settings(tmp_path / "run", plan, save_every=2)
    errors = run_gloo(2, runs.poisoned, given, 1, 4)
    assert errors[0] == errors[1]
    assert "Step 4: the loss is not finite, on rank 1; the first parameter" in errors[0]
    assert str(given.folder / "checkpoints" / "step-000002") in errors[0]
    assert [path.name for path in all_in(given.folder / "checkpoints")] == ["step-000002"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", ["dp2 zero2 fp64", "pp2 1f1b:2 fp64"])
def test_a_gradient_that_is_not_a_number_names_step_and_ranks(plan: str, tmp_path: Path) -> None:
    """Every loss is finite, a gradient is not: the ranks that made it, in stages all before it."""
    given = runs.settings(tmp_path / "run", plan, save_every=2)
    errors = run_gloo(2, runs.poisoned, given, 1, 4, True)
    assert errors[0] == errors[1]
    ranks = "0, 1" if "pp2" in plan else "1"
    assert (
        f"Step 4: the gradient's norm is nan, not finite, on rank {ranks}; the first" in errors[0]
    )


def test_a_step_can_be_left_out(tmp_path: Path) -> None:
    """With train.on_nonfinite = "skip": the run ends, and its record and report say which step."""
    given = runs.settings(tmp_path / "run", "dp2 zero1 fp64", on_nonfinite="skip")
    assert run_gloo(2, runs.poisoned, given, 1, 4) == ["", ""]
    records = read(given.folder)
    assert [record.skipped for record in records] == [record.step == 4 for record in records]
    assert len(records) == given.train.steps
    assert [math.isfinite(record.loss) for record in records] == [r.step != 4 for r in records]
    assert '"loss": null' in (given.folder / "metrics.jsonl").read_text()
    assert "nan" not in (given.folder / "report.md").read_text()
