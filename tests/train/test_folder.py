"""The run's folder: never written over by accident, and only what a run wrote is removed."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.checkpoint.folder import METADATA, SCALARS
from shardwise.core.errors import InputError
from shardwise.train import config
from shardwise.train import run_folder as folder
from shardwise.train import run_lock as lock
from shardwise.train.prepare import RunStart


def made(path: Path) -> config.Config:
    return config.build({"run": {"folder": str(path)}})


def test_a_new_folder_is_made_with_the_configuration_in_it(tmp_path: Path) -> None:
    """config.toml reads back to what ran."""
    run = made(tmp_path / "new" / "run")
    folder.check(run, resume=False, overwrite=False)
    folder.claim(run, overwrite=False)
    assert config.read(run.folder / "config.toml") == run


def test_a_run_that_is_there_is_refused(tmp_path: Path) -> None:
    """The answer names both ways on."""
    folder.claim(made(tmp_path), overwrite=False)
    with pytest.raises(InputError, match=r"--resume .* --overwrite"):
        folder.check(made(tmp_path), resume=False, overwrite=False)
    folder.check(made(tmp_path), resume=False, overwrite=True)


def test_overwrite_removes_what_a_run_writes_and_nothing_else(tmp_path: Path) -> None:
    """A file of the user's own in the folder stays."""
    folder.claim(made(tmp_path), overwrite=False)
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "plots" / "loss.png").write_bytes(b"")
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").write_text("step-000001")
    mine = ("thesis.txt", "plots/a.png", "checkpoints/mymodel.pt", "checkpoints/step-best")
    for name in mine:
        (tmp_path / name).write_text("mine")
    folder.claim(made(tmp_path), overwrite=True)
    assert files(tmp_path) == sorted([*mine, "config.toml"])


def files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "name", ["report.md", "plots/a.png", "checkpoints/mymodel.pt", "config.toml", "metrics.jsonl"]
)
def test_a_folder_of_somebody_else_is_refused_in_any_case(
    name: str, overwrite: bool, tmp_path: Path
) -> None:
    """Names that a run uses do not make a run of it: refused and untouched."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('[model]\nname = "mine"\n')
    with pytest.raises(InputError, match=r"a folder with other files \(.*\) and no run"):
        folder.check(made(tmp_path), resume=False, overwrite=overwrite)
    assert files(tmp_path) == [name]


@pytest.mark.parametrize("path", ["/", "~", "."])
def test_folders_that_a_run_never_made_are_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root, the home folder, the folder one is in: by the same rule."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "thesis.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(InputError, match="a folder with other files"):
            folder.check(made(Path(path).expanduser()), resume=False, overwrite=overwrite)


def test_tokens_that_are_kept_in_the_runs_folder_are_nobodys(tmp_path: Path) -> None:
    """The ranks look again after the first process has tokenised."""
    key = "0" * 24
    for cache in (tmp_path, tmp_path / "tokens"):
        values = {"run": {"folder": str(tmp_path)}, "data": {"cache": str(cache)}}
        cache.mkdir(exist_ok=True)
        (cache / f"{key}.tokens").write_text("")
        folder.check(config.build(values), resume=False, overwrite=False)
        (cache / f"{key}.tokens").unlink()


def test_looking_makes_no_folder(tmp_path: Path) -> None:
    """A start that is refused later leaves nothing behind."""
    folder.check(made(tmp_path / "new" / "run"), resume=False, overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_step_is_forgotten_and_another_is_kept(tmp_path: Path) -> None:
    """Its folder too, unless somebody has put something there."""
    run = made(tmp_path / "run")
    folder.claim(run, overwrite=False)
    folder.forget(run)
    assert list(tmp_path.iterdir()) == []
    folder.claim(run, overwrite=False)
    (run.folder / "metrics.jsonl").write_text('{"step": 1}')
    folder.forget(run)
    assert files(run.folder) == ["config.toml", "metrics.jsonl"]


@pytest.mark.parametrize("name", ["plots/experts.png", "thesis.txt", ".report.md.1234"])
def test_a_replaced_run_that_ends_before_its_first_step_can_be_started_again(
    name: str, tmp_path: Path
) -> None:
    """A picture of experts, the user's own file, and what a killed process has left."""
    run = made(tmp_path / "run")
    folder.claim(run, overwrite=False)
    (run.folder / name).write_text("")
    folder.claim(run, overwrite=True)
    folder.forget(run)
    folder.check(run, resume=False, overwrite=True)
    assert (run.folder / "thesis.txt").exists() == (name == "thesis.txt") == run.folder.exists()


