"""`--resume auto`: one command that begins a run, and continues it after every restart."""

import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.core.errors import InputError
from shardwise.train import config, folder, prepare
from shardwise.train.cli import with_resume_value
from shardwise.train.metrics import read
from shardwise.train.prepare import Start
from tests.train import killed, runs


@pytest.mark.full
def test_torchrun_restarts_end_in_the_undisturbed_curve(tmp_path: Path) -> None:
    """A rank is killed before there is a checkpoint, and another time after: torchrun goes on."""
    straight = runs.run(runs.settings(tmp_path / "straight", "dp2 zero3 fp64"), 2)
    given = runs.settings(tmp_path / "run", "dp2 zero3 fp64")
    file = tmp_path / "config.toml"
    file.write_text(config.dump(given))
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(Path(killed.__file__)), "train", str(file), "--resume", "auto"]
    command = [sys.executable, "-m", *launcher, "--max-restarts", "3", *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "resumed after step 4" in done.stdout
    found = read(given.folder)
    assert [(r.step, r.loss) for r in found] == [(r.step, r.loss) for r in straight]


def settled(given: config.Config) -> Start:
    """What `--resume auto` comes to, after the checks of any start."""
    start = Start(auto=True).resolve_auto(given)
    folder.check(given, start.resume, start.overwrite)
    return start


def test_auto_begins_continues_or_begins_again(tmp_path: Path) -> None:
    """No run; a run that saved nothing; a run with a checkpoint, finished or not."""
    given = runs.settings(tmp_path / "run")
    assert settled(given) == Start()
    folder.claim(given, overwrite=False)
    assert settled(given) == Start(overwrite=True)
    first = runs.run(given, start=Start(auto=True))
    assert settled(given) == Start(resume=True)
    longer = runs.settings(tmp_path / "run", steps=9)
    again = runs.run(longer, start=Start(auto=True))
    assert [r.loss for r in again[:2]] == [r.loss for r in first[:2]] and len(again) == 9


def test_auto_replaces_nothing_of_others(tmp_path: Path) -> None:
    """A folder with somebody else's files is refused as ever, and so is --overwrite beside it."""
    given = runs.settings(tmp_path / "run")
    given.folder.mkdir()
    (given.folder / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="a folder with other files"):
        settled(given)
    both = Start(overwrite=True, auto=True).resolve_auto(given)
    with pytest.raises(InputError, match="both --resume and --overwrite"):
        prepare.prepare(given, 1, both)


@pytest.mark.parametrize(
    ("given", "read_as"),
    [
        ("train x --resume", "train x --resume=always"),
        ("train x --resume auto --nproc 2", "train x --resume=auto --nproc 2"),
        ("train --resume x", "train --resume=always x"),
        ("train auto --resume", "train auto --resume=always"),
        ("train --resume auto auto", "train --resume=auto auto"),
        ("train x", "train x"),
    ],
)
def test_resume_takes_a_word_or_none(given: str, read_as: str) -> None:
    """`auto` behind it is its value; anything else is an argument of its own."""
    assert with_resume_value(given.split()) == read_as.split()
