"""A model and callbacks of the user's own in `shardwise train`: `file.py:function`."""

import json
from pathlib import Path

import pytest

from shardwise.cli import main as cli
from shardwise.comm.world import alone
from shardwise.core.errors import InputError, RankError
from shardwise.train import config, loop
from shardwise.train.measure.metrics import read
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
        ("tp2", ""),
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


MINE = """
import shardwise as sw

class Mine(sw.callbacks.Callback):
    all_ranks = True

    def run_began(self, run):
        self.rank, self.file = run.rank, run.folder.parent / f"seen-{run.rank}"

    def step_ended(self, step, metrics):
        self.write("step", step, metrics["loss/train"])
        if step == 4 and self.rank == 1 and FAILS:
            raise ValueError("enough")

    def evaluated(self, step, metrics):
        self.write("evaluated", step, metrics["loss/validation"])

    def saved(self, step, path):
        self.write("saved", step, path.name)

    def write(self, *words):
        with self.file.open("a") as file:
            print(*words, file=file)

def make():
    return Mine()

def number():
    return 3

def broken():
    return 1 / 0
"""


def called(folder: Path, function: str, *, fails: bool = False) -> config.Config:
    """A run of seven steps with a callback from a file."""
    file = folder / "mine.py"
    file.write_text(MINE.replace("FAILS", str(fails)))
    given = settings(folder / "run")
    own = given.run.model_copy(update={"callbacks": (f"{file}:{function}",)})
    return given.model_copy(update={"run": own})


def test_a_callback_of_ones_own_is_called_as_the_run_proceeds(tmp_path: Path) -> None:
    """After each step, evaluation and save, on both ranks."""
    records = run(called(tmp_path, "make"), ranks=2)
    wanted: list[str] = []
    for record in records:
        wanted.append(f"step {record.step} {record.loss}")
        if record.validation is not None:
            wanted.append(f"evaluated {record.step} {record.validation}")
        if record.step in (2, 4, 6, 7):
            wanted.append(f"saved {record.step} step-{record.step:06}")
    for rank in range(2):
        assert (tmp_path / f"seen-{rank}").read_text().splitlines() == wanted


def test_a_callback_that_fails_on_one_rank_ends_the_run_on_all(tmp_path: Path) -> None:
    """After the step, with its error; nothing waits for the rank that failed."""
    with pytest.raises(RankError, match="callback Mine failed in step_ended: ValueError: enough"):
        run(called(tmp_path, "make", fails=True), ranks=2)
    assert [record.step for record in read(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("mack", 'callback ".*mine.py:mack", whose file has no function "mack".*mine.py:make'),
        ("number", "callback 3, which is without run_began"),
        ("broken", "calling the function gives ZeroDivisionError: .*line"),
    ],
)
def test_a_function_that_makes_no_callback_is_refused(
    tmp_path: Path, function: str, text: str
) -> None:
    """Before the run begins, in one paragraph; the run's folder is not made."""
    with pytest.raises(InputError, match=text):
        run(called(tmp_path, function))
    assert not (tmp_path / "run").exists()
