"""The examples: whole programs that train under any plan."""

import argparse
import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.pages import ROOT
from tests.programs import run_program


@pytest.mark.full
def test_the_example_trains_alike_under_any_plan(tmp_path: Path) -> None:
    """One process and two ranks reach one loss; another plan goes on from their checkpoint."""
    said = {plan: _run(tmp_path / str(n), plan) for n, plan in enumerate(("dp1", "pp2 1f1b:4"))}
    losses = {plan: re.findall(r"step (\d+): loss (\S+),", text) for plan, text in said.items()}
    assert [int(step) for step, _ in losses["dp1"]] == [16, 32, 48, 64, 80]
    alone = [float(loss) for _, loss in losses["dp1"]]
    for found in losses.values():
        assert [float(loss) for _, loss in found] == pytest.approx(alone, abs=1e-3)
    assert "step 96: " in _run(tmp_path / "1", "tp2", "--resume")
    assert _run(tmp_path / "1", "tp2", "--resume", "auto") == ""  # it has its five epochs


@pytest.mark.full
def test_a_model_of_transformers_from_a_configuration_and_from_a_folder_to_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sharded ranks write a folder that transformers loads; a run from it starts there."""
    transformers = pytest.importorskip("transformers")
    printed = _run(tmp_path, "zero3", "--steps", "3", script="hf.py")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    example: dict[str, Any] = runpy.run_path(str(ROOT / "examples/hf.py"))
    folder = tmp_path / "runs/hf/weights"
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = example["rows_of"](inspect.getsource(argparse))
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:16]
    with torch.no_grad():
        wanted = example["loss_fn"](plain, rows[chosen]).item()
    assert wanted < losses[0]
    monkeypatch.chdir(tmp_path)
    assert example["train"]("fp32", str(folder), 1) == pytest.approx(wanted, rel=1e-5)


def _run(folder: Path, *argv: str, script: str = "train.py") -> str:
    """What an example prints when it is called so, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    done = run_program([str(ROOT / "examples" / script), *argv], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout
