"""The reference is what the program says of itself: nothing of it is typed beside it."""

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from docs.docstrings import markdown, rows
from docs.reference import ENGINE, MEMBERS, PAGES, WORLD
from shardwise.comm.start.rendezvous import Limits
from shardwise.comm.world import alone
from shardwise.engine.options import EngineOptions
from shardwise.engine.step_end import StepResult
from shardwise.train.config import Config
from shardwise.train.metrics import Record
from tests.docs.pages import DOCS, ROOT, text_of
from tests.engine.cases import squares

REFERENCE = "docs/reference"


@pytest.mark.cases(len(PAGES))
@pytest.mark.parametrize(("name", "page"), PAGES.items(), ids=PAGES)
def test_a_page_is_what_the_program_says(name: str, page: Callable[[], str]) -> None:
    """What is checked in is what `make docs` writes."""
    wanted = (DOCS / name).read_text(encoding="utf-8")
    assert page() == wanted, "if this is meant, run: python -m docs.reference"


def test_every_public_name_is_in_the_reference() -> None:
    """Once, and it has a docstring that names no file."""
    shown = re.findall(r"^::: shardwise\.(\w+)$", text_of(f"{REFERENCE}/python.md"), re.MULTILINE)
    assert sorted(shown) == sorted(sw.__all__)
    for name in sw.__all__:
        public = getattr(sw, name)
        said = [inspect.getdoc(public) or ""]
        if inspect.isclass(public) and not issubclass(public, Exception):
            own = [member for n, member in vars(public).items() if not n.startswith("_")]
            said += [inspect.getdoc(member) or "" for member in own if callable(member)]
        assert said[0] and not re.findall(r"\w+\.py\b", "".join(said)), name


def test_the_members_that_are_shown_are_there() -> None:
    """Of classes, and the attributes of an engine and of a world."""
    for name, members in MEMBERS.items():
        assert [each for each in members if not hasattr(getattr(sw, name), each)] == []
    world = alone()
    engine = sw.parallelize(nn.Linear(4, 2), "zero3", world, loss=squares)
    for made, said in ((engine, ENGINE), (world, WORLD)):
        names = " ".join(re.findall(r"^\| (`.+`) \|", said, re.MULTILINE))
        assert [each for each in re.findall("`(\\w+)`", names) if not hasattr(made, each)] == []


def test_every_key_has_a_meaning() -> None:
    """Of the configuration, of a step's record, of an engine's options and metrics."""
    for section in Config.model_fields.values():
        model = type(section.default)
        assert [key for key, field in model.model_fields.items() if not field.description] == []
    metrics = sw.Metrics(StepResult(0.0, 0, None, False, 1.0, (), 0.0), 0.1, 0, clips=False)
    keys: dict[type, list[str]] = {
        kind: [f.name for f in fields(kind)] for kind in (Record, EngineOptions)
    }
    keys[sw.Metrics] = [name for name in dir(metrics) if not name.startswith("_")]
    for kind, names in keys.items():
        listed = [name for name, _ in rows(inspect.cleandoc(kind.__doc__ or ""))]
        assert sorted(listed) == sorted(names)


def test_the_variables_are_those_that_the_package_reads() -> None:
    """Each with its default; the launcher's own mark is not for users."""
    page = text_of(f"{REFERENCE}/environment.md")
    shown = dict(re.findall(r"^\| `(SHARDWISE_\w+)` \| (\S+) \|", page, re.MULTILINE))
    source = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "shardwise").rglob("*.py"))
    known = set(re.findall(r"SHARDWISE_[A-Z_]+[A-Z]", source)) - {"SHARDWISE_LAUNCHER"}
    assert set(shown) == known
    limits = Limits()
    assert float(shown["SHARDWISE_START_TIMEOUT_S"]) == limits.start_s
    assert float(shown["SHARDWISE_FROZEN_S"]) == limits.frozen_s
    assert float(shown["SHARDWISE_PATIENCE_S"]) == limits.patience_s
    slurm = set(re.findall(r"SLURM_[A-Z_]+", page))
    assert slurm <= set(re.findall(r"SLURM_[A-Z_]+", source))


def test_the_files_of_a_checkpoint_are_those_of_the_page(tmp_path: Path) -> None:
    """The names in the folder, the tensors, and the keys of its JSON file."""
    engine = sw.parallelize(nn.Linear(4, 2), "zero3", alone(), loss=squares)
    engine.step(torch.rand(3, 4))
    folder = sw.save(engine, tmp_path, extra={"epoch": 1})
    page = text_of(f"{REFERENCE}/checkpoint-format.md")
    for path in (*folder.iterdir(), tmp_path / "latest"):
        assert path.exists() and f"{path.name} " in page
    section = page.partition("## manifest.json")[2]
    top = re.findall(r'^  "(\w+)"', (folder / "manifest.json").read_text(), re.MULTILINE)
    shown = " ".join(re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE))
    assert [key for key in top if key not in shown] == []


def test_rows_of_a_docstring_become_a_list() -> None:
    """Rows of names and lines of arguments; sections of Google's style are left unchanged."""
    text = "First.\n\nname   its text\n       goes on\n\ngiven: another\n\nRaises:\n    X: why"
    shown = markdown(text, frozenset({"given"}))
    assert "- **`name`**: its text\n  goes on" in shown
    assert "- **`given`**: another" in shown
    assert shown.endswith("Raises:\n    X: why")
