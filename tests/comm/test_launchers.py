"""One script, without a change, under each launcher that people have."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, torch
from torch import nn
import shardwise as sw

world = sw.init("cpu")
torch.manual_seed(0)
engine = sw.parallelize(
    nn.Linear(6, 4), "zero3 fp64", world, optimizer=sw.SGD(lr=0.1),
    loss=lambda model, x: model(x).square().mean(),
)
rows = torch.arange(48.0).view(8, 6).cos().chunk(world.size)[world.rank]
losses = [engine.step(rows).loss for _ in range(2)]
sys.stdout.write(f"rank {world.rank} of {world.size}: {losses[-1]:.10f}\\n")
world.close()
"""


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def torchrun() -> list[str]:
    return ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]


def accelerate() -> list[str]:
    one = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    many = ["--multi_gpu", "--num_processes", "2", "--main_process_port", free_port()]
    return ["-m", "accelerate.commands.launch", *many, *one]


def deepspeed() -> list[str]:
    return ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", free_port()]


def printed(folder: Path, argv: list[str], **variables: str) -> str:
    """What the script prints when Python runs it with these arguments before it."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])} | variables
    command = [sys.executable, *argv, str(script)]
    done = subprocess.run(
        command, check=False, env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(text: str) -> dict[str, str]:
    """The loss that each rank prints."""
    ranks = [line.partition(": ") for line in text.splitlines() if line.startswith("rank ")]
    return {rank: loss for rank, _, loss in ranks}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The loss of one process."""
    alone = losses(printed(tmp_path_factory.mktemp("alone"), []))
    assert list(alone) == ["rank 0 of 1"]
    return alone["rank 0 of 1"]


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("accelerate", "deepspeed")),
    ],
)
def test_a_script_runs_unchanged_under(launcher: str, expected: str, tmp_path: Path):
    """Both ranks have the loss that one process has."""
    if launcher != "torchrun" and importlib.util.find_spec(launcher) is None:
        pytest.skip(f"{launcher} is not installed: pip install {launcher}")
    argv = {"torchrun": torchrun, "accelerate": accelerate, "deepspeed": deepspeed}[launcher]()
    found = losses(printed(tmp_path, argv, DS_ACCELERATOR="cpu"))
    assert found == {"rank 0 of 2": expected, "rank 1 of 2": expected}


@pytest.mark.full
def test_a_script_runs_unchanged_in_the_environment_of_srun(expected: str, tmp_path: Path):
    """With the variables that srun sets for each task, whether or not Slurm is here."""
    if shutil.which("srun") and "SLURM_JOB_ID" in os.environ:  # inside of an allocation
        folder = tmp_path / "srun"
        folder.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        command = ["srun", "--ntasks", "2", sys.executable, str(folder / "script.py")]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert losses(done.stdout) == {"rank 0 of 2": expected, "rank 1 of 2": expected}
        return
    job, started = free_port(), list[subprocess.Popen[str]]()
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    step |= {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "MASTER_PORT": free_port()}
    (tmp_path / "script.py").write_text(SCRIPT)
    for rank in ("0", "1"):
        own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "PYTHONPATH": str(ROOT)}
        started.append(
            subprocess.Popen(
                [sys.executable, str(tmp_path / "script.py")],
                env=os.environ | step | own,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    text = "".join(process.communicate(timeout=120)[0] for process in started)
    assert losses(text) == {"rank 0 of 2": expected, "rank 1 of 2": expected}
