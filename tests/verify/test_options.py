"""Tables on the command line of verify."""

from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.core.errors import InputError
from shardwise.core.tensor_plan import Table
from shardwise.verify.options import table_in

STYLES = {"0": "colwise", "2": "rowwise"}
MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("table.toml", '"0" = "colwise"\n"2" = "rowwise"\n'),
        ("table.json", '{"0": "colwise", "2": "rowwise"}'),
        (
            "all.toml",
            'heads = 4\n[styles]\n"0" = "colwise"\n"2" = "rowwise"\n[sequence]\n"*n" = "sequence"',
        ),
    ],
)
def test_a_table_is_read_from_a_file(name: str, text: str, tmp_path: Path):
    """TOML and JSON, styles alone or with what Table.of takes beside them."""
    (tmp_path / name).write_text(text)
    more = {"heads": 4, "sequence": {"*n": "sequence"}} if name == "all.toml" else {}
    assert table_in(tmp_path / name) == Table.of(STYLES, **more)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('blocks.up = "colwise"', "the name blocks that holds other names"),
        ('"0" = "colwize"', '"colwise"'),
        ("", "which has no styles"),
        ("0 colwise", "--table .*table.toml"),
        ('depth = 2\n[styles]\n"0" = "colwise"', "depth beside styles"),
    ],
)
def test_a_file_that_has_no_table_is_refused(text: str, said: str, tmp_path: Path):
    """With the name of the file, and the line to write instead."""
    (tmp_path / "table.toml").write_text(text)
    with pytest.raises(InputError, match=said) as error:
        table_in(tmp_path / "table.toml")
    assert "table.toml" in str(error.value)


@pytest.mark.full
def test_a_table_is_derived_or_read_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Under sp, a model whose sequence no embedding shows is refused."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "table.json").write_text('{"0": "colwise", "2": "rowwise"}')
    options = ["--model", f"{tmp_path / 'model.py'}:build"]
    own = ["--table", str(tmp_path / "table.json")]
    ends = []
    for command in (["tp2 sp"], ["tp2"], ["tp2", *own]):
        with pytest.raises(SystemExit) as leaving:
            main(["verify", *command, *options])
        ends.append(leaving.value.code)
    said = capsys.readouterr()
    assert ends == [2, 0, 0], said.err
    assert "no embedding shows which dim has the positions" in said.err
    assert said.out.count("It holds.") == 2