def test_auto_refuses_a_run_whose_checkpoint_lacks_a_file(tmp_path: Path) -> None:
    """As --resume does: it is not replaced as if nothing had been saved."""
    run = made(tmp_path)
    folder.claim(run, overwrite=False)
    checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "step-000001" / METADATA).unlink()
    start = RunStart(auto=True).resolve_auto(run)
    assert start == RunStart(resume=True)
    with pytest.raises(InputError, match=rf"step-000001 lacks {METADATA}\).*does not replace"):
        folder.check(run, start.resume, start.overwrite)


@pytest.mark.parametrize("start", [RunStart(), RunStart(resume=True), RunStart(overwrite=True)])
def test_a_folder_in_which_a_run_writes_is_refused(start: RunStart, tmp_path: Path) -> None:
    """By name, in any way of starting, until that run ends; then the folder is as it was."""
    run = made(tmp_path / "run")
    who = rf"process {os.getpid()} on {socket.gethostname()}, since \d+"
    with lock.hold(run, RunStart()):
        folder.claim(run, overwrite=False)
        with (
            pytest.raises(InputError, match=rf"another run is writing \({who}"),
            lock.hold(run, start),
        ):
            pass
        assert files(run.folder) == ["config.toml", "run.lock"]
    assert files(run.folder) == ["config.toml"]
    with lock.hold(run, RunStart(overwrite=True)):
        pass


def test_a_killed_run_leaves_no_lock(tmp_path: Path) -> None:
    """The kernel releases it, so a restart gets it; a refused start removes what it made."""
    program = (
        "import os, sys; from shardwise.train import config, run_lock as lock; "
        "from shardwise.train.prepare import RunStart\n"
        "run = config.build({'run': {'folder': sys.argv[1]}})\n"
        "with lock.hold(run, RunStart()): os.kill(os.getpid(), 9)"
    )
    run = made(tmp_path / "a" / "run")
    subprocess.run([sys.executable, "-c", program, str(run.folder)], check=False)
    assert files(run.folder) == ["run.lock"]
    with lock.hold(run, RunStart()):
        pass
    assert files(run.folder) == []
    with pytest.raises(ZeroDivisionError), lock.hold(made(tmp_path / "b" / "run"), RunStart()):
        _ = 1 / 0
    assert not (tmp_path / "b").exists()


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning, and the run goes on."""

    def refuses(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with (
        pytest.warns(UserWarning, match=r"file system without locks \(No locks available\)"),
        lock.hold(made(tmp_path / "run"), RunStart()) as start,
    ):
        assert start == RunStart()


def checkpoint(run: Path) -> None:
    saved = run / "checkpoints" / "step-000001"
    saved.mkdir(parents=True)
    for name in (METADATA, SCALARS):
        (saved / name).write_text("{}")


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    """Without a checkpoint --resume is refused; with one it is not."""
    with pytest.raises(InputError, match="where no checkpoint is"):
        folder.check(made(tmp_path), resume=True, overwrite=False)
    checkpoint(tmp_path)
    folder.check(made(tmp_path), resume=True, overwrite=False)
    with pytest.raises(InputError, match="both --resume and --overwrite"):
        folder.check(made(tmp_path), resume=True, overwrite=True)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A file is in the way, a name is too long: the key is named, and nothing is left behind."""
    (tmp_path / "file").write_text("")
    for name in ("file", "file/run", "a" * 300):
        with pytest.raises(InputError, match=r"run\.folder = .*nothing can be written"):
            folder.check(made(tmp_path / name), resume=False, overwrite=False)
