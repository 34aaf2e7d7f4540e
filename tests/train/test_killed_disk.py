"""A run with states on a disk that is killed leaves its folder empty and its checkpoint whole."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.checkpoint.folder import CHECKPOINTS, find
from shardwise.train import config, loop
from shardwise.train.config_sections import OffloadSection
from shardwise.train.metrics import read
from tests.train import runs

PROGRAM = "from shardwise.cli.main import main; main()"


@pytest.mark.full
def test_a_killed_run_leaves_the_folder_empty_and_resumes(tmp_path: Path) -> None:
    """SIGKILL after a checkpoint: no file is in the folder, and a resumed run goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def given(name: str, steps: int) -> config.Config:
        made = runs.settings(tmp_path / name, "fp64 offload:param@disk", steps=steps)
        offload = OffloadSection(folder=str(disk))
        return made.model_copy(
            update={"offload": offload, "sample": made.sample.model_copy(update={"tokens": 0})}
        )

    straight = runs.run(given("straight", 7))
    endless = given("run", 10**6)
    file = tmp_path / "config.toml"
    file.write_text(config.dump(endless))
    command = [sys.executable, "-c", PROGRAM, "train", str(file), "--nproc", "1"]
    environment = os.environ | {"PYTHONPATH": str(Path(loop.__file__).parents[2])}
    running = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    until = time.monotonic() + 120
    while not list((endless.folder / CHECKPOINTS).glob("step*")) and time.monotonic() < until:
        assert running.poll() is None
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert list(disk.iterdir()) == []
    assert find(endless.folder / CHECKPOINTS).is_dir()
    at = max(record.step for record in read(endless.folder))
    resumed = given("run", at + 1)
    found = runs.run(resumed, start=runs.Start(resume=True))
    assert found[-1].step == at + 1
    assert [r.loss for r in found[:2]] == [r.loss for r in straight[:2]]
    assert list(disk.iterdir()) == []
