"""The commands as a user runs them, and their configuration: what they take and what they say."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cli import main as cli
from shardwise.cli.main import EXAMPLES
from shardwise.comm.start.worker import NOTHING
from shardwise.core.errors import InputError
from shardwise.migrate.read import imported
from shardwise.models import gpt
from shardwise.prediction.cluster import cluster_of
from shardwise.train import config
from shardwise.train.model import learning_rate, optimizer_of
from shardwise.verify.inputs import table_in
from tests import surface
from tests.programs import start_program
from tests.train import runs
from tests.train.runs import Capture, ended

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "quickstart.toml"


def configured(folder: Path, *argv: str, plan: str = "dp2 zero3", **train: object) -> list[str]:
    file = folder / "config.toml"
    file.write_text(config.dump(runs.settings(folder / "run", plan, **train)))
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
        # the machine
        ("doctor --nproc 0", "--nproc 0"),
        ("doctor --mesh 'dp2 tp2' --nproc 2", "--mesh dp2"),
        ("doctor --device gpu", "--device"),
        ("doctor --disk /no/such/folder", "--disk /no/such/folder"),
        ("doctor --save /no/such/folder/c.toml", "--save cluster.toml"),
        ("doctor --save /dev/null/c.toml", "which cannot be written (Not a directory)"),
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


def test_more_processes_than_cores_are_started_only_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Four heads fit three ranks: the machine's cores are the reason, and --nproc the way."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    own = f"run.folder={tmp_path / 'run'}"  # `make train` may have filled that of the example
    code, _, said = ended(capsys, "train", str(EXAMPLE), "--plan", "tp3", "--set", own)
    assert code == 2
    assert "the plan 'tp3', which needs 3 processes on this machine, with 2 processor cores" in said
    assert said.strip().endswith("Write instead: --nproc 3.")


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


def test_every_key_has_a_default(tmp_path: Path):
    """A file says only what it wants otherwise, behind a byte order mark or not."""
    assert config.build({}) == config.Config()
    file = tmp_path / "short.toml"
    for text in (b"[train]\n", b"\xef\xbb\xbf[train]\n"):
        file.write_bytes(text)
        assert config.read(file) == config.Config()
    for steps, warmup in ((10, 10), (60, 50)):  # 50 steps, or all of them
        assert config.build({"train": {"steps": steps}}).train.warmup == warmup
    assert config.build({"train": {"steps": 10, "warmup": 3}}).train.warmup == 3


@settings(deadline=None, max_examples=40)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    lr=st.floats(1e-6, 1.0),
    layers=st.none() | st.integers(1, 99),
)
def test_what_is_written_reads_back(text: str, lr: float, layers: int | None):
    """config.toml in the run folder holds exactly the configuration that ran."""
    import tomllib

    given_values = {
        # no file's name has a zero, and a dollar begins a variable
        "run": {"folder": text.replace("\0", "0").replace("$", "s")},
        "train": {"lr": lr},
        "model": {"layers": layers},
    }
    before = config.build(given_values)
    assert config.build(tomllib.loads(config.dump(before))) == before


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=7", 7),
        ("train.decay=linear", "linear"),
        ("plan.text=dp2 zero3", "dp2 zero3"),
        ("train.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("run.folder=a=b", "a=b"),
        ("run.folder=2024", "2024"),
        ("train.lr=1", 1.0),
        ("run.trackers=wandb, mlflow", ("wandb", "mlflow")),
        ("run.trackers=[]", ()),
        *((f"run.folder={text}", text) for text in ("9" * 5000, "[" * 5000)),
    ],
)
def test_an_override_sets_one_key(override: str, expected: object):
    """--set takes a TOML value, or text where it is none, and replaces the file's."""
    values = config.override({"train": {"steps": 3}}, [override])
    section, name = override.partition("=")[0].strip().split(".")
    assert getattr(getattr(config.build(values), section), name) == expected


@pytest.mark.parametrize(
    ("values", "phrases"),
    [
        ({"train": {"step": 3}}, ["unknown key train.step", "train.steps"]),
        ({"steps": 3}, ["unknown key steps", "train.steps"]),
        ({"model": {"lr": 3}}, ["unknown key model.lr", "train.lr"]),
        ({"train": {"lr": "fast"}}, ['train.lr = "fast"', "a valid number", "train.lr = 0.001"]),
        ({"train": {"decay": "step"}}, ["'linear', 'constant' or 'wsd'"]),
        ({"train": 3}, ["train = 3", "a section [train]"]),
        ({"train": {"steps": 7.0}}, ["train.steps = 7.0", "a valid integer", "train.steps = 1000"]),
        ({"run": {"folder": "a\0b"}}, ["run.folder", "match pattern"]),
        ({"data": {"field": "\udcff"}}, ["data.field", "unicode"]),
        ({"run": {"trackers": ["wnb"]}}, ['run.trackers = ["wnb"]', "'wandb' or 'mlflow'"]),
        ({"train": {"betas": [1.5, 2]}}, ["train.betas = [1.5, 2]", "less than 1", "[0.9, 0.95]"]),
        ({"train": {"warmup": 60, "steps": 50}}, ["train.steps = 50", "train.warmup = 5."]),
        ({"train": {"steps": -1}, "data": {"sauce": "x"}}, ["data.sauce", "train.steps"]),
        ({"data": {"source": ["a", "b"], "weights": [2]}}, ["data.weights = [1.0, 1.0]"]),
        ({"data": {"source": []}}, ['data.source = ["stdlib"], its default']),
    ],
)
def test_a_bad_value_is_answered_with_its_remedy(values: dict[str, object], phrases: list[str]):
    """A bad key or value names itself, what is allowed, and what to write instead."""
    with pytest.raises(InputError) as error:
        config.build(values)
    assert all(phrase in str(error.value) for phrase in phrases), str(error.value)
    assert "pydantic" not in str(error.value)


