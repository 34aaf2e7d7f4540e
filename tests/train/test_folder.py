"""The run's folder: what is in it, never written over by accident; its records and checkpoints."""

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.callbacks import Callbacks
from shardwise.checkpoint.folder import METADATA, all_in, best_in
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.train import config, loop, metrics, run_folder
from shardwise.train.metrics import Record
from shardwise.train.prepare import RunStart, hold_folder, prepare
from tests.checkpoint.support import names, refuse, writing
from tests.engine.cases import fails
from tests.pool import run_gloo
from tests.train import runs
from tests.train.test_report import ONE


def made(path: Path) -> config.Config:
    return config.build({"run": {"folder": str(path)}})


def check(path: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    run_folder.check(made(path), resume=resume, overwrite=overwrite)


def files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


# --- the folder ---------------------------------------------------------------------------------


def test_a_new_folder_is_made_with_the_configuration_in_it(tmp_path: Path) -> None:
    """Looking makes none.  config.toml reads back; a recorded step is refused with both ways on."""
    run = made(tmp_path / "new" / "run")
    check(run.folder)
    assert list(tmp_path.iterdir()) == []
    run_folder.claim(run, overwrite=False)
    assert config.read(run.folder / "config.toml") == run
    check(run.folder)
    (run.folder / "metrics.jsonl").write_text("{}")
    with pytest.raises(InputError, match=r"--resume .* --overwrite"):
        check(run.folder)
    check(run.folder, overwrite=True)


def test_overwrite_puts_aside_what_has_saved(tmp_path: Path) -> None:
    """All of it in NAME.old, a second time in NAME.old2; tokens and the lock stay."""
    run = made(tmp_path / "run")
    values = {"run": {"folder": str(run.folder)}, "data": {"cache": str(run.folder / "tokens")}}
    for number in (1, 2):
        run_folder.claim(config.build(values), overwrite=True)
        (run.folder / "metrics.jsonl").write_text(f"{number}")
        (run.folder / "checkpoints" / "step-000001").mkdir(parents=True)
        for name in ("mine.txt", "run.lock", "checkpoints/mymodel.pt", "tokens"):
            (run.folder / name).write_text("")
    run_folder.claim(config.build(values), overwrite=True)
    assert files(run.folder) == [".shardwise-run", "config.toml", "run.lock", "tokens"]
    for number, aside in ((1, "run.old"), (2, "run.old2")):
        assert (tmp_path / aside / "metrics.jsonl").read_text() == f"{number}"
        assert {"mine.txt", "checkpoints/mymodel.pt"} <= {*files(tmp_path / aside)}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "name", ["report.md", "plots/a.png", "checkpoints/mymodel.pt", "config.toml", "metrics.jsonl"]
)
def test_a_folder_of_somebody_else_is_refused_in_any_case(
    name: str, overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Names that a run uses do not make a run of it: refused and untouched, as the root is."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('[model]\nname = "mine"\n')
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, Path(), Path("/")):
        with pytest.raises(InputError, match=r"a folder with other files \(.*\) and no run"):
            check(path, overwrite=overwrite)
    with pytest.raises(InputError, match="a folder with other files"):
        settled(made(tmp_path))
    assert files(tmp_path) == [name]


def test_tokens_that_are_kept_in_the_runs_folder_are_nobodys(tmp_path: Path):
    """The ranks look again after the first process has tokenised."""
    for cache in (tmp_path, tmp_path / "tokens"):
        values = {"run": {"folder": str(tmp_path)}, "data": {"cache": str(cache)}}
        cache.mkdir(exist_ok=True)
        tokens = cache / f"{'0' * 24}.tokens"
        tokens.write_text("")
        run_folder.check(config.build(values), resume=False, overwrite=False)
        tokens.unlink()


def settled(given: config.Config) -> RunStart:
    """What `--resume auto` comes to, after the checks of any start."""
    start = RunStart(auto=True).resolve_auto(given)
    run_folder.check(given, start.resume, start.overwrite)
    return start


