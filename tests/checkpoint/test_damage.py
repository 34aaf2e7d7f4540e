"""Damaged, foreign and malicious checkpoints: refused in one paragraph, and nothing is changed."""

import contextlib
import errno
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.checkpoint.export import export
from shardwise.checkpoint.folder import METADATA
from shardwise.checkpoint.open_checkpoint import describe, read_metadata
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.engine.state.box import Box
from tests.checkpoint.damage import ABSURD, NUMBERS, damages, flip, limits, reseal, special
from tests.checkpoint.support import engine_of, save_by_all, steps
from tests.pool import run_threads
from tests.train.runs import ended

State = tuple[dict[str, Any], dict[str, Tensor]]


def state_of(engine: sw.Engine) -> State:
    return engine.scalars(), {box.name: box.tensor.clone() for box in engine.boxes()}


def same(a: State, b: State) -> bool:
    equal = a[0] == b[0] and a[1].keys() == b[1].keys()
    return equal and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


def kept(world: World) -> list[tuple[list[Box], dict[str, Any]]]:
    engine, found = engine_of(world, "dp2 zero3 fp64"), []
    for step in range(2):
        steps(engine, step, 1)
        boxes = [replace(box, tensor=box.tensor.detach().clone()) for box in engine.boxes()]
        found.append((boxes, engine.scalars()))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of two steps of one run, saved by two ranks. In the folder `another`, the
    weights of the first step are those of the second of another run.
    """
    folder = tmp_path_factory.mktemp("saved") / "run"
    ranks = run_threads(2, kept)
    for run, number, step in (("run", 0, 1), ("run", 1, 2), ("another", 0, 2)):
        scalars = {"step": step, "engine": ranks[0][number][1], "extra": {}}
        save_by_all(folder.with_name(run), [rank[number][0] for rank in ranks], scalars)
    return folder


def outcome(engine: sw.Engine, path: Path, expected: State) -> str:
    """What a load comes to; "" where it loads just what was saved."""
    before, said = state_of(engine), ""
    try:
        sw.load(engine, path)
    except InputError as error:
        said = str(error)
    assert "\n" not in said and "Traceback" not in said
    assert same(state_of(engine), before if said else expected), f"{path}: {said or 'loaded'}"
    return said


@pytest.mark.parametrize("nth", [9, pytest.param(1, marks=pytest.mark.full)])
def test_no_damage_is_loaded_and_none_changes_the_engine(
    nth: int, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """More than 250 ways: bits, lengths, files missing, exchanged and of other checkpoints.
    `sw.load` refuses each in one paragraph that names the file, and leaves the engine as it was;
    `checkpoint inspect --deep` refuses each with exit code 2.
    """
    whole = shutil.copytree(saved, tmp_path / "run") / "step-000002"
    others = [saved / "step-000001", saved.with_name("another") / whole.name]
    engine, expected = engine_of(alone(), "fp64"), engine_of(alone(), "fp64")
    sw.load(expected, whole)
    steps(engine, 0, 1)
    content = content_of(whole)
    every = [*damages(whole, others, seed=7)]
    assert len(every) >= 250
    for damage in every[::nth]:
        damage.act(whole)
        assert content != content_of(whole), damage.name
        said = outcome(engine, whole, state_of(expected))
        assert any(f"'{whole / name}'" in said for name in damage.files), f"{damage.name}: {said}"
        code, out, err = ended(capsys, "checkpoint", "inspect", "--deep", str(whole))
        assert code == 2 and err.count("\n") == 1 and not out, damage.name
        shutil.rmtree(whole)
        whole.mkdir()
        for name, each in content.items():
            (whole / name).write_bytes(each or b"")
    assert outcome(engine, whole, state_of(expected)) == ""
    describe(whole, deep=True)


def test_a_missing_file_is_no_missing_checkpoint(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`missing_ok` starts anew without a checkpoint; one that lacks a file is refused. A file of
    hundreds of gigabytes is not read to say that it is too short.
    """
    engine = engine_of(alone(), "fp64")
    for file in (".metadata", "manifest.json"):
        path = shutil.copytree(saved / "step-000002", tmp_path / file / "step-000002")
        (path / file).unlink()
        with pytest.raises(InputError, match=rf"{file}', which is damaged \(it is not there"):
            sw.load(engine, path, missing_ok=True)
    path = shutil.copytree(saved / "step-000002", tmp_path / "step-000002")
    (path / "__0_0.distcp").write_bytes(b"short")
    monkeypatch.setattr("hashlib.file_digest", None)
    with pytest.raises(InputError, match=r"it has 5 bytes and should have \d+"):
        sw.load(engine, path)


