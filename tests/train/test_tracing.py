"""Measured timelines: what is recorded, written, and refused."""

import json
from pathlib import Path

import pytest

from shardwise.comm.world import alone
from shardwise.core.errors import InputError
from shardwise.train import loop
from shardwise.train.config_sections import OffloadSection
from tests.pool import run_gloo
from tests.train import runs


@pytest.mark.full
def test_every_rank_of_every_pipeline_is_recorded(tmp_path: Path) -> None:
    """Steps 3 to 7 of two pipelines: each action of each rank, its messages, and both bubbles."""
    given = runs.settings(tmp_path / "run", "pp2 dp2 zero1 1f1b:2", save_every=0)
    run = given.run.model_copy(update={"trace": True})
    run_gloo(4, runs.trained, given.model_copy(update={"run": run}), None)
    events = json.loads((given.folder / "trace.json").read_text())["traceEvents"]
    for pipeline in (0, 1):
        for rank in (0, 1):
            seen = [e for e in events if (e["pid"], e["tid"]) == (pipeline, rank)]
            done = [e["name"] for e in seen if e["ph"] == "X"]
            for action in (f"F{rank}.0", f"F{rank}.1", f"B{rank}.0", f"B{rank}.1"):
                assert done.count(action) == 5
            times = [e["ts"] for e in seen if e["ph"] == "X"]
            assert times == sorted(times)
    for pipeline in (0, 1):  # ranks 0 and 2 of the world, and 1 and 3
        of = [e for e in events if e["pid"] == pipeline]
        names = {e["tid"]: e["args"]["name"] for e in of if e["name"] == "thread_name"}
        assert names == {0: f"stage 0, rank {pipeline}", 1: f"stage 1, rank {pipeline + 2}"} | {
            2: "steps"
        }
        bands = [e for e in of if e.get("cat") == "step"]
        assert [e["name"] for e in bands] == [f"step {step}" for step in range(3, 8)]
        for band in bands:
            end = band["ts"] + band["dur"]
            inside = [e for e in of if e["ph"] != "M" and e["args"] == band["args"]]
            assert len(inside) == 1 + 8 + 2 + 4 * 4  # the band, F and B, REDUCE, messages
            assert all(band["ts"] <= e["ts"] <= end + 1e-3 for e in inside)
    begun = [e["id"] for e in events if e["ph"] == "s"]
    assert sorted(begun) == sorted(e["id"] for e in events if e["ph"] == "f")
    assert len(set(begun)) == len(begun) == 2 * 5 * 4
    report = (given.folder / "report.md").read_text()
    assert "![timeline](timeline.svg)" in report
    assert all(f"| {pipeline} | {step} | " in report for pipeline in (0, 1) for step in range(3, 8))
    assert report.count("% measured, ") == 1
    drawn = (given.folder / "timeline.svg").read_text()
    assert drawn.count(", measured: ") == drawn.count(">predicted: ") == 1
    assert drawn in (given.folder / "report.html").read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    "what", ["zero2 offload:optim", "zero2 offload:optim-delayed=0", "zero3 offload:optim@disk"]
)
def test_updates_of_offloaded_states_are_recorded(tmp_path: Path, what: str) -> None:
    """Passes of the main thread, updates on the host's thread and from the disk, on each rank."""
    plan = f"dp2 fp32 {what}"
    given = runs.settings(tmp_path / "run", plan, save_every=0, eval_every=0, clip=0.0)
    run = given.run.model_copy(update={"trace": True})
    units = given.model.model_copy(update={"width": 256, "hidden": 512})  # of 2 MiB and more
    changed = {"run": run, "model": units, "offload": OffloadSection(folder=str(tmp_path))}
    run_gloo(2, runs.trained, given.model_copy(update=changed), None)
    events = json.loads((given.folder / "trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        seen = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        tracks = ("steps", "main thread", "host thread", "disk")
        steps, passes, updates, disk = ([e for e in seen if e["cat"] == t] for t in tracks)
        assert [e["name"] for e in steps] == [f"step {step}" for step in range(3, 8)]
        assert [e["name"] for e in passes if e["name"][0] in "FB"] == ["F0.0", "B0.0"] * 5
        assert len(updates) >= 5 * ("disk" not in what)
        assert all(e["name"].startswith("update ") for e in updates + disk)
        assert len(disk) == 5 * ("disk" in what)
        if "delayed" in what:  # the update of a step begins after its passes
            assert updates[0]["ts"] >= passes[1]["ts"] + passes[1]["dur"]


def test_without_a_pipeline_there_is_no_timeline(tmp_path: Path) -> None:
    """Asked for one, the run is refused before anything is written."""
    given = runs.settings(tmp_path / "run", "fp64")
    run = given.run.model_copy(update={"trace": True})
    with pytest.raises(InputError, match=r"which has no pipeline.*--plan 'pp2 1f1b:4'"):
        loop.train(given.model_copy(update={"run": run}), alone())
    assert not (tmp_path / "run").exists()