NUMBERS = [
    (section, name)
    for section, part in config.Config.model_fields.items()
    for name, field in type(part.default).model_fields.items()
    if re.search(r"\b(int|float)\b", str(field.annotation))
]
WRONG = st.sampled_from([True, -1, float("nan"), float("inf"), 10**400, [[1]], {}]) | st.text()


@settings(deadline=None, max_examples=200)
@given(key=st.sampled_from(NUMBERS), value=WRONG)
def test_a_number_is_a_number_in_its_range(key: tuple[str, str], value: object):
    """No numeric key takes true, a negative or an infinite number, or what is no number at all."""
    section, name = key
    with pytest.raises(InputError) as error:
        config.build({section: {name: value}})
    assert str(error.value).startswith(f"Given: {section}.{name} = ")
    assert len(str(error.value).splitlines()) == 1


def test_an_override_without_its_parts_is_refused():
    """--set needs a section, a key and a value; without the key, the error suggests one."""
    for text in ("steps", "train.steps", "steps=3", ".steps=3", "train.=3"):
        with pytest.raises(InputError, match=r"section\.key=value"):
            config.override({}, [text])
    with pytest.raises(InputError, match=r"Write instead: --set train\.\w+=3"):
        config.override({}, ["train=3"])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read"),
        ("# nothing but a remark\n", "is empty"),
        *((text, "is not TOML") for text in ("[train\nsteps", "a = " + "9" * 5000, "[" * 5000)),
        ("\udcff", "cannot be read"),
        ("#" * 2**23, r"cannot be read \(it is larger than 4 MiB"),
    ],
)
def test_a_file_that_sets_nothing_or_cannot_be_read_is_refused(
    content: str | None, why: str, tmp_path: Path
):
    """By its name, whatever the command line adds to it."""
    file = tmp_path / "a.toml"
    if content is not None:
        file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=rf"a\.toml.*, which {why}"):
        config.read(file, ["train.steps=3"])


@pytest.mark.parametrize("read", [config.read, cluster_of, table_in, imported])
def test_a_device_is_no_file(read: Callable[[Path], object], tmp_path: Path):
    """Of any kind that a command takes."""
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    with pytest.raises(InputError, match="it is no regular file"):
        read(tmp_path / "zero.toml")


def test_paths_have_variables_as_in_a_shell(monkeypatch: pytest.MonkeyPatch):
    """Every key that is a path, and what names a folder or a file after a colon."""
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("HOME", "/home/me")
    keys = "model.name data.validation_source data.tokens data.cache plan.table run.folder "
    for key in (keys + "run.cluster offload.folder").split():
        part, name = key.split(".")
        for text, path in (("~/a", "/home/me/a"), ("$SCRATCH/a", "/scratch/me/a")):
            built = config.build({part: {name: text}})
            assert getattr(getattr(built, part), name) == path
    own = {"model": {"name": "hf:~/w"}, "run": {"callbacks": ["$SCRATCH/c.py:make"]}}
    built = config.build(own | {"data": {"source": ["~/a", "hf:$SCRATCH/b"], "weights": [2, 1]}})
    assert built.data.source == ("/home/me/a", "hf:/scratch/me/b")
    assert (built.model.name, *built.run.callbacks) == ("hf:/home/me/w", "/scratch/me/c.py:make")
    for part, name in (("run", "folder"), ("data", "source")):
        with pytest.raises(InputError, match=f"{name} = .*variables are set, and ABSENT is not"):
            config.build({part: {name: "${ABSENT}/a"}})


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant", "wsd"])
def test_the_rate_rises_peaks_and_ends_where_it_should(decay: str):
    """Warmup is linear to lr, nothing exceeds lr, the last step has the final share of it."""
    train = config.build(
        {"train": {"steps": 50, "warmup": 10, "lr": 0.5, "min_lr_ratio": 0.2, "decay": decay}}
    ).train
    rates = [learning_rate(step, train) for step in range(50)]
    assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert max(rates) == rates[10] == 0.5
    assert (rates[41] == 0.5) == (decay in ("constant", "wsd"))
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.5 if decay == "constant" else 0.1)


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
def test_matrices_decay_and_vectors_do_not(name: str):
    """Also those that Muon's AdamW updates; one pattern for the same weight of all blocks."""
    train = config.build({"train": {"optimizer": name}}).train
    spec = optimizer_of(train, gpt.GPT(gpt.SIZES["tiny"]))
    norms = ("blocks.*.attn_norm", "blocks.*.mlp_norm", "norm")
    assert [*spec.groups] == [f"{name}.weight" for name in norms]
    for parameter, dims in (("blocks.2.attn_norm.weight", 1), ("blocks.2.mlp.up.weight", 2)):
        _, of, own = spec.members[spec.number(parameter, dims)]
        assert (of.options | own)["weight_decay"] == (0.1 if dims == 2 else 0.0)
        assert of.options["lr"] == train.lr
