"""The pages that users start from: what they say of the program is so."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.check import problems
from shardwise.core.plan import WORDS, Plan, words_table
from shardwise.train.config import Config
from shardwise.train.verify import verify

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
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


def test_the_example_trains_alike_under_any_plan(tmp_path: Path) -> None:
    """One process and two ranks reach one loss; another plan goes on from their checkpoint."""
    said = {plan: _run(tmp_path / str(n), plan) for n, plan in enumerate(("dp1", "pp2 1f1b:4"))}
    losses = {plan: re.findall(r"step (\d+): loss (\S+),", text) for plan, text in said.items()}
    assert [int(step) for step, _ in losses["dp1"]] == [16, 32, 48, 64, 80]
    alone = [float(loss) for _, loss in losses["dp1"]]
    for found in losses.values():
        assert [float(loss) for _, loss in found] == pytest.approx(alone, abs=1e-3)
    assert "step 96: " in _run(tmp_path / "1", "tp2", "--resume")


def _run(folder: Path, *argv: str) -> str:
    """What the example prints when it is called so, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(ROOT / "examples/train.py"), *argv]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("page", "number"), [("README.md", 0), ("README.md", 2)])
def test_a_snippet_runs_as_shown(page: str, number: int) -> None:
    """What the README shows is a whole program: it runs as it stands, on one rank."""
    snippet = SNIPPET.findall((ROOT / page).read_text(encoding="utf-8"))[number]
    command = [sys.executable, "-W", "error", "-c", snippet]
    done = subprocess.run(command, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr


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
