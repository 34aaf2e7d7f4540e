"""The command line: its answers are quick and are paragraphs."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import main as cli
from shardwise.cli.usage import EXAMPLES
from tests import surface
from tests.programs import run_program


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command prints that ends well."""
    with pytest.raises(SystemExit) as leaving:
        cli.main(argv)
    assert not leaving.value.code
    return capsys.readouterr().out


def refused(argv: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The error output of a command line that exits with 2, and prints nothing else."""
    with pytest.raises(SystemExit) as leaving:
        cli.main(shlex.split(argv))
    assert leaving.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize("name", surface.commands())
def test_every_command_has_an_example(name: str) -> None:
    """A command line that cannot be read is answered with one of its command that works."""
    assert name.rpartition(" ")[2] in EXAMPLES


@pytest.mark.parametrize(
    ("argv", "wrong", "example"),
    [
        ("--nope", "--nope", "train examples/quickstart.toml"),
        ("trian x.toml", "'trian'", "train examples/quickstart.toml"),
        ("verifi dp2", "No such command 'verifi'. Write", 'verify "dp2 zero3"'),
        ("train", "'CONFIG'", "train examples/quickstart.toml"),
        ("train x.toml --nproc x", "'--nproc'", "train examples/quickstart.toml"),
        ("train x.toml --nprc 2", "--nproc)", "train examples/quickstart.toml"),
        ("train x.toml --resume=3", "'--resume'", "train examples/quickstart.toml"),
        ("verify dp2 zero3", "extra argument(s) (zero3)", 'verify "dp2 zero3"'),
        ("checkpoint inspect", "'PATH'", "checkpoint inspect runs/default/checkpoints"),
        ("checkpoint inspct x", "'inspct'", "checkpoint inspect runs/default"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_a_paragraph(
    argv: str, wrong: str, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown options and commands, values of the wrong kind, too few or too many arguments."""
    err = refused(argv, capsys)
    assert wrong in err
    assert f"Write instead: shardwise {example}" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "argv",
    [("--help",), ("--version",), ("train", "--help"), ("plan", "--words"), ("schedule", "1f1b")],
)
def test_help_needs_no_torch(argv: tuple[str, ...]) -> None:
    """Torch and the other heavy packages are not imported for help, the version, the words."""
    code = (
        "import sys\nfrom shardwise.cli.main import main\n"
        f"try: main({list(argv)!r})\n"
        "except SystemExit as leaving: assert not leaving.code, leaving.code\n"
        "heavy = {'torch', 'matplotlib', 'tokenizers', 'tensorboard', 'pyarrow'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "keep",
    [
        "import atexit; atexit.register(time.sleep, 60)",
        "threading.Thread(target=time.sleep, args=(60,)).start()",
    ],
)
def test_a_process_that_outlives_its_command_is_ended(keep: str) -> None:
    """By an exit handler or a thread of a library; the command's exit code stands."""
    code = (
        f"import sys, threading, time\n{keep}\nfrom shardwise.cli import main as cli\n"
        "cli.LINGER_S, sys.argv = 0.5, ['shardwise', 'plan', 'dp2 zero4']\ncli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 2 and "kept alive" in done.stderr, done


@pytest.mark.parametrize(
    ("argv", "phrase"),
    [
        (("train", "absent.toml"), "absent.toml"),
        (("train", "{example}", "--set", "train.step=3"), "train.steps"),
        (("train", "{example}", "--plan", "dp2 zero9"), "zero9"),
        (("train", "{example}", "--nproc", "3"), "needs 2 processes"),
        (("train", "{example}", "--nproc", "0"), "needs 2 processes"),
        (("train", "{example}", "--plan", "tp63"), "tp63 for a model of 4 query heads"),
        (("train", "{example}", "--plan", "tp5", "--nproc", "5"), "the degrees 1 to 4"),
        (("train", "{example}", "--nproc", "99999999"), "99999999 processes on this machine"),
        (("train", "{example}", "--set", "data.source=absent.txt"), "absent.txt"),
        (("train", "{example}", "--resume"), "no checkpoint"),
        (("train", ""), "no configuration: the name of its file is empty"),
        (("train", "{example}", "--set", "clip=0"), "Write instead: --set train.clip=0."),
        (("train", "{example}", "--set", "stesp=9"), "Write instead: --set train.steps=9."),
        (
            ("train", "{example}", "--set", "tokens=9"),
            "--set data.tokens=9 or --set sample.tokens=9",
        ),
        (("train", "{example}", "--set", "model.width=1000000000"), "of memory. Allowed"),
        (("train", "{example}", "--set", "model.layers=1000000"), "of memory. Allowed"),
        (
            ("train", "{example}", "--model", "llama:70b", "--set", "run.device=cpu"),
            "the model llama:70b of 70,553,706,496 parameters",
        ),
        (
            ("train", "{example}", "--plan", "pp2 pipedream:4"),
            "Write instead: --set train.clip=0 (in Python: clip=None).",
        ),
        (("train", "{example}", "--set", "run.trace=true"), "which has no pipeline"),
        (("train", "{example}", "--plan", "pp2 1f1b:9"), "Write instead: train.batch = 9"),
        (("plan", "cp4:3x2"), "Allowed: a ring of R times Ulysses of U ranks, with R * U = 4"),
    ],
)
def test_bad_input_is_a_paragraph_and_exit_code_2(
    argv: tuple[str, ...], phrase: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No traceback, nothing on the output, no run folder left behind."""
    example = Path(__file__).parents[2] / "examples" / "quickstart.toml"
    given = [part.format(example=example) for part in argv]
    if "{example}" in argv:
        given += ["--set", f"run.folder={tmp_path / 'run'}"]
    with pytest.raises(SystemExit) as leaving:
        cli.main(given)
    said = capfd.readouterr()
    assert leaving.value.code == 2, said.err
    assert phrase in said.err
    assert "Traceback" not in said.err
    assert said.out == ""
    assert not (tmp_path / "run").exists()


def test_help_says_how_options_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag is no <bool>, --set can be repeated, and the folder is named."""
    said = " ".join(printed(capsys, "train", "--help").split())
    assert "<bool>" not in said + printed(capsys, "--help")
    assert "Can be given several times." in said
    assert said.count("run in run.folder") == 2


@pytest.mark.parametrize(
    ("argv", "phrase"),
    [
        ("verify dp2 --model nonsense", "Write instead: gpt"),
        ("verify dp2 --model absent.py:build", "whose file does not exist"),
        ("verify dp2 --model absent.py", "Write instead: absent.py:build"),
        ("verify dpp2", "dp2 for 'dpp2'"),
        ("train /dev/null", "it is no regular file"),
        ("verify", "Given: no plan"),
        ("verify dp99 --device cuda", "99 ranks on cuda, with"),
        ("verify dp2 --device tpu", "--device tpu"),
        ("predict", "Given: no plan"),
        ("predict 'dp2 zero9'", "zero9"),
        ("predict dp2 --rank 2", "--rank 2"),
        ("predict dp2 --batch 0", "--batch 0"),
        ("predict dp2 --batch 1000000000", "1000000000 rows"),
        ("predict dp2 --sequence 1000000000", "--sequence 1000000000"),
        ("predict 'dp2 accumulate:1000000000'", "2000000000 rows"),
        ("predict dp2 --model gpf", "gpf"),
        *(
            (f"predict dp2 --device-memory '{size}'", "Write instead: --device-memory 80GiB")
            for size in ("80GB", "80 GiB", "0GiB", "much", "1GiB dp2", "")
        ),
    ],
)
def test_every_command_answers_bad_input_in_a_paragraph(
    argv: str, phrase: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, one paragraph, nothing on the output."""
    err = refused(argv, capsys)
    assert phrase in err
    assert [line for line in err.splitlines() if line.startswith("Given: ")]
    assert "Write instead" in err and "Traceback" not in err


def test_the_words_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """What `shardwise plan --words` prints is the table of plan words."""
    from shardwise.core.plan.plan import words_table

    assert printed(capsys, "plan", "--words").strip() == words_table().strip()


def test_more_processes_than_cores_are_started_only_where_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four heads fit three ranks: the machine's cores are the reason, and --nproc the way."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    example = Path(__file__).parents[2] / "examples" / "quickstart.toml"
    given = ["train", str(example), "--plan", "tp3", "--set", f"run.folder={tmp_path / 'run'}"]
    with pytest.raises(SystemExit) as leaving:
        cli.main(given)
    assert leaving.value.code == 2
    said = capsys.readouterr().err
    assert "the plan 'tp3', which needs 3 processes, on a machine with 2 processor cores" in said
    assert said.strip().endswith("Write instead: --nproc 3.")


def test_a_program_that_is_given_bad_input_says_one_paragraph() -> None:
    """As a process of its own, in which every warning is an error."""
    done = run_program(["-W", "error", "-m", "shardwise.cli.main", "train", "absent.toml"])
    assert (done.returncode, done.stdout) == (2, "")
    assert "absent.toml" in done.stderr and len(done.stderr.splitlines()) == 1
