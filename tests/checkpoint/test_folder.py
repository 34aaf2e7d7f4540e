import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.contents import describe
from shardwise.checkpoint.folder import all_in, find, prune
from shardwise.checkpoint.load import load
from shardwise.checkpoint.save import save
from shardwise.comm.start.launch import spawn
from shardwise.comm.world import alone, init
from shardwise.core.errors import InputError, RunError
from shardwise.engine.state.box import Box


def box(value: float, size: int = 4) -> Box:
    return Box("w", (size,), (0,), (size,), torch.full((size,), value))


def saved(folder: Path, step: int, value: float) -> Path:
    return save(folder, [box(value)], {"step": step, "value": value}, alone())


def loaded(folder: Path) -> tuple[dict[str, Any], Tensor]:
    into = box(-1.0)
    return load(folder, [into], alone()), into.tensor


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_published_under_its_step_and_as_the_latest(tmp_path: Path):
    """Saving leaves the step's folder and `latest`, and nothing else; find gives the newest."""
    assert saved(tmp_path, 100, 1.0) == tmp_path / "step-000100"
    assert saved(tmp_path, 200, 2.0) == tmp_path / "step-000200"
    assert names(tmp_path) == ["latest", "step-000100", "step-000200"]
    assert (tmp_path / "latest").read_text() == "step-000200\n"
    assert find(tmp_path) == tmp_path / "step-000200"
    assert find(tmp_path / "step-000100") == tmp_path / "step-000100"


def test_a_folder_may_be_given_as_text(tmp_path: Path):
    """To all that take one; what is no path at all is refused in the user's words."""
    text = str(tmp_path / "here")
    for step in (100, 200):
        path = save(text, [box(float(step))], {"step": step}, alone())
    assert path == find(text) == describe(text).path == tmp_path / "here" / "step-000200"
    assert prune(text, 1) == [tmp_path / "here" / "step-000100"]
    into = box(-1.0)
    assert load(text, [into], alone()) == {"step": 200}
    assert into.tensor.tolist() == [200.0] * 4
    wrong: Any = 3
    for use in (lambda: load(wrong, [], alone()), lambda: save(wrong, [], {"step": 1}, alone())):
        with pytest.raises(InputError, match=r"folder 3\. Allowed: text or a pathlib\.Path"):
            use()


def test_latest_is_what_was_saved_last_not_what_has_the_largest_step(tmp_path: Path):
    """A run that went back is found where it is, by `latest`."""
    saved(tmp_path, 200, 2.0)
    saved(tmp_path, 100, 1.0)
    assert loaded(tmp_path)[0]["step"] == 100


@pytest.mark.parametrize(
    "pointer", [None, b"step-000300", b"", b"../elsewhere", b"\xff", b"x" * 5000, b"\0"]
)
def test_without_a_good_pointer_the_newest_whole_checkpoint_is_found(
    tmp_path: Path, pointer: bytes | None
):
    """`latest` may be missing or wrong: then the names tell, and halves are passed over."""
    saved(tmp_path, 100, 1.0)
    saved(tmp_path, 200, 2.0)
    (tmp_path / "step-000300").mkdir()
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_bytes(pointer)
    assert find(tmp_path) == tmp_path / "step-000200"


def test_saving_a_step_again_replaces_it(tmp_path: Path):
    """The second checkpoint of a step takes the first one's name."""
    saved(tmp_path, 100, 1.0)
    saved(tmp_path, 100, 2.0)
    assert names(tmp_path) == ["latest", "step-000100"]
    assert loaded(tmp_path)[0]["value"] == 2.0


def test_prune_keeps_the_newest_and_the_latest(tmp_path: Path):
    """Pruning removes the oldest, never what `latest` names, and says what it removed."""
    for step in (300, 400, 500, 100):
        saved(tmp_path, step, 1.0)
    removed = prune(tmp_path, 2)
    assert [path.name for path in removed] == ["step-000300"]
    assert names(tmp_path) == ["latest", "step-000100", "step-000400", "step-000500"]
    with pytest.raises(InputError, match=r"keep=0.*a whole number from 1 up"):
        prune(tmp_path, 0)


