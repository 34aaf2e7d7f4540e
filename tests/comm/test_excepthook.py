"""An InputError that ends a run of several ranks: one paragraph, and exit code 2."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.comm.start import excepthook
from shardwise.core.errors import InputError, RankError, bad
from tests.programs import run_program

SCRIPT = """
import atexit
import sys
import torch.distributed as dist
from torch import nn
import shardwise as sw

def work(where):
    world = sw.init("cpu")
    left = open(f"left-{world.rank}.txt", "w")
    left.write("in an open file, ")
    atexit.register(left.write, "by a handler")
    dist.barrier()
    try:
        sw.FSDP(nn.Linear(3, 3), "OTHER", world=world)
    except sw.InputError as error:
        print("caught", type(error).__name__, flush=True)
    dist.barrier()  # torchrun ends the other rank as soon as one has failed
    if where in ("all", str(world.rank)):
        sw.FSDP(nn.Linear(3, 3), "SOME", world=world)
    dist.barrier()

if __name__ == "__main__":
    how, where = sys.argv[1:]
    sw.spawn(work, 2, (where,)) if how == "spawn" else work(where)
"""
#: Where it is not caught.
LINE = 1 + next(i for i, line in enumerate(SCRIPT.split("\n")) if '"SOME"' in line)


def ran(tmp_path: Path, how: str, where: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    argv = [*(launcher if how == "torchrun" else []), str(script), how, where]
    return run_program(argv, tmp_path, timeout=60)


@pytest.mark.full
@pytest.mark.cases(1)
@pytest.mark.parametrize("where", ["all", "1"])
def test_torchrun_shows_one_paragraph(tmp_path: Path, where: str):
    """From rank 0, or named by the one rank that has it; no worker prints a traceback.

    What the script catches is shown by nobody; open files and atexit handlers are not lost.
    """
    done = ran(tmp_path, "torchrun", where)
    assert done.stdout.count("caught") == 2
    said = [line for line in done.stderr.splitlines() if "Given: " in line]
    assert len(said) == 1, done.stderr
    whose = "rank 1: " if where == "1" else ""
    assert said[0].startswith(f"shardwise: {whose}train.py, line {LINE}: Given: sharding_strategy=")
    assert "[rank" not in done.stderr
    assert done.stderr.count("Traceback") == 1  # torchrun's own
    assert "exitcode  : 2" in done.stderr
    # of the rank that prints; torchrun may end others before they come to their error
    left = tmp_path / f"left-{1 if where == '1' else 0}.txt"
    assert left.read_text() == "in an open file, by a handler"
    assert "InputError: see the paragraph" in done.stderr
    assert done.returncode == 1  # of torchrun, whatever its workers' is


@pytest.mark.full
def test_spawn_shows_one_paragraph(tmp_path: Path):
    """Without a traceback of the launcher's or the rank's, and with exit code 2."""
    done = ran(tmp_path, "spawn", "1")
    assert done.stderr.startswith(f"shardwise: rank 1: train.py, line {LINE}: Given: ")
    assert done.stderr.count("\n") == 1
    assert done.returncode == 2


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hook of rank 0 of two in place of the one before, which failures what comes through."""
    before: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: before.append(kind.__name__))
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(excepthook, "_end_program", lambda: None)  # the tests go on after it
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    excepthook.install_excepthook(0, 2)
    excepthook.install_excepthook(0, 2)  # once is enough
    return before


def raised(error: BaseException) -> Any:
    try:
        raise error
    except type(error) as caught:
        return type(caught), caught, caught.__traceback__


def test_other_errors_are_shown_as_before(hook: list[str], capsys: pytest.CaptureFixture[str]):
    """The hook that was there is called, a lost connection of unknown cause included."""
    sys.excepthook(*raised(KeyError("x")))
    sys.excepthook(*raised(RuntimeError("Connection closed by peer")))
    assert hook == ["KeyError", "RuntimeError"]
    assert capsys.readouterr().err == ""


def test_several_problems_keep_their_lines(hook: list[str], capsys: pytest.CaptureFixture[str]):
    """The text is the error's own, behind the place in the script."""
    with pytest.raises(SystemExit) as left:
        sys.excepthook(*raised(InputError("2 things are wrong\n1. this\n2. that")))
    assert left.value.code == 2
    assert hook == []
    said = capsys.readouterr().err
    assert said.startswith("shardwise: test_excepthook.py, line ")
    assert said.endswith(": 2 things are wrong\n1. this\n2. that\n")


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: getattr(0.5, "backward"), "Given: .backward() of a number"),  # noqa: B009
        (lambda: sw.parallelize(lr=0.1), "optimizer=sw.AdamW(lr=1e-3)"),  # type: ignore[call-arg]
    ],
)
def test_habits_from_other_libraries_are_explained(
    act: Callable[[], Any], said: str, hook: list[str], capsys: pytest.CaptureFixture[str]
):
    """Python's error of `metrics.loss.backward()`, and of a learning rate without an optimizer."""
    with pytest.raises((AttributeError, TypeError)) as caught:
        act()
    with pytest.raises(SystemExit):
        sys.excepthook(caught.type, caught.value, caught.value.__traceback__)
    assert said in capsys.readouterr().err


def test_what_torchrun_reports_points_to_the_paragraph(
    hook: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """In the form of torch's own error files, with the time that makes it the first failure."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    error = bad("this", "that", "those")
    error.__cause__ = RankError(3, 'Traceback\n  File "/nowhere/x.py", line 3, in f\n')
    with pytest.raises(SystemExit):
        sys.excepthook(*raised(error))
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert told["message"] == "InputError: see the paragraph that rank 0 has printed"
    assert int(told["extraInfo"]["timestamp"]) > 0


@pytest.mark.full
def test_an_environment_that_is_incomplete_is_one_paragraph():
    """RANK without the rest ends a script without a traceback, and with exit code 2."""
    program = ["-c", "import shardwise as sw; sw.init()"]
    done = run_program(program, variables={"RANK": "x", "WORLD_SIZE": "2"})
    assert done.stderr.count("\n") == 1 and "Given: " in done.stderr
    assert done.returncode == 2