def test_auto_begins_continues_or_begins_again(tmp_path: Path):
    """No run; a run that saved nothing; a run with a checkpoint, finished or not."""
    given = runs.settings(tmp_path / "run", steps=2)
    assert settled(given) == RunStart()
    run_folder.claim(given, overwrite=False)
    assert settled(given) == RunStart(overwrite=True)
    with pytest.raises(InputError, match="where no checkpoint is"):
        check(given.folder, resume=True)
    first = runs.run(given, start=RunStart(auto=True))
    assert settled(given) == RunStart(resume=True)
    again = runs.run(runs.changed(given, "train", steps=4), start=RunStart(auto=True))
    assert [r.loss for r in again[:2]] == [r.loss for r in first] and len(again) == 4
    both = RunStart(overwrite=True, auto=True).resolve_auto(given)
    with pytest.raises(InputError, match="both --resume and --overwrite"):
        prepare(given, 1, both)
    for path in all_in(given.folder / "checkpoints"):
        (path / METADATA).unlink()
    with pytest.raises(InputError, match=rf"complete \(step-000004 lacks {METADATA}"):
        settled(given)


@pytest.mark.parametrize("start", [RunStart(), RunStart(resume=True), RunStart(overwrite=True)])
def test_a_folder_in_which_a_run_writes_is_refused(start: RunStart, tmp_path: Path):
    """By name, in any way of starting, until that run ends; then the folder is as it was."""
    run = made(tmp_path / "run")
    who = rf"process {os.getpid()} on {socket.gethostname()}, since \d+"
    with hold_folder(run, RunStart()):
        run_folder.claim(run, overwrite=False)
        with (
            pytest.raises(InputError, match=rf"another process is writing \({who}"),
            hold_folder(run, start),
        ):
            pass
        assert files(run.folder) == [".shardwise-run", "config.toml", "run.lock"]
    assert files(run.folder) == [".shardwise-run", "config.toml"]
    with hold_folder(run, RunStart(overwrite=True)):
        pass


def test_a_killed_run_leaves_no_lock(tmp_path: Path):
    """The kernel releases it, so a restart gets it; a refused start removes what it made."""
    program = (
        "import os, sys; from shardwise.train import config; "
        "from shardwise.train.prepare import RunStart, hold_folder\n"
        "run = config.build({'run': {'folder': sys.argv[1]}})\n"
        "with hold_folder(run, RunStart()): os.kill(os.getpid(), 9)"
    )
    run = made(tmp_path / "a" / "run")
    subprocess.run([sys.executable, "-c", program, str(run.folder)], check=False)
    assert files(run.folder) == ["run.lock"]
    with hold_folder(run, RunStart()):
        pass
    assert files(run.folder) == []
    with pytest.raises(ZeroDivisionError), hold_folder(made(tmp_path / "b" / "run"), RunStart()):
        _ = 1 / 0
    assert not (tmp_path / "b").exists()


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A warning, and the run goes on."""
    monkeypatch.setattr(fcntl, "flock", fails(errno.ENOLCK))
    with (
        pytest.warns(UserWarning, match=r"file system without locks \(No locks available\)"),
        hold_folder(made(tmp_path / "run"), RunStart()) as start,
    ):
        assert start == RunStart()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path):
    """A file is in the way, a name is too long: the key is named, and nothing is left behind."""
    (tmp_path / "file").write_text("")
    for name in ("file", "file/run", "a" * 300):
        with pytest.raises(InputError, match=r"run\.folder = .*nothing can be written"):
            check(tmp_path / name)


# --- records ------------------------------------------------------------------------------------


def write(folder: Path, first: int, last: int) -> None:
    with metrics.writer(folder, first - 1) as file:
        kept = metrics.MetricsWriter(file, Callbacks([]))
        for step in range(first, last + 1):
            kept.write(replace(ONE, step=step, consumed=8 * step))


def steps_in(folder: Path) -> list[int]:
    return [record.step for record in metrics.read(folder)]


def test_a_resumed_run_drops_what_came_after_the_checkpoint(tmp_path: Path):
    """Each step once, also after a crash in the middle of a line, which costs that line only."""
    write(tmp_path, 1, 5)
    write(tmp_path, 4, 7)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    path = tmp_path / metrics.FILE
    path.write_text(path.read_text()[:-20])
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]
    write(tmp_path, 7, 8)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    evaluated = replace(ONE, validation=3.25, memory_bytes={"parameters": 12})
    path.write_text(f"{ONE.line()}\n{evaluated.line()}\n")
    assert metrics.read(tmp_path) == [ONE, evaluated]
    assert "validation" not in ONE.line()


def test_lines_that_are_no_records_are_kept(tmp_path: Path):
    """Of another version, damaged, not UTF-8: a resumed run removes only later steps."""
    lines = [replace(ONE, step=step).line().encode() for step in range(1, 6)]
    lines[1] = lines[1].replace(b"{", b'{"later": 1, ', 1)
    other = [b"\xff\xfe", b'{"step": "3"}', b"[" * 10**5, lines[3][:20], b""]
    text = b"\n".join([*lines[:3], *other, *lines[3:], b""])
    (tmp_path / metrics.FILE).write_bytes(text)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]
    metrics.keep_until(tmp_path, 5)
    assert (tmp_path / metrics.FILE).read_bytes() == text
    metrics.keep_until(tmp_path, 3)
    assert (tmp_path / metrics.FILE).read_bytes() == b"\n".join([*lines[:3], *other, b""])


def test_a_full_disk_loses_records_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is said once; records are written again when there is room."""
    with metrics.writer(tmp_path, 0) as file:
        kept = metrics.MetricsWriter(file, Callbacks([]))
        with monkeypatch.context() as patch:
            patch.setattr(Record, "line", runs.full_disk)
            kept.write(ONE)
            said = kept.take_unwritten()
            kept.write(replace(ONE, step=2))
        assert "step 1 could not be recorded" in said and "No space left on device" in said
        assert kept.take_unwritten() == kept.failure == ""
        kept.write(replace(ONE, step=3))
    assert steps_in(tmp_path) == [3]