def content_of(path: Path) -> dict[str, bytes | None]:
    return {file.name: file.read_bytes() if file.is_file() else None for file in path.iterdir()}


@pytest.mark.parametrize("name", [*ABSURD, *NUMBERS])
def test_absurd_contents_with_right_hashes_are_refused(name: str, saved: Path, tmp_path: Path):
    """By loading and by what reads without a model, in one paragraph; nothing is allocated."""
    path = tmp_path / "step-000002"
    shutil.copytree(saved / "step-000002", path)
    damage, message = (ABSURD | NUMBERS)[name]
    damage(path)
    engine = engine_of(alone(), "fp64")
    with limits():
        said = outcome(engine, path, state_of(engine))
        assert re.search(message, said), said
        if name in ABSURD:
            with pytest.raises(InputError, match=r"\A.*\Z"):
                export(path, tmp_path / "weights")


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "loop", "device", "dangling"])
def test_special_files_are_refused(kind: str, saved: Path, tmp_path: Path):
    """In place of any file of a checkpoint: nothing waits for them, reads them or follows them."""
    engine = engine_of(alone(), "fp64")
    for file in sorted((saved / "step-000002").iterdir()):
        path = tmp_path / file.name / "step-000002"
        shutil.copytree(file.parent, path)
        special(path / file.name, kind)
        with limits():
            assert outcome(engine, path, state_of(engine))
            with pytest.raises(InputError, match=r"\A.*\Z"):
                describe(path, deep=True)
    special(shutil.copytree(saved, tmp_path / "all") / "latest", kind)
    with limits():
        assert describe(tmp_path / "all")["scalars"]["step"] == 2


def test_a_file_without_permission_is_no_damaged_file(saved: Path, monkeypatch: pytest.MonkeyPatch):
    """Of any kind: the error says what the system said, and advises to remove nothing."""
    opened = os.open
    for name in sorted(each.name for each in (saved / "step-000002").iterdir()):

        def refused(path: Any, *args: Any, name: str = name, **more: Any) -> int:
            if Path(path).name == name:
                raise PermissionError(errno.EACCES, "Permission denied")
            return opened(path, *args, **more)

        engine = engine_of(alone(), "fp64")
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refused)
            with pytest.raises(InputError) as error:
                sw.load(engine, saved)
        said = str(error.value)
        assert f"{name}', which cannot be read (Permission denied)" in said
        assert "rm -r" not in said and "damaged" not in said


class Runs:
    """An object whose pickle calls a function that leaves a mark."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def harms(mark: Path) -> list[bytes]:
    """Pickles that would each make the file `mark`: by themselves, or inside what looks right."""
    calls = [Runs(Path.touch, mark), Runs(os.system, f"touch {mark}"), Runs(torch.save, 1, mark)]
    inside = {"state_dict_metadata": Runs(os.mkdir, str(mark))}
    dotted = b"\x80\x04\x8c\x05torch\x8c\x0aos.system\x93\x8c" + bytes([len(f"touch {mark}")])
    dotted += f"touch {mark}".encode() + b"\x85R."
    return [*map(pickle.dumps, (*calls, inside)), dotted]


def test_a_checkpoint_runs_no_code(saved: Path, tmp_path: Path):
    """Whatever `.metadata` names, nothing is called, though the manifest was made to fit."""
    mark, path = tmp_path / "mark", tmp_path / "step-000002"
    for evil in harms(mark):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(saved / "step-000002", path)
        (path / METADATA).write_bytes(evil)
        reseal(path)
        engine = engine_of(alone(), "fp64")
        for use in (describe, read_metadata, lambda path, e=engine: sw.load(e, path)):
            with pytest.raises(InputError, match=r"\.metadata', which is damaged"):
                use(path)
        assert not mark.exists()
    pickle.loads(harms(mark)[0])  # noqa: S301 - and this is what it would have done
    assert mark.exists()


def test_a_bit_of_metadata_is_never_a_traceback(saved: Path, tmp_path: Path):
    """Behind a manifest that was made to fit, too: an InputError, or a valid index."""
    whole, path = saved / "step-000002" / METADATA, tmp_path / METADATA
    refused = 0
    for bit in range(0, 8 * whole.stat().st_size, 197):
        shutil.copy(whole, path)
        flip(path, bit)
        with contextlib.suppress(InputError):
            read_metadata(tmp_path)
            refused -= 1
        refused += 1
    assert refused > 100
