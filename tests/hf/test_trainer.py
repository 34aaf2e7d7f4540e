"""`sw.hf.Trainer` against Trainer alone: losses, weights, checkpoints, callbacks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from shardwise.core.errors import InputError
from shardwise.hf import Trainer
from shardwise.hf.shares import PADDING, joined
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
    kind = "tied" if plan == "zero3" else "llama"
    ranks = 2 if plan.startswith("zero") else 1
    mine = run_gloo(2, trained, str(tmp_path / "plan"), plan, kind, sized(rows, steps))[0]
    alone = trained(None, str(tmp_path / "alone"), None, kind, sized(rows * ranks, steps))
    require_equal(mine, alone)
    assert mine.events["substep" if steps > 1 else "step"] > 0


def sized(rows: int, steps: int = 1) -> dict[str, Any]:
    """Arguments of batches with so many rows, and so many of them in an update."""
    sizes = ("per_device_train_batch_size", "per_device_eval_batch_size")
    return dict.fromkeys(sizes, rows) | {"gradient_accumulation_steps": steps}


@pytest.mark.cases(2)
@pytest.mark.parametrize(("plan", "other"), [("zero3", "tp2"), ("pp2 1f1b:4", "pp2 1f1b:4")])
def test_a_run_goes_on_from_its_checkpoint(plan: str, other: str, tmp_path: Path) -> None:
    """Under its own plan bit for bit, under another one to rounding."""
    rows = 4 if plan == "zero3" else 8
    whole = run_gloo(2, trained, str(tmp_path / "run"), plan, "llama", sized(rows))[0]
    for next_plan, size in {plan: rows, other: 8}.items():
        options = {"resume_from_checkpoint": str(tmp_path / "run/checkpoint-4")}
        folder = str(tmp_path / next_plan)
        resumed = run_gloo(2, trained, folder, next_plan, "llama", sized(size), options)[0]
        logs = [timeless(run.log)[:-1] for run in (resumed, whole)]  # without the run's mean
        if next_plan == plan:
            assert logs[0] == logs[1]
            assert all(torch.equal(resumed.weights[n], w) for n, w in whole.weights.items())
        for line, wanted in zip(*logs, strict=True):
            assert line == pytest.approx(wanted, rel=1e-5)


class Halved(Trainer):
    """A loss of a user's own."""

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        return halved(super(), model, inputs, return_outputs, num_items_in_batch)


class HalvedAlone(transformers.Trainer):
    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        return halved(super(), model, inputs, return_outputs, num_items_in_batch)


def halved(trainer: Any, *given: Any) -> Any:
    """The loss, halved."""
    found = trainer.compute_loss(*given)
    return (found[0] / 2, found[1]) if isinstance(found, tuple) else found / 2


def accuracy(prediction: Any) -> dict[str, float]:
    """The share of tokens that were predicted, over all rows in their order."""
    labels = prediction.label_ids
    guessed = prediction.predictions.argmax(-1)
    weight = np.arange(len(labels))[:, None] * (labels != -100)  # the order matters
    return {"accuracy": float((weight * (guessed == labels)).sum()), "rows": len(labels)}


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A `compute_loss_func` that divides by the number that it is given."""
    logits = outputs["logits"].flatten(0, 1)
    return cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.cases(3)
@pytest.mark.parametrize("plan", ["zero3", "tp2", "pp2 1f1b:4"])
def test_other_losses_and_metrics_equal_those_of_trainer_alone(plan: str, tmp_path: Path) -> None:
    """Smoothed labels, a loss of one's own, a function of outputs; metrics without pipelines."""
    rows, metrics = (4 if plan == "zero3" else 8), {"compute_metrics": accuracy}
    metrics = {} if plan.startswith("pp") else metrics
    own = (Halved, HalvedAlone)
    for number, (changes, options, kinds) in enumerate(
        [
            ({"label_smoothing_factor": 0.1}, {}, None),
            ({}, metrics, own),
            ({}, {"compute_loss_func": summed}, None),
        ]
    ):
        both = [options | ({"trainer": kind} if kind else {}) for kind in (kinds or (None, None))]
        folder, short = tmp_path / str(number), changes | {"save_strategy": "no"}
        mine = run_gloo(
            *(2, trained, str(folder / "plan"), plan, "llama", sized(rows) | short, both[0])
        )[0]
        require_equal(
            mine, trained(None, str(folder / "alone"), None, "llama", sized(8) | short, both[1])
        )


def test_padded_microbatches_of_an_update_may_have_other_lengths() -> None:
    """Shorter rows are padded where the mask and the labels leave them out; others are refused."""
    short, long = (
        {name: torch.ones(2, n) for name in ("labels", "attention_mask")} for n in (3, 5)
    )
    batch = joined([short, long], PADDING)
    assert batch["labels"][0].tolist() == [1, 1, 1, -100, -100]
    assert batch["attention_mask"].sum().item() == 16
    with pytest.raises(InputError, match="pads to one length"):
        joined([{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}], PADDING)
