import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.load import load
from shardwise.checkpoint.save import save
from shardwise.comm.start.launch import spawn
from shardwise.comm.world import alone, init
from shardwise.core.errors import InputError
from shardwise.engine.state.box import Box


def whole(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Box:
    return Box(name, shape, (0,) * len(shape), shape, torch.zeros(shape, dtype=dtype))


WEIGHTS = torch.full((12,), 0.75).numpy().tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    weights = Box("model/w", (4, 3), (0, 0), (4, 3), torch.full((4, 3), 0.75))
    save(tmp_path, [weights, whole("model/b", 3)], {"step": 1}, alone())
    return tmp_path


@pytest.mark.parametrize(
    ("box", "message"),
    [
        (whole("model/x", 4), r"'model/x' of \(4,\) float32, which the checkpoint does not have"),
        (whole("model/w", 3, 4), r"'model/w' of shape \(3, 4\).*saved with, \(4, 3\)"),
        (whole("model/w", 12), r"'model/w' of shape \(12,\).*saved with, \(4, 3\)"),
        (
            whole("model/w", 4, 3, dtype=torch.float64),
            r"'model/w' in float64.*saved with, float32",
        ),
        (
            Box("model/x", (4,), (0,), (0,), torch.zeros(0)),
            "which the checkpoint does not have",
        ),
    ],
)
def test_a_box_that_does_not_fit_is_refused(folder: Path, box: Box, message: str):
    """A missing name, another shape, another dtype: each is named, and no box is touched."""
    good = Box("model/b", (3,), (0,), (3,), torch.ones(3))
    with pytest.raises(InputError, match=message):
        load(folder, [good, box], alone())
    assert good.tensor.eq(1).all()


def test_all_that_does_not_fit_is_listed(folder: Path):
    """Several misfits are told at once, and of very many the first and the number of the others."""
    with pytest.raises(InputError) as caught:
        load(folder, [whole(f"model/{i}", 1) for i in range(20)], alone())
    assert "'model/0'" in str(caught.value) and "'model/5'" in str(caught.value)
    assert "and 14 more tensors" in str(caught.value)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scramble(path: Path) -> None:
    path.write_bytes(b"?" * path.stat().st_size)


def change(path: Path) -> None:
    """One bit of a weight, whose value nobody can tell to be wrong."""
    content = bytearray(path.read_bytes())
    content[content.find(WEIGHTS) + 1] ^= 1
    path.write_bytes(content)


def rewrite(path: Path) -> None:
    path.write_text(json.dumps({"format": "another"}))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("__0_0.distcp", shorten, r"__0_0.distcp', which is damaged \(it has \d+ bytes and should"),
        ("__0_0.distcp", scramble, r"__0_0.distcp', which is damaged"),
        ("__0_0.distcp", change, r"__0_0.distcp', which is damaged \(its SHA-256 is not"),
        ("__0_0.distcp", Path.unlink, r"__0_0.distcp', which is damaged \(it is not there"),
        (".metadata", shorten, r"\.metadata', which is damaged"),
        (".metadata", scramble, r"\.metadata', which is damaged"),
        ("scalars.json", shorten, r"scalars.json', which is damaged"),
        ("scalars.json", rewrite, r"scalars.json', which is damaged"),
        ("manifest.json", shorten, r"manifest.json', which is damaged"),
        ("manifest.json", Path.unlink, r"manifest.json', which is damaged \(it is not there"),
    ],
)
def test_a_damaged_file_is_named(
    folder: Path, file: str, damage: Callable[[Path], None], message: str
):
    """A file that is short, garbled or gone is named, with what is wrong with it."""
    damage(folder / "step-000001" / file)
    with pytest.raises(InputError, match=message):
        load(folder, [whole("model/w", 4, 3), whole("model/b", 3)], alone())


def load_what_one_lacks(folder: Path) -> str:
    world = init()
    try:
        load(folder, [whole("model/w", 4, 3 + world.rank)], world)
    except InputError as error:
        return str(error)
    return "loaded"


def test_what_one_rank_cannot_load_is_refused_by_all(folder: Path):
    """A misfit on one rank is the same InputError on every rank, and none waits for ever."""
    said = spawn(load_what_one_lacks, 2, (folder,))
    assert said[0] == said[1]
    assert "'model/w' of shape (4, 4)" in said[0]


def test_a_moved_checkpoint_loads(folder: Path, tmp_path: Path):
    """A checkpoint holds no paths: it loads from wherever it was moved."""
    shutil.move(folder / "step-000001", tmp_path / "mine")
    into = Box("model/b", (3,), (0,), (3,), torch.ones(3))
    assert load(tmp_path / "mine", [into], alone()) == {"step": 1}
    assert into.tensor.eq(0).all()
