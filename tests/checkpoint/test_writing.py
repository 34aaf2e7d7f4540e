"""Saves beside the next steps; writers of folders: killed, on full disks, two at once."""

import errno
import gc
import os
import resource
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import shardwise as sw
from shardwise.checkpoint import pending
from shardwise.checkpoint.export import export, import_weights
from shardwise.checkpoint.folder import all_in, find, prune
from shardwise.checkpoint.load import load
from shardwise.checkpoint.lock import locked
from shardwise.checkpoint.open_checkpoint import describe, read_manifest
from shardwise.checkpoint.save import PlannedSave, save
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError, RunError
from shardwise.engine.state.box import Box
from tests.checkpoint.support import (
    chain,
    dies,
    engine_of,
    files,
    limited,
    names,
    refuse,
    rows,
    steps,
    writing,
)
from tests.engine.cases import fails
from tests.pool import run_gloo, run_threads
from tests.programs import run_program, until


def trained(world: World, plan: str) -> tuple[Any, dict[str, Any], Callable[[int], object]]:
    """A model under a plan, what else `save` needs, and a step; "fsdp" is a loop of its own."""
    if plan != "fsdp":
        table = {"0": "colwise", "2": "rowwise"} if "tp" in plan else None
        engine = engine_of(world, plan, table=table)
        return engine, {}, lambda number: steps(engine, number, 1)
    model = sw.FSDP(chain(), world=world)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(rows(number)).square().mean().backward()
        optimizer.step()

    return model, {"optimizer": optimizer, "step": 2}, step


def weights(model: Any) -> dict[str, Tensor]:
    return {name: x for name, x in sw.full_state_dict(model).items() if isinstance(x, Tensor)}


def saved_both_ways(world: World, folder: str, plan: str) -> set[str]:
    """Checkpoints of step 2, `async` two steps later; names of weights that changed meanwhile."""
    model, options, step = trained(world, plan)
    for number in range(2):
        step(number)
    sw.save(model, f"{folder}/save", {"epoch": 1}, **options)
    before, extra = weights(model), {"epoch": 1}
    handle = sw.async_save(model, f"{folder}/async", extra, **options)
    extra["epoch"] = 9
    for number in range(2, 4):
        step(number)
    after = weights(model)
    assert not handle.done() and not all_in(Path(folder, "async"))
    world.barrier()
    Path(folder, "go").touch()
    assert handle.result() == handle.result() == Path(folder, "async", "step-000002")
    assert handle.done() and not handle.world.background.jobs
    return {name for name, x in before.items() if not torch.equal(x, after[name])}


def sealed(path: Path) -> dict[str, Any]:
    files = read_manifest(path).files
    return {name: seal for name, seal in files.items() if name.endswith(".distcp")}


def assert_same(folder: Path, found: list[set[str]]) -> None:
    """The asynchronous checkpoint is the synchronous one, and the weights have changed since."""
    assert any(found)
    one, other = folder / "save" / "step-000002", folder / "async" / "step-000002"
    assert sealed(one) == sealed(other)
    assert describe(one, deep=True)["tensors"] == describe(other, deep=True)["tensors"]
    assert describe(one)["scalars"] == describe(other)["scalars"]
    assert names(folder / "async") == ["step-000002"]
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    assert not [*(folder / "async").glob(".saving*")]


@pytest.mark.parametrize(
    "plan",
    [
        *("dp2 zero3 fp64", "fsdp", "dp2 zero1 bf16", "tp2 fp32", "dp2 zero2 fp16"),
        *("pp2 1f1b:2 fp64", "pp2 pipedream:4 fp64", "pp2 2bw:4 fp64", "dp2 zero2 offload:optim"),
        *("dp1 offload:optim-delayed=1 fp64", "dp2 zero3 offload:param fp64"),
    ],
)
def test_the_checkpoint_is_that_of_its_moment(tmp_path: Path, plan: str):
    """The files are those of `save` at that step, bit for bit, and no memory is left."""
    size = 2 if plan == "fsdp" else sw.Plan.parse(plan).size
    storages: list[Any] = []

    def wait(save: PlannedSave) -> None:
        if save.folder.name == "async":
            pieces = save.planner.tensors.values()
            storages.extend(StorageWeakRef(piece.untyped_storage()) for piece in pieces)
            until((tmp_path / "go").exists)

    with writing(wait):
        assert_same(tmp_path, run_threads(size, saved_both_ways, str(tmp_path), plan))
    gc.collect()
    assert storages and all(storage.expired() for storage in storages)


def failing(world: World, folder: str, rank: int, silent: bool) -> list[list[str]]:
    """What `result`, or else the next step and the next save, say of a failed write on `rank`."""
    engine = engine_of(world, "dp2 zero3 fp64")
    steps(engine, 0, 1)
    sw.save(engine, folder)

    def begin() -> Any:
        steps(engine, engine.steps, 1)
        with pytest.MonkeyPatch.context() as patch, writing(partial(refuse, rank)):
            if silent and world.rank == rank:
                patch.setattr(pending, "_report", fails(errno.EACCES))
            handle = sw.async_save(engine, folder)
            handle._written.wait()
            if world.rank == rank or not silent:
                handle.wait()
        return handle

    with pytest.raises(sw.RunError) as caught:
        begin().result()
    begin()
    later = [
        said_in(lambda: steps(engine, 2, 1)),
        said_in(lambda: sw.async_save(engine, folder, keep=1)),
    ]
    sw.load(engine, folder)
    return [[str(caught.value)], *later]


