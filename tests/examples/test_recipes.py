"""Each recipe of examples/, a whole program: on two ranks it trains as on one process."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
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
}
#: What a recipe needs beside Shardwise.
NEEDS = {"lora": ("peft", "transformers"), "t5": ("transformers",), "vit": ("transformers",)}


def recipe(name: str) -> Any:
    """The program as a module."""
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    return importlib.import_module(f"examples.{name}")


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    """The losses of each recipe on one process, once they are known."""
    return {}


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("name", "plan"), [(name, plan) for name, plans in PLANS.items() for plan in plans[1:]]
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_two_ranks_train_as_one_process(
    name: str, plan: str, alone: dict[str, list[float]]
) -> None:
    """The loss of each step is equal, and it falls; under the plans that are not the program's."""
    train = recipe(name).train
    if name not in alone:
        alone[name] = train("fp32")
    losses = sw.spawn(train, ranks=2, args=(plan,))[0]
    assert losses == pytest.approx(alone[name], rel=2e-4)
    if name != "gan":
        assert losses[-1] < 0.9 * losses[0]


def test_a_loop_of_ones_own_continues_as_if_it_had_not_ended(tmp_path: Path) -> None:
    """Three steps and three after a restart have the losses of six."""
    through, resumed = recipe("own_loop").compare(tmp_path)
    assert len(through) == 6
    assert resumed == through


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
