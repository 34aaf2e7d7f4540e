"""What a run measures: loads of experts, bytes of its disk, timelines."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm.world import World
from shardwise.train import config
from shardwise.train.prepare import RunStart
from shardwise.train.summary import disk_line
from tests.pool import run_gloo
from tests.train import runs

# --- experts ------------------------------------------------------------------------------------


def settings(folder: Path, plan: str, model: dict[str, Any], **train: Any) -> config.Config:
    dense = runs.settings(folder, f"{plan} fp64", eval_every=2, decay="constant", **train)
    return runs.changed(dense, "model", **{"experts": 4} | model)


@pytest.mark.full
def test_loads_do_not_depend_on_the_plan(tmp_path: Path) -> None:
    """Two ranks record what one rank does, resumed after two steps. Of 17 rows the third step has
    one, which leaves a data rank without any.
    """
    plan, model, rows = "dp2 ep2 zero2", {"gate": "topk:1"}, 8
    one = runs.run(settings(tmp_path / "one", "dp1", model, batch=rows, steps=3))
    runs.run(settings(tmp_path / "two", plan, model, batch=rows, steps=2), 2)
    given = settings(tmp_path / "two", plan, model, batch=rows, steps=3)
    two = runs.run(given, 2, RunStart(resume=True))
    assert [r.loss for r in one] == pytest.approx([r.loss for r in two], rel=1e-10)
    assert [r.expert_loads for r in one] == [r.expert_loads for r in two]
    assert [r.dropped for r in one] == [r.dropped for r in two]
    assert any(record.dropped for record in one)
    entropy = pytest.approx([r.gate_entropy for r in two], rel=1e-10)
    assert [r.gate_entropy for r in one] == entropy


# --- disk ---------------------------------------------------------------------------------------


def used(world: World, folder: str, words: str) -> tuple[list[Any], str]:
    """Bytes read and written: predicted of two steps, in the steps, and in an evaluation. And what
    rank 0 says of the disk.
    """
    engine: Any = sw.parallelize(
        torch.nn.Linear(300, 300),
        f"zero3 fp32 {words}",
        world,
        loss=lambda model, x: model(x).square().mean(),
        offload_folder=folder,
    )
    uses: list[tuple[int, int]] = []
    for act in (None, engine.step, engine.step, engine.evaluate):
        if act is not None:
            act(torch.ones(2, 300))
        if words:
            engine.disk.sync()
            so_far = engine.disk.use.so_far
            uses.append((so_far.read_bytes, so_far.written_bytes))
    sent = engine.measured_bytes()
    counted = [2 * sent.get(f"tier {way}", 0) for way in ("disk_to_host", "host_to_disk")]
    return [counted, *uses], disk_line(engine)


def test_the_disk_counts_what_the_ledger_counts(tmp_path: Path) -> None:
    """The same bytes in steps; an evaluation writes nothing; rank 0 says the bandwidth of both."""
    found = run_gloo(2, used, str(tmp_path), "offload:param@disk")
    for (expected, start, _, steps, evaluation), _ in found:
        assert [b - a for a, b in zip(start, steps, strict=True)] == expected
        assert evaluation[0] > steps[0] and evaluation[1] == steps[1]
    (_, first), (_, second) = found
    assert re.match(
        rf"disk .*{tmp_path}.*: 2 ranks read \d+ MiB at \d+ MiB/s and wrote \d+ MiB at \d+ MiB/s; "
        r"they waited \d+\.\d s for it$",
        first,
    )
    assert second == ""
    assert [line for _, line in run_gloo(2, used, str(tmp_path), "")] == ["", ""]
    assert list(tmp_path.iterdir()) == []


# --- profiles -----------------------------------------------------------------------------------


@pytest.mark.full
def test_every_rank_has_a_profile(tmp_path: Path) -> None:
    """Five steps of each rank: its actions by their names, in the order of its row."""
    given = runs.settings(tmp_path / "run", "pp2 1f1b:2", save_every=0)
    run_gloo(2, runs.trained, runs.changed(given, "run", profile=True))
    for rank in (0, 1):
        text = (given.folder / "profile" / f"rank-{rank}.json").read_text()
        events = [e for e in json.loads(text)["traceEvents"] if e.get("cat") == "user_annotation"]
        named = [e["name"] for e in sorted(events, key=lambda e: e["ts"])]
        actions = [f"F{rank}.0", f"F{rank}.1", f"B{rank}.0", f"B{rank}.1"]
        assert all(named.count(action) >= 5 for action in actions)  # and evaluations
        assert named.index(actions[0]) < named.index(actions[2])
    report = (given.folder / "report.md").read_text()
    assert "![timeline](timeline.svg)" in report
