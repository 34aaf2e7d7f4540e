"""Metrics of experts: loads, dropped choices and entropy."""

from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import InputError
from shardwise.train import config
from shardwise.train.config_sections import ModelSection
from shardwise.train.measure.metrics import Record
from shardwise.train.measure.progress import line
from shardwise.train.prepare import RunStart
from shardwise.train.sizes import model_sizes
from tests.train import runs


def settings(folder: Path, plan: str, **model: Any) -> config.Config:
    dense = runs.settings(folder, plan, steps=3, eval_every=2)
    own = {"experts": 4, "experts_per_token": 2, **model}
    return dense.model_copy(update={"model": dense.model.model_copy(update=own)})


def of_batch(given: config.Config, rows: int) -> config.Config:
    """The same with so many rows a step; an epoch has 17."""
    return given.model_copy(update={"train": given.train.model_copy(update={"batch": rows})})


def constant(given: config.Config) -> config.Config:
    """The same with a learning rate that does not depend on the number of steps."""
    train = given.train.model_copy(update={"decay": "constant"})
    return given.model_copy(update={"train": train})


@pytest.mark.full
@pytest.mark.parametrize("batch", [5, 8])
def test_loads_do_not_depend_on_the_plan(batch: int, tmp_path: Path):
    """Two ranks record what one rank does, also where a batch of one row leaves a rank without."""
    plans = {"fp64": 1, "dp2 ep2 zero2 fp64": 2}
    one, two = (
        runs.run(of_batch(settings(tmp_path / f"run{ranks}", plan, capacity=1.0), batch), ranks)
        for plan, ranks in plans.items()
    )
    assert [r.loss for r in one] == pytest.approx([r.loss for r in two], rel=1e-10)
    assert [r.expert_loads for r in one] == [r.expert_loads for r in two]
    assert [r.dropped for r in one] == [r.dropped for r in two]
    assert any(record.dropped for record in one)
    assert [r.gate_entropy for r in one] == pytest.approx([r.gate_entropy for r in two], rel=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp2 ep2 zero2", "pp2 1f1b:2"])
def test_clusters_are_fitted_before_the_first_step(plan: str, tmp_path: Path):
    """On the first batch, as in one process."""
    given = settings(tmp_path / "one", "fp64", gate="cluster")
    one = runs.run(given)
    two = runs.run(settings(tmp_path / "two", f"{plan} fp64", gate="cluster"), 2)
    assert [r.expert_loads for r in one] == [r.expert_loads for r in two]
    assert [r.loss for r in one] == pytest.approx([r.loss for r in two], rel=1e-10)
    first = one[0].expert_loads or {}
    assert len(first) == 2
    assert all(max(own) - min(own) < one[0].tokens // 4 for own in first.values())


@pytest.mark.full
def test_clusters_are_in_the_checkpoint(tmp_path: Path):
    """A run that is stopped after two steps and resumed is the run that was not stopped."""
    whole, begun = (
        constant(settings(tmp_path / name, "fp64", gate="cluster")) for name in ("whole", "begun")
    )
    short = begun.model_copy(update={"train": begun.train.model_copy(update={"steps": 2})})
    expected = runs.run(whole)
    runs.run(short)
    resumed = runs.run(begun, start=RunStart(resume=True))
    assert [r.expert_loads for r in resumed] == [r.expert_loads for r in expected]
    assert resumed[-1].loss == pytest.approx(expected[-1].loss, rel=1e-10)


def test_a_line_of_the_progress_has_the_busiest_expert():
    """3 of 4 choices are 1.5 times the mean of two experts."""
    record = Record(
        *(1, 8, 2.5, 1e-3, 4, 1.0, 4.0, 100),
        expert_loads={"blocks.0.moe": [3, 1]},
        dropped=0.25,
        gate_entropy=0.5,
    )
    assert "busiest expert 1.50x the mean, 25.0% dropped, gate entropy 0.50" in line(record, 9)


@pytest.mark.parametrize(
    ("key", "value"), [("gate", "switch"), ("capacity", 1.25), ("shared_experts", 1)]
)
def test_keys_of_experts_without_experts(key: str, value: object):
    """A key that only layers of experts read is refused for a dense model, with what to write."""
    section = ModelSection.model_validate({key: value})
    with pytest.raises(InputError) as error:
        model_sizes(section, 256)
    assert f"model.{key} = " in str(error.value)
    assert "model.experts = 8" in str(error.value)
    assert model_sizes(section.model_copy(update={"experts": 4}), 256)
