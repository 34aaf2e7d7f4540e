"""The run's folder: never written over by accident, and only what a run wrote is removed."""

from pathlib import Path

import pytest

from shardwise.checkpoint.folder import METADATA, SCALARS
from shardwise.core.errors import InputError
from shardwise.train import config, folder


def made(path: Path) -> config.Config:
    return config.build({"run": {"folder": str(path)}})


def test_a_new_folder_is_made_with_the_configuration_in_it(tmp_path: Path) -> None:
    """config.toml reads back to what ran."""
    run = made(tmp_path / "new" / "run")
    folder.check(run.folder, resume=False, overwrite=False)
    folder.claim(run, overwrite=False)
    assert config.read(run.folder / "config.toml") == run


def test_a_run_that_is_there_is_refused(tmp_path: Path) -> None:
    """The answer names both ways on."""
    folder.claim(made(tmp_path), overwrite=False)
    with pytest.raises(InputError, match=r"--resume .* --overwrite"):
        folder.check(tmp_path, resume=False, overwrite=False)
    folder.check(tmp_path, resume=False, overwrite=True)


def test_overwrite_removes_what_a_run_writes_and_nothing_else(tmp_path: Path) -> None:
    """A file of the user's own in the folder stays."""
    folder.claim(made(tmp_path), overwrite=False)
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "thesis.txt").write_text("mine")
    folder.claim(made(tmp_path), overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.toml",
        "plots",
        "thesis.txt",
    ]


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    """Without a checkpoint --resume is refused; with one it is not."""
    with pytest.raises(InputError, match="where no checkpoint is"):
        folder.check(tmp_path, resume=True, overwrite=False)
    saved = tmp_path / "checkpoints" / "step-000001"
    saved.mkdir(parents=True)
    for name in (METADATA, SCALARS):
        (saved / name).write_text("{}")
    folder.check(tmp_path, resume=True, overwrite=False)
    with pytest.raises(InputError, match="both --resume and --overwrite"):
        folder.check(tmp_path, resume=True, overwrite=True)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A file is in the way, a name is too long: the key is named, and nothing is left behind."""
    (tmp_path / "file").write_text("")
    for name in ("file", "file/run", "a" * 300):
        with pytest.raises(InputError, match=r"run\.folder = .*nothing can be written"):
            folder.check(tmp_path / name, resume=False, overwrite=False)
