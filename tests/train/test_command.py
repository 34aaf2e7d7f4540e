"""The commands as a user runs them: what they refuse; `train` by signals and failures."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import main as cli
from shardwise.cli.main import EXAMPLES
from shardwise.comm.start.worker import NOTHING
from shardwise.train import config
from tests import surface
from tests.programs import run_program, start_program
from tests.train.runs import Capture, ended, printed, settings

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "quickstart.toml"


def configured(folder: Path, *argv: str, plan: str = "dp2 zero3", **train: object) -> list[str]:
    file = folder / "config.toml"
    file.write_text(config.dump(settings(folder / "run", plan, **train)))
    return ["train", str(file), *argv]


# --- command lines and bad input ----------------------------------------------------------------


@pytest.mark.parametrize("name", surface.commands())
def test_every_command_has_an_example(name: str) -> None:
    """A command line that cannot be read is answered with one of its command that works."""
    assert name.rpartition(" ")[2] in EXAMPLES


def test_help_needs_no_torch() -> None:
    """Torch and the other heavy packages are not imported for help, the version, the words."""
    code = """
import sys
from shardwise.cli.main import main
for line in ("--help", "--version", "train --help", "plan --words", "schedule 1f1b"):
    try:
        main(line.split())
    except SystemExit as leaving:
        assert not leaving.code, leaving.code
heavy = {"torch", "matplotlib", "tokenizers", "tensorboard", "pyarrow"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_output_on_a_full_disk_is_one_line() -> None:
    """Exit code 1, without a traceback, also of what is written at the exit."""
    line = [sys.executable, "-m", "shardwise", "schedule", "gpipe"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "The output cannot be written (No space left on device).\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize(
    ("line", "phrase"),
    [
        # command lines that cannot be read
        ("--nope", "Write instead: shardwise train examples/quickstart.toml"),
        ("verifi dp2", "No such command 'verifi'. Write instead: shardwise verify"),
        ("train", "'CONFIG'"),
        ("train x.toml --nprc 2", "--nproc)"),
        ("train EXAMPLE --resume=3", "'--resume'"),
        ("verify dp2 zero3", "extra argument(s) (zero3)"),
        ("checkpoint inspct x", "Write instead: shardwise checkpoint inspect runs/default"),
        # runs
        ("train absent.toml", "absent.toml"),
        ("train EXAMPLE --set stesp=9", "Write instead: --set train.steps=9."),
        ("train EXAMPLE --set tokens=9", "--set data.tokens=9"),
        ("train EXAMPLE --nproc 3", "needs 2 processes"),
        ("train EXAMPLE --plan tp63", "tp63 for a model of 4 query heads"),
        ("train EXAMPLE --nproc 99999999", "99999999 processes on this machine"),
        ("train EXAMPLE --resume", "no checkpoint"),
        ("train EXAMPLE --plan 'pp2 pipedream:4'", "--set train.clip=0 (in Python: clip=None)."),
        ("train EXAMPLE --dry-run --set train.batch=1", "train.batch = 1 under the plan"),
        # proofs and predictions
        ("verify dp2 --model nonsense", "Write instead: gpt"),
        ("verify dp2 --model absent.py", "Write instead: absent.py:build"),
        ("verify", "Given: no plan"),
        ("verify dp99 --device cuda", "99 ranks on cuda, with"),
        ("predict", "Given: no plan"),
        ("predict 'dp2 zero3' --rank 2", "--rank 2"),
        ("predict dp2 --batch 99999999999", "a batch of up to 2,147,483,648 bytes"),
        ("predict dp2 --device-memory 80GB", "Write instead: --device-memory 80GiB"),
        ("predict dp2 --timeline /no/such/folder/x.svg", "a picture that cannot be written"),
        ("predict dp2 --timeline x.doc", ".svg or .png"),
        ("plan cp4:3x2", "a ring of R times Ulysses of U ranks, with R * U = 4"),
        # schedules
        ("schedule", "no schedule"),
        ("schedule 1f1b --stages 0", "0 stages for 1f1b"),
        ("schedule zb-v --chunks 3", "2 of them with zb-v"),
        ("schedule 1f1b --batches 2", "2bw alone"),
        ("schedule 1f1b:8 --microbatches 4", "its numbers again"),
        ("schedule 1f1b --costs X=1", "the costs 'X=1'"),
        ("schedule 1f1b --costs F=1/2", "one for each of 4 stages"),
        ("schedule naive --stages=99999999", "at most 32768 forwards"),
        ("schedule 1f1b --out /no/such/folder/a.svg", "cannot be written"),
    ],
)
def test_bad_input_is_a_paragraph_and_exit_code_2(
    line: str, phrase: str, tmp_path: Path, capfd: Capture
) -> None:
    """No traceback, nothing on the output, no run folder left behind."""
    argv = shlex.split(line.replace("EXAMPLE", str(EXAMPLE)))
    own = ["--set", f"run.folder={tmp_path / 'run'}"] if "EXAMPLE" in line else []
    code, out, err = ended(capfd, *argv, *own)
    assert (code, out) == (2, ""), err
    assert phrase in err
    assert "Write instead" in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_help_says_how_options_are_given(capsys: Capture) -> None:
    """A flag is no <bool>, --set can be repeated, and the folder is named."""
    said = " ".join(printed(capsys, "train", "--help").split())
    assert "<bool>" not in said + printed(capsys, "--help")
    assert "Can be given several times." in said
    assert said.count("run in run.folder") == 1


def test_more_processes_than_cores_are_started_only_where_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Four heads fit three ranks: the machine's cores are the reason, and --nproc the way."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    code, _, said = ended(capsys, "train", str(EXAMPLE), "--plan", "tp3")
    assert code == 2
    assert "the plan 'tp3', which needs 3 processes on this machine, with 2 processor cores" in said
    assert said.strip().endswith("Write instead: --nproc 3.")


def test_a_program_that_is_given_bad_input_says_one_paragraph() -> None:
    """As a process of its own, in which every warning is an error."""
    done = run_program(["-W", "error", "-m", "shardwise.cli.main", "train", "absent.toml"])
    assert (done.returncode, done.stdout) == (2, "")
    assert "absent.toml" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "read_as"),
    [
        ("train x --resume", "train x --resume=always"),
        ("train x --resume auto --nproc 2", "train x --resume=auto --nproc 2"),
        ("train --resume auto auto", "train --resume=auto auto"),
        ("train x", "train x"),
    ],
)
def test_resume_takes_a_word_or_none(line: str, read_as: str) -> None:
    """`auto` behind it is its value; anything else is an argument of its own."""
    assert cli.with_resume_value(line.split()) == read_as.split()


