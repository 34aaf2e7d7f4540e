"""The commands that have a batch derive the table of a model without one, and take a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import main
from shardwise.core.errors import InputError
from shardwise.techniques.tensor.tensor_table import Table
from shardwise.train import config
from shardwise.train.prepare import RunStart, prepare
from tests.derive.test_derive import HAND
from tests.train.runs import run
from tests.train.test_pretrained import configured, folder


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert not end.value.code
    return capsys.readouterr().out


@pytest.mark.full
def test_predictions_derive_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """They equal those under the printed table, and tensor ranks hold less than one alone."""
    name = f"{HAND}:tied"
    file = tmp_path / "table.toml"
    file.write_text(printed(capsys, "table", name))

    def memory(plan: str, *argv: str) -> dict[str, int]:
        text = printed(capsys, "predict", plan, "--model", name, *argv, "--json")
        return json.loads(text)["memory"]

    derived = memory("tp2")
    assert derived == memory("tp2", "--table", str(file))
    assert derived["parameters"] < memory("dp1")["parameters"]


@pytest.mark.full
def test_a_run_derives_the_table(tmp_path: Path):
    """`train` of a folder of opt, which has no table: the losses are those of one process."""
    weights = folder("opt", tmp_path / "w")
    expected = [each.loss for each in run(configured(tmp_path / "one", weights, "fp64", steps=3))]
    given = configured(tmp_path / "two", weights, "tp2 zero1 fp64", steps=3)
    assert [each.loss for each in run(given, ranks=2)] == pytest.approx(expected, rel=1e-10)
    table = prepare(
        configured(tmp_path / "three", weights, "tp2 zero1 fp64", steps=3), 2, RunStart()
    ).table
    assert isinstance(table, Table) and table.derived


def test_a_run_takes_a_table_from_a_file(tmp_path: Path):
    """`plan.table` replaces what would be derived; a file without a table is refused."""
    weights = folder("opt", tmp_path / "w")
    file = tmp_path / "table.toml"
    styles = {"model.decoder.layers.*.fc1": "colwise", "model.decoder.layers.*.fc2": "rowwise"}
    file.write_text("\n".join(f'"{name}" = "{style}"' for name, style in styles.items()))
    base = configured(tmp_path / "run", weights, "tp2", steps=2).model_dump()
    given = config.build(base | {"plan": {"text": "tp2", "table": str(file)}})
    table = prepare(given, 2, RunStart()).table
    assert isinstance(table, Table)
    assert dict(table.styles) == styles
    file.write_text("")
    with pytest.raises(InputError, match=r"plan\.table = .*which has no styles"):
        prepare(given, 2, RunStart())
