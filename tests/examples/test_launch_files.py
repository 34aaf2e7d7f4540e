"""The launch files of examples/launch: their syntax, and commands that torchrun and train take."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from shardwise.cli.main import with_resume_value

FOLDER = Path(__file__).parents[2] / "examples" / "launch"
YAML = sorted(FOLDER.glob("*.yaml"))
SLURM = FOLDER / "slurm.sh"


def commands(found: Any) -> list[list[str]]:
    """Every `command` in the objects of a file."""
    if isinstance(found, dict):
        own = [found["command"]] if "command" in found else []
        return own + [each for value in found.values() for each in commands(value)]
    return [each for value in found for each in commands(value)] if isinstance(found, list) else []


def of_slurm(folder: Path) -> list[str]:
    """The command that the script gives to srun, with Slurm's programs in a folder of our own."""
    for name, text in {"scontrol": "echo node1", "srun": 'printf "%s\\n" "$@"'}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    place = {"PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", str(SLURM), "run.toml"],
        env=place | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[1:]


def assert_trains(argv: list[str]) -> None:
    """Torchrun takes the command, and what it starts is `shardwise train FILE --resume auto`."""
    assert argv[0] == "torchrun"
    asked = get_args_parser().parse_args(argv[1:])
    assert asked.module and asked.training_script == "shardwise"
    name, file, *rest = asked.training_script_args
    assert name == "train" and file.endswith("run.toml")
    assert with_resume_value(rest) == ["--resume=auto"]


@pytest.mark.parametrize("file", YAML, ids=lambda file: file.name)
def test_a_manifest_can_be_read_and_starts_a_run(file: Path) -> None:
    """As YAML: objects of Kubernetes, and the command of their one container."""
    objects = list(yaml.safe_load_all(file.read_text()))
    assert all({"apiVersion", "kind", "metadata", "spec"} <= found.keys() for found in objects)
    (argv,) = commands(objects)
    assert_trains(argv)


def test_the_script_for_slurm_starts_a_run(tmp_path: Path) -> None:
    """What it gives to srun, run under Slurm's variables."""
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    assert_trains(of_slurm(tmp_path))