# --- signals and failures -----------------------------------------------------------------------


@pytest.mark.full
def test_a_second_interrupt_is_no_failure(tmp_path: Path) -> None:
    """The first saves, the second does not wait for the ranks to leave: nothing has failed."""
    endless = configured(tmp_path, "--nproc", "2", steps=100_000, eval_every=0, save_every=0)
    with start_program(["-W", "error", "-m", "shardwise", *endless]) as program:
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
    ranks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """While the data is being prepared, before any rank is started: a line, and no run folder."""

    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was not heard")

    monkeypatch.setattr("shardwise.train.prepare.prepare", interrupted)
    argv = configured(tmp_path, "--nproc", ranks, "--plan", f"dp{ranks}")
    assert ended(capsys, *argv) == (0, f"{NOTHING}\n", "")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_a_number_ends_with_exit_code_1(
    ranks: int, tmp_path: Path, capfd: Capture
) -> None:
    """A rate beyond all measure: one paragraph that names the step, no traceback."""
    plan = ("--nproc", str(ranks), "--plan", "dp2 zero3" if ranks == 2 else "fp32")
    code, _, said = ended(capfd, *configured(tmp_path, *plan, lr=1e30, warmup=0, clip=0))
    assert code == 1, said
    assert said.count("The run was stopped") == 1
    assert "Step " in said and "Traceback" not in said
