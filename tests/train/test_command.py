"""`shardwise train` as a user runs it: started, interrupted, resumed, and failing."""

import json
import os
import signal
from pathlib import Path

import pytest

from shardwise.cli import main as cli
from shardwise.comm.start.launch import Ended
from shardwise.comm.start.stop_signal import NOTHING
from shardwise.train import config
from shardwise.train.measure.metrics import read
from shardwise.train.measure.progress import size_text
from tests.programs import Program, run_program, start_program
from tests.train.runs import run, settings


def command(folder: Path, *argv: str, **train: object) -> list[str]:
    given = settings(folder / "run", "dp2 zero3", **train)
    file = folder / "config.toml"
    file.write_text(config.dump(given))
    return ["-W", "error", "-m", "shardwise", "train", str(file), *argv]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_run_is_interrupted_and_resumed_under_another_plan(number: int, tmp_path: Path) -> None:
    """A signal to launcher and ranks, as of systemd or Slurm: exit code 0, and one checkpoint.

    One rank continues the curve.
    """
    started = command(tmp_path, "--nproc", "2", steps=100_000, eval_every=0, save_every=0)
    pids = tmp_path / "pids.py"
    pids.write_text(PIDS.format(folder=str(tmp_path)))
    callbacks = ("--set", f"run.callbacks=['{pids}:make']")
    with start_program([*started, *callbacks]) as program:
        said = [line for line in program.stdout if _sent(line, program, number, tmp_path)]
    assert program.returncode == 0
    stopped = len(read(tmp_path / "run"))
    assert f"stopped by a signal after step {stopped}" in "".join(said)

    more = ("--resume", "--plan", "fp32", "--set", f"train.steps={stopped + 2}")
    done = run_program(command(tmp_path, *more))
    assert done.returncode == 0, done.stderr
    assert f"resumed after step {stopped}" in done.stdout
    steps = [record.step for record in read(tmp_path / "run")]
    assert steps == list(range(1, stopped + 3))


@pytest.mark.full
def test_a_second_interrupt_is_no_failure(tmp_path: Path) -> None:
    """The first saves, the second does not wait for the ranks to leave: nothing has failed."""
    started = command(tmp_path, "--nproc", "2", steps=100_000, eval_every=0, save_every=0)
    with start_program(started) as program:
        for line in program.stdout:
            if line.startswith("step 1/"):
                program.send_signal(signal.SIGINT)
            if "the checkpoint is saved" in line:
                program.send_signal(signal.SIGINT)
        complaint = program.stderr.read()
    assert program.returncode in (0, 130)  # the ranks may have left by then
    assert "failed" not in complaint
    assert ("by a second Ctrl-C" in complaint) == (program.returncode == 130)
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))) == 1


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_signal_in_start_up_ends_the_command_with_exit_code_0(
    ranks: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """While the data is being prepared, before any rank is started: a line, and no run folder."""
    started = command(tmp_path, "--nproc", ranks, "--plan", f"dp{ranks}")

    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was not heard")

    monkeypatch.setattr("shardwise.train.prepare.prepare", interrupted)
    with pytest.raises(SystemExit) as leaving:
        cli.main(started[started.index("train") :])
    assert leaving.value.code == 0
    assert capsys.readouterr() == (f"{NOTHING}\n", "")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("trained", "code"), [(False, 0), (True, 143)])
