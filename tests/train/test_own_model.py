"""A run of a user's model, `model.name = "file.py:build"`: trained on the run's text."""

import json
from pathlib import Path

import pytest

from shardwise.cli import main as cli
from shardwise.comm.world import alone
from shardwise.core.errors import InputError
from shardwise.train import config, loop
from tests.docs.pages import file_of
from tests.train.runs import run, settings, trained

MODEL = """
import torch
from torch import nn
from torch.nn import functional

class Net(nn.Module):
    tensor_table = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}

    def __init__(self, rows=257):
        super().__init__()
        self.embed = nn.Embedding(rows, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, rows)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

def build():
    return Net()

def small():
    return Net(100)

class Pair(Net):
    def forward(self, tokens):
        return super().forward(tokens), tokens

def with_loss():
    def loss(model, batch):
        return functional.cross_entropy(model(batch["inputs"])[0].mT, batch["targets"])
    return Pair(), loss, lambda rows, seed: torch.zeros(rows, 3)
"""


def own(
    folder: Path, function: str = "build", plan: str = "fp64", text: str = MODEL
) -> config.Config:
    """The run of runs.py with the model of a file."""
    file = folder / "net.py"
    file.write_text(text)
    made = settings(folder / "run", plan).model_dump()
    made["model"] = {"name": f"{file}:{function}", "sequence": 13}
    return config.build(made)


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        ("dp2 zero3", ""),
        ("tp2", ""),
        ("pp2 gpipe:2", ""),
        ("dp2 zero3", "docs/tutorials/your-model.md"),
    ],
)
def test_ranks_train_it_as_one_process_does(plan: str, model: str, tmp_path: Path) -> None:
    """The losses of each step in fp64, with its own table under tp; the model of the page too."""
    text = file_of(model, "model.py") if model else MODEL
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    wanted = [record.loss for record in run(own(tmp_path / "one", text=text))]
    two = own(tmp_path / "two", plan=f"{plan} fp64", text=text)
    found = [record.loss for record in run(two, 2)]
    assert len(wanted) == 7 and wanted[-1] < wanted[0]
    assert found == pytest.approx(wanted, rel=1e-10)


def test_its_own_loss_and_no_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss with the model is the run's; a model that returns no logits writes no sample."""
    wanted = run(own(tmp_path))
    (tmp_path / "loss").mkdir()
    assert trained(alone(), own(tmp_path / "loss", "with_loss"), None) == ""
    assert "no sample: the model does not return logits" in capsys.readouterr().out
    report = (tmp_path / "loss/run/report.md").read_text()
    assert f"{wanted[-1].loss:.4f}" in report


@pytest.mark.full
@pytest.mark.parametrize("command", ["predict", "verify", "train"])
def test_the_commands_take_it(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --config, and `train --dry-run`."""
    file = tmp_path / "run.toml"
    file.write_text(config.dump(own(tmp_path, plan="dp2 zero3 fp64")))
    given = {"train": [str(file), "--dry-run"]}.get(command, ["--config", str(file), "--json"])
    with pytest.raises(SystemExit) as left:
        cli.main([command, *given])
    out, err = capsys.readouterr()
    assert left.value.code == 0, err
    assert "dp2 zero3 fp64" in out
    assert command == "train" or json.loads(out)


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"sequence": None}, r"without model\.sequence.*model\.sequence = 128"),
        ({"width": 16}, r"model\.width with model\.name"),
        ({"name": "{0}:small"}, r"numbers below 257 gives IndexError.*\(net\.py, line \d+\)"),
        ({"name": "{0}:bild"}, r"no function \"bild\".*Write instead: .*net\.py:build"),
    ],
)
def test_a_model_that_cannot_be_trained_on_the_text(
    change: dict[str, object], phrase: str, tmp_path: Path
) -> None:
    """One paragraph before anything starts, with the line of the user's file."""
    given = own(tmp_path)
    values = given.model_dump()
    change = {
        k: v.format(tmp_path / "net.py") if isinstance(v, str) else v for k, v in change.items()
    }
    values["model"] = {"name": given.model.name, "sequence": 13, **change}
    with pytest.raises(InputError, match=phrase):
        loop.train(config.build(values), alone())
    assert not given.folder.exists()
