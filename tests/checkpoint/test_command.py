import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from shardwise.checkpoint.command import inspect_command
from shardwise.checkpoint.contents import Saved, describe
from shardwise.core.errors import InputError
from tests.checkpoint.cuts import boxes_of, sample, save_by_all


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {
        "model/w": sample((4, 3), torch.float32),
        "model/b": sample((3,), torch.bfloat16),
        "optim/step/w": sample((), torch.float64),
    }
    held = [boxes_of(tensors, "flat", rank, 2) for rank in range(2)]
    save_by_all(tmp_path, held, {"step": 7, "engine": {"loss_scale": 2.0}})
    return tmp_path


def shown(*argv: str) -> str:
    app = typer.Typer()
    app.command()(inspect_command)
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 0, result.output
    return result.output


def test_contents_are_told_without_reading_tensors(folder: Path):
    """Names, whole shapes, dtypes, bytes, scalars: known though the files of tensors are gone."""
    for path in (folder / "step-000007").glob("*.distcp"):
        path.unlink()
    contents = describe(folder)
    assert contents.tensors == (
        Saved("model/b", (3,), "bfloat16", 6, 2),
        Saved("model/w", (4, 3), "float32", 48, 2),
        Saved("optim/step/w", (), "float64", 8, 1),
    )
    assert (contents.bytes, contents.ranks) == (62, 2)
    assert contents.scalars == {"step": 7, "engine": {"loss_scale": 2.0}}


def test_inspect_shows_tensors_and_scalars(folder: Path):
    """The command prints a line for each tensor, the sum of their bytes, and the scalars."""
    said = shown(str(folder)).splitlines()
    assert "saved by 2 ranks, 3 tensors" in said[0]
    assert [line.split() for line in said[2:6]] == [
        ["model/b", "bfloat16", "3", "6", "bytes"],
        ["model/w", "float32", "4", "x", "3", "48", "bytes"],
        ["optim/step/w", "float64", "scalar", "8", "bytes"],
        ["in", "all", "62", "bytes"],
    ]
    assert json.loads("\n".join(said[7:]))["step"] == 7


def test_inspect_gives_one_json_object(folder: Path):
    """With --json the same is one JSON object."""
    said = json.loads(shown(str(folder), "--json"))
    assert said["path"].endswith("step-000007") and said["bytes"] == 62 and said["ranks"] == 2
    assert said["tensors"][1] == {
        "name": "model/w",
        "shape": [4, 3],
        "dtype": "float32",
        "bytes": 48,
        "pieces": 2,
    }


def test_inspect_refuses_what_is_no_checkpoint(tmp_path: Path):
    """A folder without a checkpoint is an InputError, for the command line to print."""
    with pytest.raises(InputError, match="no whole checkpoint"):
        inspect_command(tmp_path)