@pytest.mark.parametrize("losses", [(2.0, 1.0, 1.5, 3.0), (2.0, 1.0, None, float("inf"))])
def test_prune_keeps_the_best_and_others(tmp_path: Path, losses: tuple[float | None, ...]):
    """The lowest validation loss is kept, of checkpoints that have one, and what is asked for."""
    for step, loss in enumerate(losses, start=1):
        scalars = {"step": step} if loss is None else {"step": step, "validation": loss}
        save(tmp_path, [box(1.0)], scalars, alone())
    assert folders.best_in(tmp_path) == tmp_path / "step-000002"
    prune(tmp_path, 1, best=True, also=[tmp_path / "step-000003"])
    assert names(tmp_path) == ["latest", *(f"step-00000{step}" for step in (2, 3, 4))]
    prune(tmp_path, 1, best=True)
    assert names(tmp_path) == ["latest", "step-000002", "step-000004"]
    prune(tmp_path, 1)
    assert folders.best_in(tmp_path) is None or losses[-1] == 3.0


def die_at(count: int, folder: Path) -> None:
    """Leave the process, as if the power failed, at the count-th act on the folder."""
    acts = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
    seen = [0]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in acts and (str(folder) in str(args[0]) or isinstance(args[0], int)):
            seen[0] += 1
            if seen[0] == count:
                os._exit(9)

    sys.addaudithook(watch)


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork beside threads: the child is brief
@pytest.mark.parametrize("step", [200, 100])
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, step: int):
    """Wherever saving is cut short, the old state or the new is found, and can be saved upon."""
    seen: set[float] = set()
    for count in range(1, 200):
        folder = tmp_path / str(count)
        saved(folder, 100, 1.0)
        child = os.fork()
        if child == 0:
            die_at(count, folder)
            saved(folder, step, 2.0)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        scalars, tensor = loaded(folder)
        seen.add(scalars["value"])
        assert tensor.eq(scalars["value"]).all()
        saved(folder, 300, 3.0)
        assert loaded(folder)[0]["value"] == 3.0
        assert not list(folder.glob(".[rs]*")) and not list(folder.glob("*.again"))
        if code == 0:
            break
        assert code == 9
    assert code == 0 and seen == {1.0, 2.0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_crash_while_pruning_leaves_no_half_checkpoint(tmp_path: Path):
    """What pruning was stopped in removing is never taken for a checkpoint."""
    for count in range(1, 50):
        folder = tmp_path / str(count)
        for step in (100, 200):
            saved(folder, step, float(step))
        child = os.fork()
        if child == 0:
            die_at(count, folder)
            prune(folder, 1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for path in all_in(folder):
            assert loaded(path)[1].eq(int(path.name[-3:])).all()
        if code == 0:
            break
    assert code == 0 and count > 3


def no_space(path: Path, *args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def save_where_one_cannot(folder: Path) -> str:
    world = init()
    half = Box("w", (8,), (4 * world.rank,), (4,), torch.ones(4))
    save(folder, [half], {"step": 1}, world)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(Path, "open", no_space)
        try:
            save(folder, [half], {"step": 2}, world)
        except RunError as error:
            return str(error)
    return "saved"


def test_a_save_that_fails_on_one_rank_fails_on_all(tmp_path: Path):
    """When one rank cannot write, every rank raises its error; the checkpoint of before stays."""
    said = spawn(save_where_one_cannot, 2, (tmp_path,))
    assert said[0] == said[1]
    assert "step 2 could not be saved" in said[0]
    assert "on rank 1, OSError: [Errno 28] No space left on device" in said[0]
    assert find(tmp_path) == tmp_path / "step-000001"
    assert names(tmp_path) == ["latest", "step-000001"]  # nor does the other fill the disk


def test_a_folder_that_cannot_be_written_is_a_run_error(tmp_path: Path):
    """Saving below something that is no folder fails with a RunError that names it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"step 1 could not be saved in .*file"):
        saved(tmp_path / "file", 1, 1.0)


def test_a_file_that_cannot_grow_is_told_in_plain_words(tmp_path: Path):
    """A write that fails inside torch's C++ is answered with the system's reason alone."""
    saved(tmp_path, 1, 1.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (2**16, limits[1])
    )  # as a quota would, or a full disk
    try:
        with pytest.raises(RunError) as caught:
            save(tmp_path, [box(1.0, 2**16)], {"step": 2}, alone())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = str(caught.value)
    assert said.endswith("on rank 0, OSError: [Errno 27] File too large")
    assert "enforce" not in said and ".cc" not in said
    assert names(tmp_path) == ["latest", "step-000001"]


def test_names_sort_as_steps_do():
    """Checkpoint names have six digits, so that a listing has them in order."""
    steps = [1, 20, 999, 100000]
    assert sorted(map(folders.name_of, reversed(steps))) == list(map(folders.name_of, steps))
