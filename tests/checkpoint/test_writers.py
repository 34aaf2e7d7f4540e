"""Writers of folders: killed at any moment, on full disks, two at once."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise.checkpoint import open_checkpoint
from shardwise.checkpoint.export import export, import_weights
from shardwise.checkpoint.load import load
from shardwise.checkpoint.lock import locked
from shardwise.checkpoint.save import save
from shardwise.comm.world import alone
from shardwise.core.errors import InputError, RunError
from shardwise.engine.state.box import Box
from tests.checkpoint.test_engines import engine_of
from tests.checkpoint.test_folder import die_at


def run_of(folder: Path, value: float, step: int = 7) -> Path:
    """A run with a checkpoint of one weight `w` of this value."""
    save(
        folder / "checkpoints",
        [Box.full("model/w", torch.full((4,), value))],
        {"step": step, "value": value},
        alone(),
    )
    return folder


def weights_of(folder: Path, value: float) -> Path:
    folder.mkdir()
    save_file({"w": torch.full((4,), value)}, folder / "model.safetensors")
    return folder


def value_in(folder: Path) -> float:
    """The value in a folder of weights, or in the newest checkpoint of a run."""
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")["w"][0].item()
    tensor = torch.empty(4)
    load(folder / "checkpoints", [Box.full("model/w", tensor)], alone())
    return tensor[0].item()


def export_over(place: Path) -> tuple[Path, Callable[[], object]]:
    """A folder of weights 1, and what replaces them by those of a run with 2."""
    run, to = run_of(place / "run", 2.0), weights_of(place / "to", 1.0)
    return to, lambda: export(run, to, overwrite=True)


def import_over(place: Path) -> tuple[Path, Callable[[], object]]:
    """A run with two checkpoints of 1, and what replaces them by weights of 2."""
    folder, to = weights_of(place / "weights", 2.0), run_of(place / "to", 1.0)
    run_of(to, 1.0, step=0)
    return to, lambda: import_weights(folder, to, overwrite=True)


BOTH = pytest.mark.parametrize("over", [export_over, import_over])


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.full
@BOTH
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork beside threads: the child is brief
def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path, over: Any):
    """The old weights or the new ones are there, whole; the same command then cleans up."""
    seen: set[float] = set()
    code, count = 9, 0
    while code:
        count += 1
        place = tmp_path / str(count)
        place.mkdir()
        to, act = over(place)
        child = os.fork()
        if child == 0:
            die_at(count, place)
            act()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        seen.add(value_in(to if to.exists() else place / ".replaced-to"))
        act()
        assert value_in(to) == 2.0
        assert not [name for name in names(place) if "/." in f"/{name.replace('.metadata', '')}"]
    assert seen == {1.0, 2.0}
    assert count > 5


@BOTH
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, over: Any):
    """A file that cannot grow is one paragraph; the older folder is unchanged, no half is left."""
    to, act = over(tmp_path)
    before = names(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(RunError, match=r"could not be (saved|written)") as caught:
            act()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == before
    assert value_in(to) == 1.0


@pytest.mark.full
def test_a_disk_that_fills_at_any_write_loses_nothing(tmp_path: Path):
    """A RunError of one paragraph, and the folder as it was; or all was written."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=512k none '{disk}'"
    enter = ["unshare", "-rm", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*enter, mount], check=False).returncode:
        pytest.skip("no mount namespaces here")
    program = f"{mount} && exec '{sys.executable}' -m tests.checkpoint.full_disk '{disk}'"
    done = subprocess.run([*enter, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = [line.split()[1:] for line in done.stdout.splitlines()]
    assert len(outcomes) == 4
    for found in outcomes:
        assert found == sorted(found, reverse=True) and {*found} == {"refused", "done"}, found


@BOTH
def test_a_second_writer_is_refused_by_name(tmp_path: Path, over: Any):
    """While one process writes the folder, another is told which; nothing is changed."""
    to, act = over(tmp_path)
    lock = to / "run.lock" if over is import_over else to.with_name(f".writing-{to.name}.lock")
    with locked(lock):
        before = names(tmp_path)
        message = rf"{to}', where another process is writing \(process {os.getpid()} on"
        with pytest.raises(InputError, match=message):
            act()
        assert names(tmp_path) == before
    act()
    assert value_in(to) == 2.0


def save_again(run: Path, kind: str) -> object:
    """A second save beside the checkpoints of a run: of boxes, of an engine, or an import."""
    if kind == "import":
        return import_weights(weights_of(run.parent / "weights", 3.0), run, overwrite=True)
    if kind == "engine":
        return sw.save(engine_of(alone(), "fp64"), run / "checkpoints", keep=1)
    return run_of(run, 3.0)


@pytest.mark.parametrize(
    ("kind", "lock"),
    [
        ("boxes", "checkpoints/saving.lock"),
        ("engine", "checkpoints/saving.lock"),
        ("engine", "run.lock"),
        ("import", "checkpoints/saving.lock"),
        ("import", "run.lock"),
    ],
)
def test_a_save_beside_another_is_refused(tmp_path: Path, kind: str, lock: str):
    """A save, an import and a run exclude each other; files of the other stay, readers read."""
    run = run_of(tmp_path / "run", 1.0)
    unfinished = run / "checkpoints" / ".saving-step-000007"
    unfinished.mkdir()
    with locked(run / lock):
        before = names(run)
        with pytest.raises(InputError, match=rf"writing \(process {os.getpid()} on .*, since"):
            save_again(run, kind)
        assert names(run) == before
        assert value_in(run) == 1.0


def test_old_checkpoints_that_stay_do_not_fail_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The new checkpoint is saved, and a warning says why the others are still there."""
    run_of(tmp_path, 1.0, step=6)
    run_of(tmp_path, 1.0, step=7)

    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr("shardwise.checkpoint.folder.remove", busy)
    with pytest.warns(UserWarning, match="could not be removed .*busy.*the new one is saved"):
        sw.save(engine_of(alone(), "fp64"), tmp_path / "checkpoints", keep=1)
    assert len(names(tmp_path / "checkpoints")) > 5


@pytest.mark.parametrize("to", [".", "..", "/"])
def test_weights_need_a_folder_with_a_name(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A folder is written beside its place and renamed, which these cannot be."""
    run_of(tmp_path / "run", 1.0)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match=r"which exists\. Allowed: a new folder.*--to /"):
        export(Path("../run"), Path(to), overwrite=True)


def test_export_looks_up_pieces_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The table of pieces is made once, whatever their number: the time is linear in it."""
    boxes = [Box.full(f"model/w{i}", torch.ones(2)) for i in range(40)]
    save(tmp_path / "run", boxes, {"step": 1}, alone())
    tables: list[object] = []
    table = open_checkpoint.pieces_of
    monkeypatch.setattr(open_checkpoint, "pieces_of", lambda *of: tables.append(0) or table(*of))
    assert export(tmp_path / "run", tmp_path / "to").tensors == 40
    assert len(tables) == 1
