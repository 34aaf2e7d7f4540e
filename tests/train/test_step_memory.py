"""A run's report has the picture of a step: measured, and predicted where that is possible."""

from pathlib import Path
from typing import Any

import pytest

from shardwise.comm.world import World, alone
from shardwise.prediction.timeline import TEMPORARY
from shardwise.train import loop
from shardwise.train.config import Config
from shardwise.train.memory_picture import Series
from tests.pool import run_gloo
from tests.train.runs import settings


def step_of(world: World, given: Config) -> Any:
    """Train; the series of rank 0."""
    summary = loop.train(given, world)
    return [tuple(one) for one in summary.step] if summary else None


@pytest.mark.full
def test_the_step_of_a_run_is_as_predicted(tmp_path: Path) -> None:
    """Event by event, on two processes; the report has the picture and both columns."""
    given = settings(tmp_path / "run", "dp2 zero3 fp32")
    predicted, measured = (Series(*one) for one in run_gloo(2, step_of, given)[0])
    assert (predicted.title, measured.title) == (
        "step 2, rank 0, predicted",
        "step 2, rank 0, measured",
    )
    for event in measured.events:
        del event.by_category[TEMPORARY]
    assert [e[:4] for e in measured.events] == [e[:4] for e in predicted.events]
    text = (given.folder / "report.md").read_text()
    assert "| bytes at the most | step 2, rank 0, predicted | step 2, rank 0, measured |" in text
    assert "| temporary | not predicted |" in text
    assert "![step](plots/step.png)" in text
    assert (given.folder / "plots" / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.parametrize(("plan", "steps"), [("pp2 zb-h1:2 recompute:full", 7), ("fp32", 1)])
def test_what_is_not_predicted_is_measured(plan: str, steps: int, tmp_path: Path) -> None:
    """Of a pipeline the actions are shown as they were measured; a run of one step shows that."""
    given = settings(tmp_path / "run", plan, steps=steps, warmup=1)
    if "pp2" in plan:
        ((title, events),) = run_gloo(2, step_of, given)[0]
        assert title == "step 2, rank 0, measured" and events[0].kind == "F0.0"
        return
    *_, (title, events) = step_of(alone(), given)
    assert title == "step 1, rank 0, measured" and events[-1].kind == "end"
