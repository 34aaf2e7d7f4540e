"""Checkpoints of a run: beside its steps, the best of them, and their copies in a second folder."""

import io
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardwise.checkpoint.contents import describe
from shardwise.checkpoint.folder import all_in, best_in
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.train import config, loop
from shardwise.train.measure.metrics import read
from shardwise.train.prepare import RunStart, prepare
from tests.checkpoint.test_async_save import refuse, writing
from tests.pool import run_gloo
from tests.train import runs


def names(folder: Path) -> list[str]:
    return [path.name for path in all_in(folder)]


def shown(world: World, given: config.Config, start: RunStart | None = None) -> str:
    """Train; what is shown. No thread outlives the run."""
    out = io.StringIO()
    found = loop.train(given, world, start, Console(file=out, width=300))
    assert (found is None) == (world.rank > 0)
    assert not [each for each in threading.enumerate() if each.name.startswith("shardwise-")]
    return out.getvalue()


def failing(world: World, given: config.Config) -> str:
    """Train, with a disk that is full for rank 1 at step 4; what is shown."""
    with writing(lambda save: refuse(1, save) if save.step == 4 else None):
        return shown(world, given)


@pytest.mark.parametrize("plan", ["dp2 zero3 fp64", "pp2 1f1b:2 fp64"])
def test_a_run_saves_beside_its_steps(tmp_path: Path, plan: str) -> None:
    """The curve, the checkpoints and their tensors are those of a run that saves synchronously."""
    sync = runs.settings(tmp_path / "sync", plan, keep=9)
    given = runs.settings(tmp_path / "async", plan, keep=9, async_save=True)
    assert runs.run(given, 2)[-1].loss == runs.run(sync, 2)[-1].loss
    places = [each.folder / "checkpoints" for each in (sync, given)]
    assert names(places[0]) == names(places[1]) == [f"step-00000{n}" for n in (2, 4, 6, 7)]
    for one, other in zip(*map(all_in, places), strict=True):
        assert describe(one, deep=True).tensors == describe(other, deep=True).tensors
        assert describe(one).scalars == describe(other).scalars
    report = (given.folder / "report.md").read_text()
    assert "4 saved, which held the steps for" in report and "written beside them in" in report
    assert "written beside" not in (sync.folder / "report.md").read_text()


@pytest.mark.parametrize("beside", [True, False])
def test_a_checkpoint_that_is_lost_ends_no_run(beside: bool, tmp_path: Path) -> None:
    """A line names the rank and the folder; the run goes on, and later ones are whole."""
    given = runs.settings(tmp_path / "run", "dp2 zero3 fp64", keep=9, async_save=beside)
    first, _ = run_gloo(2, failing, given)
    folder = given.folder / "checkpoints"
    said = f"The checkpoint of step 4 could not be saved in '{folder}': on rank 1, OSError"
    assert first.count(said) == 1 and first.count("Training goes on without this checkpoint") == 1
    assert names(folder) == ["step-000002", "step-000006", "step-000007"]
    assert "3 saved" in (given.folder / "report.md").read_text()


def test_a_run_keeps_the_best_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one with the lowest validation loss stays beside the newest; each save has a loss."""
    losses = iter([3.0, 1.0, 2.0, 4.0, 5.0])
    monkeypatch.setattr(loop, "evaluate", lambda _: next(losses))
    given = runs.settings(tmp_path / "run", keep=1, keep_best=True, eval_every=0)
    said = shown(alone(), given)
    assert names(given.folder / "checkpoints") == ["step-000004", "step-000007"]
    assert best_in(given.folder / "checkpoints") == given.folder / "checkpoints" / "step-000004"
    assert "step-000004, by the validation loss" in said
    assert [r.validation for r in read(given.folder)] == [None, 3.0, None, 1.0, None, 2.0, 4.0]


@pytest.mark.parametrize("async_save", [False, True])
def test_a_run_goes_on_from_its_mirror(tmp_path: Path, async_save: bool) -> None:
    """After the local disk is lost, as if it were not; the mirror keeps as many checkpoints."""
    mirror = tmp_path / "shared" / "run"
    straight = runs.run(runs.settings(tmp_path / "straight", decay="constant"))
    options: dict[str, Any] = {
        "mirror": str(mirror),
        "async_save": async_save,
        "decay": "constant",
    }
    given = runs.settings(tmp_path / "run", **options)
    stopped = runs.run(runs.settings(tmp_path / "run", **dict[str, Any](options, steps=5)))
    assert names(mirror)[-1] == "step-000005" and not [*mirror.glob(".*")]
    assert (mirror / "latest").read_text() == "step-000005\n"
    assert describe(mirror, deep=True) == describe(mirror / "step-000005")
    shutil.rmtree(given.folder)
    with pytest.raises(InputError, match=r"train\.mirror = .*where checkpoints of a run are"):
        prepare(given, 1, RunStart())
    assert RunStart(auto=True).resolve_auto(given) == RunStart(resume=True)
    found = runs.run(given, start=RunStart(resume=True))
    assert [(r.step, r.loss) for r in found] == [(r.step, r.loss) for r in straight[5:]]
    assert len(stopped) == 5 and names(mirror)[-1] == "step-000007"
    again = runs.settings(tmp_path / "run", **dict[str, Any](options, steps=2, save_every=0))
    runs.run(again, start=RunStart(overwrite=True))
    assert names(mirror) == names(given.folder / "checkpoints") == ["step-000002"]


def test_a_copy_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line names the folder, and the mirror has no half of it; the next copy is whole."""
    copy, mirror = shutil.copyfile, tmp_path / "mirror"

    def full(source: Path, to: Path) -> object:
        if source.parent.name == "step-000002" and source.name.endswith(".distcp"):
            to.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return copy(source, to)

    monkeypatch.setattr("shardwise.train.mirror.shutil.copyfile", full)
    given = runs.settings(tmp_path / "run", mirror=str(mirror), steps=3)
    said = shown(alone(), given)
    assert said.count(f"step-000002 could not be copied to '{mirror}'") == 1
    assert names(mirror) == ["step-000003"] and not [*mirror.glob(".*")]
    assert names(given.folder / "checkpoints") == ["step-000002", "step-000003"]


@pytest.mark.parametrize(
    ("plan", "train", "text"),
    [
        ("offload:optim@disk", {"async_save": True}, r"async_save = true under .* on a disk"),
        ("fp64", {"mirror": "run/checkpoints"}, "the run or of its own checkpoints"),
        ("fp64", {"mirror": "run"}, "the run or of its own checkpoints"),
    ],
)
def test_what_cannot_be_saved_so_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, train: dict[str, Any], text: str
) -> None:
    """Before the run starts, with what to write instead."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=text):
        prepare(runs.settings(tmp_path / "run", plan, **train), 1, RunStart())
