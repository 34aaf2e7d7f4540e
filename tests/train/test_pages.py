"""The pages that users start from: what they say of the program is so."""

import argparse
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli.main import with_resume_value
from shardwise.core.mesh import AXES
from shardwise.core.plan import WORDS, Plan, words_table
from shardwise.core.plan_check import problems
from shardwise.train.config import Config
from shardwise.verify.command import verify
from tests import surface

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: A command of a page, to its end or to the two spaces before what it does.
COMMAND = re.compile(r"^(?:\$ )?shardwise (.+?)(?:  .*)?$", re.MULTILINE)
#: What differs from machine to machine: errors of rounding, and the time a prediction takes.
VARIES = re.compile(r"[0-9.]+e[+-][0-9]+|Computed in [0-9,.]+ ms")
ROW = re.compile(r"^\| (`.+`) \| (.+) \|$", re.MULTILINE)
SNIPPET = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_every_key_is_on_the_page_with_its_default() -> None:
    """docs/configuration.md has each key of a configuration once, its default, and no other."""
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+\.\w+)` \| [^|]+ \| (.+?) \| [^|]+ \|$", page, re.MULTILINE)
    assert len(rows) == len(dict(rows))
    assert dict(rows) == {
        f"{section}.{key}": _shown(default)
        for section, values in Config().model_dump().items()
        for key, default in values.items()
    }


def _shown(default: Any) -> str:
    return "unset" if default is None else f"`{json.dumps(default)}`"


def test_the_page_shows_the_example() -> None:
    """The script of docs/python.md is examples/train.py, letter by letter."""
    page = (DOCS / "python.md").read_text(encoding="utf-8")
    assert SNIPPET.findall(page)[0] == (ROOT / "examples/train.py").read_text(encoding="utf-8")


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


def test_the_page_shows_the_script_for_transformers() -> None:
    """The script of docs/training.md is examples/hf.py, letter by letter."""
    page = (DOCS / "training.md").read_text(encoding="utf-8")
    assert SNIPPET.findall(page) == [(ROOT / "examples/hf.py").read_text(encoding="utf-8")]


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
    command = [sys.executable, str(ROOT / "examples" / script), *argv]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("page", "number"),
    [
        *(("README.md", 0), ("docs/python.md", 6)),
        *(("docs/dataparallel.md", 0), ("docs/weights.md", 0), ("docs/weights.md", 1)),
        ("docs/verify.md", 0),
        ("docs/callbacks.md", 1),
        ("docs/derived-tables.md", 0),
    ],
)
def test_a_snippet_runs_as_shown(page: str, number: int, tmp_path: Path) -> None:
    """What these pages show is a whole program: it runs as it stands, from no file."""
    snippet = SNIPPET.findall((ROOT / page).read_text(encoding="utf-8"))[number]
    command = [sys.executable, "-W", "error", "-c", snippet]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_what_replaces_another_system_runs_as_shown() -> None:
    """Each block of docs/migration.md, without the lines that it replaces, is a whole program."""
    page = (DOCS / "migration.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4
    lines = [[line[2:] for line in b.splitlines() if not line.startswith("-")] for b in blocks]
    programs = ["\n".join(block) for block in lines]
    code = f"for program in {programs!r}: exec(program, {{}})"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_the_model_of_the_tables_page_holds_by_the_commands_beside_it(tmp_path: Path) -> None:
    """The page's file, as it stands, and each `shardwise verify` that the page has for it."""
    page = (DOCS / "tensor-tables.md").read_text(encoding="utf-8")
    (shown,) = [code for code in SNIPPET.findall(page) if "def build():" in code]
    (tmp_path / "model.py").write_text(shown)
    plans = dict.fromkeys(
        re.findall(r'^shardwise verify "(.+)" --model model.py:build$', page, re.MULTILINE)
    )
    assert list(plans) == ["tp2", "tp2 sp"]
    for plan in plans:
        assert verify(plan, f"{tmp_path / 'model.py'}:build").holds


def test_the_words_say_what_is_to_come() -> None:
    """Of the words of plans, those that this version refuses are marked, and no others."""
    for word, line in zip(WORDS, words_table().splitlines()[1:], strict=True):
        refused = any("not in this version" in p.given for p in problems(Plan.parse(word.example)))
        assert line.startswith(f"{word.form} ")
        assert line.endswith(" (not in this version)") == refused


def commands_of(page: str) -> list[list[str]]:
    """The arguments of each command in the code blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    shown = "".join(block for language, block in blocks if not language)
    return [shlex.split(line) for line in COMMAND.findall(shown)]


def ran(folder: Path, argv: list[str]) -> str:
    """What a command prints that ends well, 100 columns wide."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    command = [sys.executable, "-m", "shardwise.cli.main", *argv]
    done = subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "page", ["README.md", pytest.param("docs/predict.md", marks=pytest.mark.full)]
)
def test_a_page_shows_what_the_command_prints(page: str, tmp_path: Path) -> None:
    """The blocks that begin with a command, line by line, but for rounding and time."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n\$ shardwise (.+?)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    for command, shown in blocks:
        if "--cluster" in command:  # the seconds are those of a machine
            continue
        found = "\n".join(map(str.rstrip, ran(tmp_path, shlex.split(command)).splitlines()))
        assert VARIES.sub("", shown.strip()) == VARIES.sub("", found.strip()), found


@pytest.mark.parametrize("page", ["README.md", "docs/README.md"])
def test_the_commands_of_a_page_are_those_of_the_program(page: str) -> None:
    """Each command, option and value is accepted by the parser."""
    given = commands_of(page)
    assert len(given) >= 8
    for argv in given:
        words = 2 if argv[0] == "checkpoint" else 1
        name, rest = " ".join(argv[:words]), with_resume_value(argv[words:])
        surface.command(name).make_context(name, rest)


@pytest.mark.full
@pytest.mark.parametrize("trains", [False, True], ids=["others", "a run"])
def test_the_commands_of_the_readme_run(tmp_path: Path, trains: bool) -> None:
    """Each as it stands, one after the other; those of a run in one folder."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for argv in commands_of("README.md"):
        if any("runs/" in word for word in argv) == trains:
            assert ran(tmp_path, argv)


def word_of(text: str) -> str:
    """A plan word without its number or value: dp2 and dpN are dp, zero1 stays."""
    name = text.partition(":")[0]
    return next((axis for axis in AXES if re.fullmatch(f"{axis}(N|[0-9]+)", name)), name)


def test_the_page_of_plan_words_has_each_word() -> None:
    """docs/plan-words.md has each word that this version runs, in plans; the README some of it."""
    rows = dict(ROW.findall((DOCS / "plan-words.md").read_text(encoding="utf-8")))
    words = " ".join(re.findall("`([^`]+)`", " ".join(rows))).split()
    for word in words:
        Plan.parse(word)
    known = {word_of(word.form) for word in WORDS if not word.later}
    assert {word_of(word) for word in words} == known | {"fsdp"}
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    section = page.partition("## Plan words")[2].partition("\n## ")[0]
    shown = {left: right.replace("(docs/", "(") for left, right in ROW.findall(section)}
    assert len(shown) == 12 and shown.items() <= rows.items()


def test_the_readme_is_short() -> None:
    """At most 150 lines."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