def test_ranks_that_a_signal_ended_before_they_listened_have_trained_nothing(
    trained: bool,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The launcher's 128 + 15 is a clean end where no step was recorded, and only there."""
    started = command(tmp_path, "--nproc", "2")

    def launched(*_: object, **__: object) -> Ended:
        if trained:
            (tmp_path / "run").mkdir(exist_ok=True)
            (tmp_path / "run" / "metrics.jsonl").write_text("{}")
        return Ended(143)

    monkeypatch.setattr("shardwise.comm.start.launch.launch", launched)
    with pytest.raises(SystemExit) as leaving:
        cli.main(started[started.index("train") :])
    assert leaving.value.code == code
    assert (NOTHING in capsys.readouterr().out) != trained


@pytest.mark.parametrize("resume", [False, True])
def test_ranks_that_fail_before_a_step_leave_no_run(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that would remove it may have been ended; what can be resumed is never removed."""
    left = tmp_path / "run" / "config.toml"
    monkeypatch.setattr("shardwise.train.run_folder.finished_message", lambda _: "")
    monkeypatch.setattr("shardwise.train.prepare.prepare", lambda *_: None)
    monkeypatch.setattr("shardwise.train.run_folder.check", lambda *_: None)

    def launched(*_: object, **__: object) -> Ended:
        left.parent.mkdir(exist_ok=True)
        left.write_text("")
        return Ended(1)

    monkeypatch.setattr("shardwise.comm.start.launch.launch", launched)
    given = command(tmp_path, "--nproc", "2", *["--resume"] * resume)
    with pytest.raises(SystemExit) as leaving:
        cli.main(given[given.index("train") :])
    assert leaving.value.code == 1
    assert left.exists() == resume


#: A callback with which each rank leaves a file that is named after its process.
PIDS = """
import os, pathlib
import shardwise as sw

class Pids(sw.callbacks.Callback):
    all_ranks = True

    def run_began(self, run):
        pathlib.Path({folder!r}, f"{{os.getpid()}}.pid").touch()

def make():
    return Pids()
"""


def _sent(line: str, program: Program, number: int, folder: Path) -> bool:
    """Signal the program and its ranks once its first step is shown; True of every line."""
    if line.startswith("step 1/"):
        ranks = [int(path.stem) for path in folder.glob("*.pid")]
        assert len(ranks) == 2 and program.pid is not None
        for pid in (*ranks[:1], program.pid, *ranks[1:]):
            os.kill(pid, number)
    return True


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_a_number_ends_with_exit_code_1(
    ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rate beyond all measure: one paragraph that names the step, no traceback."""
    plan = "dp2 zero3" if ranks == 2 else "fp32"
    started = command(tmp_path, "--nproc", str(ranks), "--plan", plan, lr=1e30, warmup=0, clip=0)
    with pytest.raises(SystemExit) as leaving:
        cli.main(started[started.index("train") :])
    said = capfd.readouterr().err
    assert leaving.value.code == 1, said
    assert said.count("The run was stopped") == 1
    assert "Step " in said
    assert "Traceback" not in said


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command prints that ends with 0."""
    with pytest.raises(SystemExit) as leaving:
        cli.main(argv)
    said = capsys.readouterr()
    assert leaving.value.code == 0, said.err
    return said.out


@pytest.mark.parametrize("plan", ["dp2 zero3", "pp2 offload:auto device_memory:9MiB"])
def test_what_is_predicted_for_a_configuration_is_what_its_run_holds_and_sends(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `predict --config` and by `train --dry-run`, which starts and writes nothing."""
    given = settings(tmp_path / "run", plan, optimizer="lion", batch=5, clip=0)
    file = tmp_path / "run.toml"
    file.write_text(config.dump(given))
    before = sorted(tmp_path.rglob("*"))
    found = json.loads(printed(capsys, "predict", "--config", str(file), "--json"))
    checked = printed(capsys, "train", str(file), "--dry-run")
    assert sorted(tmp_path.rglob("*")) == before
    assert found["model"] == "gpt:quickstart of run.toml"
    assert found["rows_a_step"] == 5  # of which one of two data ranks has three
    assert "A step trains on 5 rows" in checked
    assert checked.startswith(f"{found['plan']} on 2 ranks, ")
    record = run(given, 2)[-1]
    assert record.memory_bytes is not None
    held = {name: record.memory_bytes.get(name) for name in found["memory"]}
    assert held == found["memory"]
    for name, count in found["memory"].items():
        assert name in checked
        assert size_text(count) in checked
    assert record.sent_bytes == sum(found["bytes"].values())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--set train.batch=1", "train.batch = 1 under the plan"),
        ("--plan pp2_2bw:2", "clip=1.0 with 2bw:2, whose stages update at different times"),
        ("--set data.source=absent.txt", "absent.txt"),
        ("--plan tp64 --nproc 64", "tp64"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(
    argv: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same paragraph, and the exit code 2."""
    started = command(tmp_path, "--dry-run", *(word.replace("_", " ") for word in argv.split()))
    with pytest.raises(SystemExit) as leaving:
        cli.main(started[started.index("train") :])
    assert leaving.value.code == 2
    assert said in capsys.readouterr().err


def test_the_model_of_a_configuration_is_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under its own plan, which a plan on the command line replaces."""
    file = command(tmp_path)[-1]
    for plan, proved in (((), "dp2 zero3"), (("dp2 zero1",), "dp2 zero1")):
        found = json.loads(printed(capsys, "verify", *plan, "--config", file, "--json"))
        assert (found["plan"], found["holds"]) == (f"{proved} fp64", True)
        assert found["model"] == "gpt:quickstart of config.toml"