def said_in(act: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_write_that_fails_is_said_and_ends_nothing(tmp_path: Path, rank: int, silent: bool):
    """All ranks name the rank and the folder; the older checkpoint stays until the next save."""
    found = run_gloo(2, failing, str(tmp_path), rank, silent)
    what = f"could not be saved in '{tmp_path}': on rank {rank}, OSError: [Errno 28] No space left"
    for own, (raised, in_step, in_save) in enumerate(found):
        assert f"step 2 {what}" in raised[0]
        known = own == rank or (own == 0 and not silent)
        assert (len(in_step), len(in_save)) == (known, own == 0 and not known)
        for said in in_step + in_save:
            assert f"step 3 {what}" in said
            assert said.endswith("Training goes on without this checkpoint")
    assert names(tmp_path) == ["step-000004"]
    assert not [*tmp_path.glob(".saving*")]


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path):
    """It is said as a failed write is; states on a disk, of which no snapshot fits, are refused."""
    engine = engine_of(alone(), "fp64")
    steps(engine, 0, 1)
    (tmp_path / "file").write_text("")
    what = f"step 1 could not be saved in '{tmp_path / 'file'}': on rank 0, "
    with pytest.raises(sw.RunError, match=what):
        sw.async_save(engine, tmp_path / "file").result()
    sw.async_save(engine, tmp_path / "file")
    with pytest.warns(UserWarning, match=what):
        steps(engine, 1, 1)
    assert sw.async_save(engine, tmp_path / "folder").result() == find(tmp_path / "folder")
    engine = engine_of(alone(), "offload:optim@disk", offload_folder=tmp_path)
    with pytest.raises(InputError, match=r"on a disk.*sw\.save\(engine, folder\)"):
        sw.async_save(engine, tmp_path / "folder")


PROGRAM = """
import os, sys, time
import torch, shardwise as sw
from shardwise.checkpoint.save import PlannedSave

folder, how = sys.argv[1:]
world = sw.init()
model = torch.nn.Linear(64, 64)
engine = sw.parallelize(model, "zero1", world, loss=lambda m, x: m(x).square().mean())
engine.step(torch.ones(4, 64))
sw.save(engine, folder)
engine.step(torch.ones(4, 64))
write = PlannedSave.write

def slow(save):
    time.sleep(0.5)
    if how == "fail":
        raise OSError(28, "No space left on device")
    return write(save)

PlannedSave.write = slow
sw.async_save(engine, folder, keep=1)
if how == "close":
    world.close()
    print(sorted(os.listdir(folder)))
"""


@pytest.mark.parametrize("how", ["end", "close", "fail"])
def test_the_end_of_a_program_waits_for_the_write(tmp_path: Path, how: str):
    """What is pending is published, and a failure is said, by a program that asks for neither."""
    done = run_program(["-c", PROGRAM, str(tmp_path), how])
    assert done.returncode == 0, done.stderr
    step = 1 if how == "fail" else 2
    assert names(tmp_path) == [f"step-00000{step}"]
    assert ("on rank 0, OSError: [Errno 28] No space left" in done.stderr) == (how == "fail")
    assert how != "close" or "['latest', 'step-000002']" in done.stdout


# --- killed at any moment, on full disks, two at once ---------------------------------------------


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
    with (
        limited(resource.RLIMIT_FSIZE, 64),
        pytest.raises(RunError, match=r"could not be (saved|written)") as caught,
    ):
        act()
    said = str(caught.value)
    assert "File too large" in said and "\n" not in said
    assert "enforce" not in said and ".cc" not in said
    assert files(tmp_path) == before
    assert value_in(to) == 1.0


@pytest.mark.parametrize(
    ("kind", "lock"),
    [
        *((kind, "checkpoints/saving.lock") for kind in ("boxes", "engine", "import")),
        *(("engine", "run.lock"), ("import", "run.lock"), ("export", "../.writing-to.lock")),
    ],
)
def test_a_save_beside_another_is_refused(tmp_path: Path, kind: str, lock: str):
    """A save, an import, an export and a run exclude each other; files stay, readers read."""
    run, weights = run_of(tmp_path / "run", 1.0), weights_of(tmp_path / "weights", 3.0)
    acts: dict[str, Callable[[], object]] = {
        "boxes": lambda: run_of(run, 3.0),
        "engine": lambda: sw.save(engine_of(alone(), "fp64"), run / "checkpoints", keep=1),
        "import": lambda: import_weights(weights, run, overwrite=True),
        "export": lambda: export(run, weights_of(tmp_path / "to", 1.0), overwrite=True),
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
