import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from shardwise.checkpoint.contents import SavedTensor, describe
from shardwise.cli.inspect import inspect_command
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
    """Names, whole shapes, dtypes, bytes, scalars: known though the files hold only zeros."""
    for path in (folder / "step-000007").glob("*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    contents = describe(folder)
    assert contents.tensors == (
        SavedTensor("model/b", (3,), "bfloat16", 6, 2),
        SavedTensor("model/w", (4, 3), "float32", 48, 2),
        SavedTensor("optim/step/w", (), "float64", 8, 1),
    )
    assert (contents.bytes, contents.ranks) == (62, 2)
    assert contents.scalars == {"step": 7, "engine": {"loss_scale": 2.0}}


def test_inspect_shows_tensors_and_scalars(folder: Path):
    """With --all a line for each tensor, the sum of their bytes, and the scalars; else sums."""
    short = [line.split() for line in shown(str(folder)).splitlines()[2:]]
    assert short == [
        ["model", "1", "in", "bfloat16", "6", "bytes"],
        ["model", "1", "in", "float32", "48", "bytes"],
        ["optim/step", "1", "in", "float64", "8", "bytes"],
        ["step:", "7"],
        ["--all", "lists", "every", "tensor", "and", "all", "scalars"],
    ]
    said = shown(str(folder), "--all").splitlines()
    assert said[0].endswith("step-000007  saved by 2 ranks after step 7")
    assert said[1] == ("3 tensors, 15 parameters: 54 bytes of the model, 8 bytes of the optimizer")
    assert [line.split() for line in said[3:7]] == [
        ["model/b", "bfloat16", "3", "6", "bytes"],
        ["model/w", "float32", "4", "x", "3", "48", "bytes"],
        ["optim/step/w", "float64", "scalar", "8", "bytes"],
        ["in", "all", "62", "bytes"],
    ]
    assert json.loads("\n".join(said[8:]))["step"] == 7


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


def test_inspect_finds_the_checkpoints_of_a_run_and_tells_the_plan(tmp_path: Path):
    """A run's folder is answered with its latest checkpoint, and with what it was saved under."""
    tensors = {"model/w": sample((4, 3), torch.float32)}
    held = [boxes_of(tensors, "flat", rank, 2) for rank in range(2)]
    save_by_all(tmp_path / "run" / "checkpoints", held, {"step": 3, "plan": "dp2 zero3"})
    said = shown(str(tmp_path / "run")).splitlines()
    assert said[0].endswith("step-000003  saved by 2 ranks under the plan 'dp2 zero3' after step 3")


@pytest.mark.parametrize(("left", "phrase"), [(None, "it is not there"), (10, "it has 10 bytes")])
def test_inspect_names_a_file_of_tensors_that_is_damaged(
    folder: Path, left: int | None, phrase: str
):
    """Deleted or cut short: said for each, though the metadata is whole."""
    for file in sorted((folder / "step-000007").glob("*.distcp")):
        content = file.read_bytes()
        file.unlink() if left is None else file.write_bytes(content[:left])
        with pytest.raises(InputError, match=rf"{file.name}', which is damaged \({phrase}"):
            inspect_command(folder)
        file.write_bytes(content)
    inspect_command(folder)


def test_a_pointer_to_what_is_not_there_is_said(folder: Path, capsys: pytest.CaptureFixture[str]):
    """`latest` names a step that is gone: the one before is shown, and that it is."""
    (folder / "latest").write_text("step-000009\n")
    inspect_command(folder)
    said = capsys.readouterr()
    assert "step-000007  saved by" in said.out
    assert "names step-000009, which is no complete checkpoint: step-000007 is used" in said.out


@pytest.mark.parametrize(
    ("path", "phrase"),
    [
        ("absent", "no such folder"),
        ("file", "a file, not a folder"),
        ("file/inside", "no such folder|Not a directory"),
        ("empty", "no complete checkpoint in it"),
        ("a" * 300, "File name too long"),
        ("a\0b", "null byte|no such folder|the name of a folder"),
    ],
)
def test_inspect_refuses_what_is_no_checkpoint(tmp_path: Path, path: str, phrase: str):
    """Nothing, a file, an empty folder, a name that cannot be one: for the command line to say."""
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=phrase):
        inspect_command(tmp_path / path)
