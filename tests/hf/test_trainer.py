"""`sw.hf.Trainer` against Trainer alone: losses, weights, checkpoints, callbacks."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.hf.trainers import Run, timeless, trained
from tests.pool import run_gloo

#: (plan, rows of a data rank in a microbatch, microbatches of an update)
PLANS = (("zero3", 4, 1), ("tp2", 8, 1), ("pp2 1f1b:4", 8, 1), ("zero1", 2, 2))


def require_equal(mine: Run, alone: Run) -> None:
    """Logs and weights differ by rounding alone."""
    logs = timeless(mine.log), timeless(alone.log)
    for line, wanted in zip(*logs, strict=True):
        assert line == pytest.approx(wanted, rel=1e-5), wanted["step"]
    assert mine.events == alone.events
    assert mine.weights.keys() == alone.weights.keys()
    for name, weight in alone.weights.items():
        torch.testing.assert_close(mine.weights[name], weight, rtol=0, atol=1e-5)


@pytest.mark.cases(4)
@pytest.mark.parametrize(("plan", "rows", "steps"), PLANS)
def test_a_run_equals_that_of_trainer_alone(
    plan: str, rows: int, steps: int, tmp_path: Path
) -> None:
    """Every line of the log, the events and the saved weights; the last batches are smaller."""
    kind = "gpt2" if plan == "zero3" else "llama"
    ranks = 2 if plan.startswith("zero") else 1
    mine = run_gloo(2, trained, str(tmp_path / "plan"), plan, kind, sized(rows, steps))[0]
    alone = trained(None, str(tmp_path / "alone"), None, kind, sized(rows * ranks, steps))
    require_equal(mine, alone)
    assert mine.events["substep" if steps > 1 else "step"] > 0


def sized(rows: int, steps: int = 1) -> dict[str, Any]:
    """Arguments of batches with so many rows, and so many of them in an update."""
    sizes = ("per_device_train_batch_size", "per_device_eval_batch_size")
    return dict.fromkeys(sizes, rows) | {"gradient_accumulation_steps": steps}
