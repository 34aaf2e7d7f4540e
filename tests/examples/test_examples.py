"""What examples/ has: recipes, the notebook, and the launch files of clusters."""

import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

import shardwise as sw
from shardwise.cli.main import with_resume_value
from shardwise.comm.start.launch import can_fork
from tests.house import ROOT
from tests.programs import run_program

#: recipe -> the plans under which two ranks equal one process; the first is the program's own.
PLANS = {
    "lora": ("tp2", "zero3"),
    "ema": ("zero3", "ddp"),
    "t5": ("zero3", "tp2"),
    "vit": ("zero3", "pp2 1f1b:4", "tp2"),
    "unet": ("pp2 1f1b:4", "zero3"),
    "gradient_penalty": ("zero1", "ddp"),
    "gan": ("zero3", "ddp"),
    "dpo": ("zero3", "tp2"),
    "grpo": ("zero3", "ddp"),
    "distill": ("zero3", "pp2 1f1b:4"),
}
#: What a recipe needs beside Shardwise.
NEEDS = {
    **dict.fromkeys(("t5", "vit", "grpo"), ("transformers",)),
    **dict.fromkeys(("lora", "dpo"), ("peft", "transformers")),
}
LAUNCH = ROOT / "examples" / "launch"


def recipe(name: str) -> Any:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    return importlib.import_module(f"examples.{name}")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "plan"), [(name, plan) for name, plans in PLANS.items() for plan in plans[1:]]
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_two_ranks_train_as_one_process(name: str, plan: str) -> None:
    """The loss of each step is equal, and it falls; under the plans that are not the program's."""
    train = recipe(name).train
    losses = sw.spawn(train, ranks=2, args=(plan,))[0]
    assert losses == pytest.approx(train("fp32"), rel=2e-4)
    if name != "gan":
        assert losses[-1] < 0.9 * losses[0]


def test_the_page_names_each_recipe_with_its_plans() -> None:
    """docs/how-to/recipes.md has a row for each program, with the commands that these tests run."""
    page = (ROOT / "docs/how-to/recipes.md").read_text(encoding="utf-8")
    commands = re.findall(r"`python examples/(\w+)\.py(?: \"?([^`\"]+)\"?)?`", page)
    wanted = [
        (name, "" if n == 0 else plan) for name, ps in PLANS.items() for n, plan in enumerate(ps)
    ]
    assert sorted(commands) == sorted([*wanted, ("own_loop", "")])


@pytest.mark.full
@pytest.mark.parametrize("name", [*PLANS, "own_loop"])
def test_the_program_prints_equal_losses(name: str, tmp_path: Path) -> None:
    """As docs/how-to/recipes.md calls it: the losses of each step are equal, and they fall."""
    recipe(name)
    done = run_program([str(ROOT / f"examples/{name}.py")], tmp_path)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"one (?:process|run) (\d+\.\d{6}), .*?(\d+\.\d{6})", done.stdout)
    pairs = [(float(one), float(two)) for one, two in shown]
    assert len(pairs) >= 6
    assert all(two == pytest.approx(one, rel=2e-4) for one, two in pairs), done.stdout
    if name not in ("gan", "own_loop"):
        assert pairs[-1][1] < 0.9 * pairs[0][1]


@pytest.mark.full
def test_the_cells_of_the_notebook_train_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cell runs; two ranks have the losses of one process, and the proof holds."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    if not can_fork():
        pytest.skip("ranks are forked from the kernel: on Linux, without a GPU")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples/two_ranks.ipynb", as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    for text in ("rank 1: loss", "equal losses: True", "the proof holds: True"):
        assert text in printed


def commands(found: Any) -> list[list[str]]:
    """Every `command` in the objects of a manifest."""
    if isinstance(found, dict):
        own = [found["command"]] if "command" in found else []
        return own + [each for value in found.values() for each in commands(value)]
    return [each for value in found for each in commands(value)] if isinstance(found, list) else []


def require_run(argv: list[str]) -> None:
    """Torchrun takes the command, and what it starts is `shardwise train FILE --resume auto`."""
    assert argv[0] == "torchrun"
    asked = get_args_parser().parse_args(argv[1:])
    assert asked.module and asked.training_script == "shardwise"
    name, file, *rest = asked.training_script_args
    assert name == "train" and file.endswith("run.toml")
    assert with_resume_value(rest) == ["--resume=auto"]


@pytest.mark.parametrize("file", sorted(LAUNCH.glob("*.yaml")), ids=lambda file: file.name)
def test_a_manifest_of_kubernetes_starts_a_run(file: Path) -> None:
    """Its objects, and the command of their one container."""
    objects = list(yaml.safe_load_all(file.read_text()))
    assert all({"apiVersion", "kind", "metadata", "spec"} <= found.keys() for found in objects)
    (argv,) = commands(objects)
    require_run(argv)


def test_the_script_for_slurm_starts_a_run(tmp_path: Path) -> None:
    """What it gives to srun, with programs of Slurm's names in a folder of our own."""
    for name, text in {"scontrol": "echo node1", "srun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    variables["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    argv = ["bash", str(LAUNCH / "slurm.sh"), "run.toml"]
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, check=True)
    require_run(done.stdout.splitlines()[1:])
