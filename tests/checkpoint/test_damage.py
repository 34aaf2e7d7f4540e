"""Damaged, foreign and malicious checkpoints: refused in one paragraph, and nothing is changed."""

import errno
import os
import pickle
import random
import re
import resource
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import shardwise as sw
from shardwise.checkpoint.export import export
from shardwise.checkpoint.folder import MANIFEST, METADATA
from shardwise.checkpoint.open_checkpoint import (
    Manifest,
    describe,
    read_manifest,
    read_metadata,
    seal,
    write_manifest,
)
from shardwise.comm.world import World, alone
from shardwise.core.errors import InputError
from shardwise.engine.state.box import Box
from tests.checkpoint.support import engine_of, limited, save_by_all, steps
from tests.pool import run_threads
from tests.train.runs import ended

Act = Callable[[Path], object]


class Damage(NamedTuple):
    """What is done to a checkpoint's folder, and the files one of which the error must name."""

    name: str
    act: Act
    files: Sequence[str]


def damages(whole: Path, others: Sequence[Path], seed: int) -> Iterator[Damage]:
    """Every kind of damage to every file; `others` are checkpoints of another step and run."""
    places = random.Random(seed)
    names = sorted(path.name for path in whole.iterdir())
    for name in names:
        content = (whole / name).read_bytes()
        size = len(content)
        for bit in (places.randrange(8 * size) for _ in range(50)):
            act = lambda path, name=name, bit=bit: flip(path / name, bit)  # noqa: E731
            yield Damage(f"{name} bit {bit}", act, [name])
        at = places.randrange(size)
        torn = content[:at] + bytes(~byte & 255 for byte in content[at : at + 512])
        cuts = [content[:length] for length in {0, 1, size // 2, size - 1, places.randrange(size)}]
        foreign = [(whole / other).read_bytes() for other in names if other != name]
        for text in (*cuts, content + b"x", 2 * content, torn + content[at + 512 :], *foreign):
            yield Damage(f"{name} is {text[:9]}, {len(text)}", _write(name, text), [name])
        yield Damage(f"{name} of zeros", _write(name, bytes(size)), [name])
        yield Damage(f"{name} gone", lambda path, name=name: (path / name).unlink(), [name])
        for kind in SPECIAL:
            act = lambda path, name=name, kind=kind: special(path / name, kind)  # noqa: E731
            yield Damage(f"{name} is a {kind}", act, [name])
        for other in others:
            # two checkpoints of one step differ by the manifest: the error may name any file
            wrong = names if name == MANIFEST and other.name == whole.name else [name]
            text = (other / name).read_bytes()
            yield Damage(f"{name} of {other}", _write(name, text), wrong)
    yield from _manifests(read_manifest(whole))


def _manifests(right: Manifest) -> Iterator[Damage]:
    """Manifests with a right hash of their own that say something wrong."""
    step = right.scalars["step"] + 1
    wrong = {"no save": replace(right, save=7), "step": replace(right, scalars={"step": step})}
    for name, sealed in right.files.items():
        for what, changed in {
            "no": {},
            "another hash of": {name: replace(sealed, sha256="0" * 64)},
            "another length of": {name: replace(sealed, bytes=sealed.bytes + 1)},
            "a second": {name: sealed, f"_{name}": sealed},
        }.items():
            rest = {other: each for other, each in right.files.items() if other != name}
            wrong[f"{what} {name}"] = replace(right, files=rest | changed)
    for what, manifest in wrong.items():
        name = what.split()[-1]
        named = [MANIFEST, name, f"_{name}"]
        yield Damage(what, lambda path, m=manifest: write_manifest(path, m), named)


def _write(name: str, content: bytes) -> Act:
    return lambda path: (path / name).write_bytes(content)


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def reseal(path: Path) -> None:
    """Make the manifest fit the files, as somebody would who means harm."""
    manifest = read_manifest(path)
    files = {name: seal(path / name) for name in manifest.files}
    write_manifest(path, replace(manifest, files=files))


# --- absurd contents ----------------------------------------------------------------------------

#: A tensor of the saved model that one piece holds.
TENSOR = "model/0.bias"


def index(change: Callable[[Metadata, Any, MetadataIndex], object]) -> Act:
    """Change the index: the whole of it, one tensor in it, and the name of its first piece."""

    def act(path: Path) -> None:
        metadata = read_metadata(path)
        tensor: Any = metadata.state_dict_metadata[TENSOR]
        change(metadata, tensor, MetadataIndex(TENSOR, tensor.chunks[0].offsets))
        (path / METADATA).write_bytes(pickle.dumps(metadata))
        reseal(path)

    return act


def scalars(change: Callable[[dict[str, Any]], object], **values: Any) -> Act:
    def act(path: Path) -> None:
        manifest = read_manifest(path)
        change(manifest.scalars)
        write_manifest(path, replace(manifest, **values))

    return act


#: Each with what the error says of it.
ABSURD: dict[str, tuple[Act, str]] = {
    "a device as a file": (
        index(
            lambda m, _, p: m.storage_data.update(
                {p: replace(m.storage_data[p], relative_path="/dev/zero")}
            )
        ),
        "outside the checkpoint's folder",
    ),
    "the piece twice": (
        index(lambda _, t, __: t.chunks.append(t.chunks[0])),
        "two boxes hold the element",
    ),
    "no piece": (
        index(lambda m, t, p: (m.storage_data.pop(p), t.chunks.pop(0))),
        "boxes hold 0 elements",
    ),
    "no place": (index(lambda m, _, p: m.storage_data.pop(p)), "KeyError"),
    **{
        f"step {step!r}": (scalars(lambda said, s=step: said.update(step=s)), "its step is")
        for step in (-1, 10**30, "7", 3)
    },
    "no ranks": (scalars(len, ranks=-4), "its ranks or"),
}
#: Numbers and states of the engine, which only an engine reads.
NUMBERS: dict[str, tuple[Act, str]] = {
    name: (scalars(lambda said, v=values: said["engine"].update(v)), message)
    for name, values, message in (
        ("a negative counter", {"since": -1}, "of another form"),
        ("a text as a step of the engine", {"step": "2"}, "of another form"),
        ("an infinite loss scale", {"loss_scale": float("inf")}, "of another form"),
        ("groups in a list", {"groups": [1]}, "of another form"),
        ("a state that is a number", {"states": {"0.bias": 7}}, "manifest.json', which is damaged"),
    )
}


#: Files that nobody may wait for, read or follow.
SPECIAL = ("fifo", "socket", "folder", "loop", "device", "dangling")


def special(file: Path, kind: str) -> None:
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = Path.cwd()
            os.chdir(file.parent)  # the name of a socket has at most 107 bytes
            made.bind(file.name)
            os.chdir(here)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to({"loop": file.name, "device": "/dev/zero", "dangling": "nowhere"}[kind])


def little_memory() -> AbstractContextManager[None]:
    """Nothing in the block allocates much, less than any absurd size."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return limited(resource.RLIMIT_AS, held + 2**28)


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
    """Two steps of a run by two ranks; in the folder `another` the second step of another run."""
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
    """More than 250 ways: each is a paragraph that names the file, of `inspect --deep` too."""
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
        with little_memory():
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
    """With `missing_ok` too; a long file is not read to say that its length is wrong."""
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
    with little_memory():
        said = outcome(engine, path, state_of(engine))
        assert re.search(message, said), said
        if name in ABSURD:
            with pytest.raises(InputError, match=r"\A.*\Z"):
                export(path, tmp_path / "weights")


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