@pytest.mark.parametrize("what", ["renamed", "removed", "replaced"])
def test_a_folder_that_is_gone_ends_the_run(what: str, tmp_path: Path):
    """Or the run would write its records into one folder and its checkpoints into another."""
    folder = tmp_path / "run"
    folder.mkdir()
    with metrics.writer(folder, 0) as file:
        kept = metrics.MetricsWriter(file, Callbacks([]))
        kept.write(ONE)
        folder.rename(tmp_path / "other") if what != "removed" else shutil.rmtree(folder)
        if what == "replaced":
            folder.mkdir()
            (folder / metrics.FILE).touch()
        kept.write(replace(ONE, step=2))
    assert "was renamed or removed" in kept.failure and "--resume" in kept.failure


# --- checkpoints --------------------------------------------------------------------------------


def shown(world: World, given: config.Config) -> str:
    """Train; what is shown. No thread outlives the run."""
    before = {*threading.enumerate()}
    text = runs.shown(world, given)
    begun = {*threading.enumerate()} - before
    assert not [each for each in begun if each.name.startswith("shardwise-")]
    return text


def failing(world: World, given: config.Config) -> str:
    """Train, with a disk that is full for rank 1 at step 4; what is shown."""
    with writing(lambda save: refuse(1, save) if save.step == 4 else None):
        return shown(world, given)


@pytest.mark.parametrize("beside", [True, False])
def test_a_checkpoint_that_is_lost_ends_no_run(beside: bool, tmp_path: Path):
    """A line names the rank and the folder; the run goes on, and later ones are whole."""
    given = runs.settings(tmp_path / "run", "dp2 zero3 fp64", keep=9, async_save=beside)
    first, _ = run_gloo(2, failing, given)
    folder = given.folder / "checkpoints"
    said = f"The checkpoint of step 4 could not be saved in '{folder}': on rank 1, OSError"
    assert first.count(said) == 1 and first.count("Training goes on without this checkpoint") == 1
    assert names(folder) == ["step-000002", "step-000006", "step-000007"]
    report = (given.folder / "report.md").read_text()
    assert "3 saved, which held the steps for" in report
    assert ("written beside them in" in report) == beside


def test_a_run_keeps_the_best_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The one with the lowest validation loss stays beside the newest; each save has a loss."""
    losses = iter([3.0, 1.0, 2.0, 4.0, 5.0])
    monkeypatch.setattr(loop, "evaluate", lambda _: next(losses))
    given = runs.settings(tmp_path / "run", keep=1, keep_best=True, eval_every=0)
    said = shown(alone(), given)
    assert names(given.folder / "checkpoints") == ["step-000004", "step-000007"]
    assert best_in(given.folder / "checkpoints") == given.folder / "checkpoints" / "step-000004"
    assert "step-000004, by the validation loss" in said
    found = [record.validation for record in metrics.read(given.folder)]
    assert found == [None, 3.0, None, 1.0, None, 2.0, 4.0]
