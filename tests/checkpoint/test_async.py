"""`sw.async_save`: the values of one moment, written beside the next steps."""

import errno
import gc
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import shardwise as sw
from shardwise.checkpoint import pending
from shardwise.checkpoint.folder import all_in, find
from shardwise.checkpoint.open_checkpoint import describe, read_manifest
from shardwise.checkpoint.save import PlannedSave
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from tests.checkpoint.support import chain, engine_of, refuse, rows, steps, writing
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
    """Checkpoints of step 2, the second written after two more steps, which changed these weights.
    It is `async`, and waits for the file `go`.
    """
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
    assert [path.name for path in all_in(folder / "async")] == ["step-000002"]
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
    """The error on this rank after a write fails on `rank`, which reports nothing if `silent`. By
    `result`; and in another save by the next step, then by the next save.
    """
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
    assert [path.name for path in all_in(tmp_path)] == ["step-000004"]
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
    assert [path.name for path in all_in(tmp_path)] == [f"step-00000{step}"]
    assert ("on rank 0, OSError: [Errno 28] No space left" in done.stderr) == (how == "fail")
    assert how != "close" or "['latest', 'step-000002']" in done.stdout
