"""Writers of folders: killed at any moment, on full disks, two at once."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise.checkpoint.export import export, import_weights
from shardwise.checkpoint.folder import all_in, prune
from shardwise.checkpoint.load import load
from shardwise.checkpoint.lock import locked
from shardwise.checkpoint.save import save
from shardwise.comm.world import alone
from shardwise.core.errors import InputError, RunError
from shardwise.engine.state.box import Box
from tests.checkpoint.support import dies, engine_of, files
from tests.engine.cases import fails


def run_of(folder: Path, value: float, step: int = 7) -> Path:
    """A run with a checkpoint of one weight `w` of this value."""
    weight = Box.full("model/w", torch.full((4,), value))
    save(folder / "checkpoints", [weight], {"step": step}, alone())
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


Writer = Callable[[Path], tuple[Path, Callable[[], object]]]


def export_over(place: Path) -> tuple[Path, Callable[[], object]]:
    """A folder of weights 1, and what replaces them by those of a run with 2."""
    run, to = run_of(place / "run", 2.0), weights_of(place / "to", 1.0)
    return to, lambda: export(run, to, overwrite=True)


def import_over(place: Path) -> tuple[Path, Callable[[], object]]:
    """A run with two checkpoints of 1, and what replaces them by weights of 2."""
    folder, to = weights_of(place / "weights", 2.0), run_of(place / "to", 1.0)
    run_of(to, 1.0, step=0)
    return to, lambda: import_weights(folder, to, overwrite=True)


def save_over(place: Path) -> tuple[Path, Callable[[], object]]:
    """A run with a checkpoint of 1, and the save of the same step again, of 2."""
    to = run_of(place / "to", 1.0)
    return to, lambda: run_of(to, 2.0)


def save_beside(place: Path) -> tuple[Path, Callable[[], object]]:
    """As `save_over`, of a later step."""
    to = run_of(place / "to", 1.0)
    return to, lambda: run_of(to, 2.0, step=8)


WRITERS = (save_beside, save_over, export_over, import_over)


@pytest.mark.full
@pytest.mark.cases(1)
@pytest.mark.parametrize("over", WRITERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork beside threads: the child is brief
def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path, over: Writer):
    """The old weights or the new ones are there, whole; the same command then cleans up."""
    seen: set[float] = set()
    count, killed = 0, True
    while killed:
        count += 1
        place = tmp_path / str(count)
        place.mkdir()
        to, act = over(place)
        killed = dies(act, count, place)
        seen.add(value_in(to if to.exists() else place / ".replaced-to"))
        act()
        assert value_in(to) == 2.0
        left = [name.replace(".metadata", "") for name in files(place)]
        assert not [name for name in left if "/." in f"/{name}" or name.endswith(".before")]
    assert seen == {1.0, 2.0}
    assert count > 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_crash_while_pruning_leaves_no_half_checkpoint(tmp_path: Path):
    """What pruning was stopped in removing is never taken for a checkpoint."""
    count, killed = 0, True
    while killed:
        count += 1
        folder = run_of(run_of(tmp_path / str(count), 1.0, 1), 2.0, 2) / "checkpoints"
        killed = dies(lambda at=folder: prune(at, 1), count, folder)
        for path in all_in(folder):
            tensor = torch.empty(4)
            load(path, [Box.full("model/w", tensor)], alone())
            assert tensor.eq(int(path.name[-1])).all()
    assert count > 3


@pytest.mark.parametrize("over", WRITERS)
def test_a_file_that_cannot_grow_leaves_what_was_there(tmp_path: Path, over: Writer):
    """As of a quota: one paragraph with the system's reason; no half of anything is left."""
    to, act = over(tmp_path)
    before = files(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(RunError, match=r"could not be (saved|written)") as caught:
            act()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = str(caught.value)
    assert "File too large" in said and "\n" not in said
    assert "enforce" not in said and ".cc" not in said
    assert files(tmp_path) == before
    assert value_in(to) == 1.0


@pytest.mark.parametrize("over", [export_over, import_over])
def test_a_second_writer_is_refused_by_name(tmp_path: Path, over: Writer):
    """The error of a second process names the one that writes, and no file changes."""
    to, act = over(tmp_path)
    lock = to / "run.lock" if over is import_over else to.with_name(f".writing-{to.name}.lock")
    with locked(lock):
        before = files(tmp_path)
        message = rf"{to}', where another process is writing \(process {os.getpid()} on"
        with pytest.raises(InputError, match=message):
            act()
        assert files(tmp_path) == before
    act()
    assert value_in(to) == 2.0


@pytest.mark.parametrize(
    ("kind", "lock"),
    [
        *((kind, "checkpoints/saving.lock") for kind in ("boxes", "engine", "import")),
        *((kind, "run.lock") for kind in ("engine", "import")),
    ],
)
def test_a_save_beside_another_is_refused(tmp_path: Path, kind: str, lock: str):
    """A save, an import and a run exclude each other; files of the other stay, readers read."""
    run, weights = run_of(tmp_path / "run", 1.0), weights_of(tmp_path / "weights", 3.0)
    acts: dict[str, Callable[[], object]] = {
        "boxes": lambda: run_of(run, 3.0),
        "engine": lambda: sw.save(engine_of(alone(), "fp64"), run / "checkpoints", keep=1),
        "import": lambda: import_weights(weights, run, overwrite=True),
    }
    (run / "checkpoints" / ".saving-step-000007").mkdir()
    with locked(run / lock):
        before = files(run)
        with pytest.raises(InputError, match=rf"writing \(process {os.getpid()} on .*, since"):
            acts[kind]()
        assert files(run) == before
        assert value_in(run) == 1.0


def test_old_checkpoints_that_stay_do_not_fail_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The new checkpoint is saved, and a warning says why the others are still there."""
    run_of(run_of(tmp_path, 1.0, step=6), 1.0, step=7)
    monkeypatch.setattr("shardwise.checkpoint.folder.remove", fails(errno.EBUSY))
    with pytest.warns(UserWarning, match="could not be removed .*busy.*the new one is saved"):
        sw.save(engine_of(alone(), "fp64"), tmp_path / "checkpoints", keep=1)
    assert len(all_in(tmp_path / "checkpoints")) == 3
