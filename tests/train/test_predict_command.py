"""`predict`, `verify` and `schedule`: what they print and write."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.train import config
from shardwise.train.progress import size_text
from tests.train.runs import Capture, ended, printed, run, settings
from tests.verify import small

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("plan", ["dp2 zero3", "pp2 offload:auto device_memory:9MiB"])
def test_what_is_predicted_for_a_configuration_is_what_its_run_holds_and_sends(
    plan: str, tmp_path: Path, capsys: Capture
) -> None:
    """By `predict --config` and by `train --dry-run`, which starts and writes nothing."""
    given = settings(tmp_path / "run", plan, optimizer="lion", batch=5, clip=0, steps=3)
    file = tmp_path / "run.toml"
    file.write_text(config.dump(given))
    before = sorted(tmp_path.rglob("*"))
    found = json.loads(printed(capsys, "predict", "--config", str(file), "--json"))
    checked = printed(capsys, "train", str(file), "--dry-run")
    assert sorted(tmp_path.rglob("*")) == before
    assert found["model"] == "gpt:quickstart of run.toml"
    assert found["rows_a_step"] == 5  # of which one of two data ranks has three
    assert "A step trains on 5 rows" in checked
    assert checked.startswith(f"{found['plan']} on 2 ranks, ")
    record = run(given, 2)[-1]
    assert record.memory_bytes is not None
    for name, count in found["memory"].items():
        assert record.memory_bytes.get(name) == count
        assert name in checked and size_text(count) in checked
    assert record.sent_bytes == sum(found["bytes"].values())


@pytest.mark.full
def test_the_model_of_a_configuration_is_proved(tmp_path: Path, capsys: Capture) -> None:
    """Under a plan on the command line, which replaces its own."""
    file = tmp_path / "config.toml"
    file.write_text(config.dump(settings(tmp_path / "run", "dp2 zero3")))
    found = json.loads(printed(capsys, "verify", "dp2 zero1", "--config", str(file), "--json"))
    assert (found["plan"], found["holds"]) == ("dp2 zero1 fp64", True)
    assert found["model"] == "gpt:quickstart of config.toml"


def test_the_drawing_stands_above_the_numbers(capsys: Capture) -> None:
    """1F1B on two ranks: the figure, then clock and formula side by side."""
    text = printed(capsys, "schedule", "1f1b:2", "--stages", "2")
    said = [line.split() for line in text.splitlines()]
    assert said[2][2:] == ["F0", "F1", "..", "..", "B0", "--", "..", "B1", "--"]
    assert said[3][2:] == ["..", "F0", "B0", "--", "F1", "B1", "--", "..", ".."]
    numbers = {line[0]: line[1:] for line in said[5:] if line}
    assert numbers["makespan"] == ["9", "9"]
    assert numbers["bubble"] == ["33.33%", "33.33%", "(p-1)/(m+p-1)"]
    assert numbers["activations"] == ["2", "1", "2", "1", "min(p-r,", "m)"]
    assert numbers["transfers"] == ["4", "-", "2", "act,", "2", "grad"]


def scheduled(capture: Capture, line: str) -> dict[str, Any]:
    return json.loads(printed(capture, "schedule", *line.split(), "--json"))


def test_the_schedule_of_a_run_is_that_of_its_plan(tmp_path: Path, capsys: Capture) -> None:
    """1F1B unless the plan says another, on the ranks of the axis pp; without one it is refused."""
    file, wanted = tmp_path / "run.toml", scheduled(capsys, "1f1b:4 --stages 2")
    for plan in ("pp2 dp2", "pp2 1f1b:4"):
        file.write_text(f'[plan]\ntext = "{plan}"')
        assert scheduled(capsys, f"--config {file}") == wanted
    assert "beside a schedule's name" in ended(capsys, "schedule", "1f1b", "--config", str(file))[2]
    file.write_text('[plan]\ntext = "dp2"')
    assert "has no pipeline" in ended(capsys, "schedule", "--config", str(file))[2]


def test_costs_reach_the_clock_and_formulas_are_held_back(capsys: Capture) -> None:
    """With hops, stages that differ, or halves that do, only the clock speaks of time."""
    for line in ("1f1b --costs F=1,I=1,W=1,hop=0.1", "zb-h1 --costs F=2,I=1,W=1"):
        said = scheduled(capsys, line)
        assert (said["formula"]["makespan"], said["formula"]["bubble"]) == (None, None)
        assert said["activations"] == said["formula"]["activations"]
    said = scheduled(capsys, "1f1b:8 --costs F=2,B=3")
    assert said["makespan"] == said["formula"]["makespan"] == 5 * 11
    said = scheduled(capsys, "naive --stages 2 --costs F=1/2,B=3/5,hop=0.5")
    assert (said["makespan"], said["idle"]) == (12, [8, 5])
    said = scheduled(capsys, "2bw:4 --stages=2 --batches=2")
    assert said["versions"] == [2, 2]
    assert said["makespan"] == said["formula"]["makespan"] == 3 * 9


def test_the_moments_of_a_step(tmp_path: Path, capsys: Capture) -> None:
    """A step ends with what is between steps; its peak and where it is; the picture is an SVG."""
    argv = ("predict", "dp2 zero3", "--timeline", str(tmp_path / "step.svg"))
    said = json.loads(printed(capsys, *argv, "--rank", "1", "--json"))
    *_, end = said["predicted"]["events"]
    assert said["rank"] == 1 and "measured" not in said
    assert end["by_category"] == said["memory"] | {"gathered": 0, "kept": 0}
    totals = [sum(event["by_category"].values()) for event in said["predicted"]["events"]]
    assert said["predicted"]["peak"]["bytes"] == max(totals)
    assert "<svg" in (tmp_path / "step.svg").read_text()
    assert "bytes at the most" in printed(capsys, *argv)


@pytest.mark.full
def test_a_measurement_beside_the_prediction(capsys: Capture) -> None:
    """Local ranks measure each event; only temporary bytes are not in the prediction."""
    model = f"{small.__file__}:build"
    said = json.loads(
        printed(capsys, "predict", "dp2 zero3", "--measure", "--json", "--model", model)
    )
    measured = said["measured"]["events"]
    peak = max(event["peak"] for event in measured)
    assert peak >= said["measured"]["peak"]["bytes"]
    for event in measured:
        del event["by_category"]["temporary"], event["peak"]
    predicted = [dict(event) for event in said["predicted"]["events"]]
    for event in predicted:
        event.pop("temporary_most", None)
    assert measured == predicted


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_allocator_of_a_gpu(capsys: Capture) -> None:
    """What PyTorch's allocator reserves holds what it has allocated."""
    line = ("predict", "dp1 recompute:full arenas", "--measure", "--device", "cuda", "--json")
    said = json.loads(printed(capsys, *line))["allocator"]
    assert said["reserved_bytes"] >= said["allocated_bytes"] > 0
