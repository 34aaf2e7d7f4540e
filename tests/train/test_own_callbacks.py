"""Callbacks of the user's own in `shardwise train`: `run.callbacks = ["file.py:function"]`."""

from pathlib import Path

import pytest

from shardwise.core.errors import InputError, RankError
from shardwise.train import config
from shardwise.train.metrics import read
from tests.train.runs import run, settings

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
