"""The loop: one curve for any plan and any interruption, and a stop that loses nothing."""

import math
import os
import resource
import shutil
import signal
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardwise.cli import main as cli
from shardwise.comm.start.worker import NOTHING, REQUEUE, SIGNALS, StopSignal
from shardwise.comm.world import alone
from shardwise.core.errors import InputError, RunError
from shardwise.train import config, loop, run_folder
from shardwise.train.metrics import Record, read
from shardwise.train.prepare import RunStart, hold_folder, prepare
from tests.checkpoint.support import names
from tests.pool import run_gloo
from tests.train import runs

RESUME = RunStart(resume=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """The run that nothing interrupts, on one rank: what every other has to equal."""
    return runs.run(runs.settings(tmp_path_factory.mktemp("whole") / "run"))


def same(one: list[Record], other: list[Record]) -> None:
    assert [record.step for record in one] == [record.step for record in other]
    for a, b in zip(one, other, strict=True):
        assert (a.consumed, a.tokens, a.lr) == (b.consumed, b.tokens, b.lr)
        assert a.loss == pytest.approx(b.loss, rel=1e-10)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-9)
        assert (a.validation is None) == (b.validation is None)
        assert (a.validation or 0.0) == pytest.approx(b.validation or 0.0, rel=1e-10)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_sources_with_weights_go_on_on_another_number_of_ranks(tmp_path: Path):
    """The same batches, from each source its share, and a source for validation."""
    given = runs.settings(tmp_path / "run", steps=4, eval_every=2)
    for name in ("b", "held"):
        (tmp_path / f"{name}.txt").write_text(f"another text, {name}. " * 12)
    of = (*given.data.source, str(tmp_path / "b.txt"))
    held = str(tmp_path / "held.txt")
    given = runs.changed(given, "data", source=of, weights=(3.0, 1.0), validation_source=held)
    wanted = runs.run(runs.changed(given, "run", folder=str(tmp_path / "one")))
    runs.run(runs.changed(given, "train", steps=2))
    same(wanted, runs.run(runs.changed(given, "plan", text="dp2 zero1 fp64"), 2, RESUME))
    other = runs.changed(runs.changed(given, "train", steps=5), "data", weights=(1.0, 1.0))
    with pytest.raises(InputError, match=r"data\.weights = \[3\.0, 1\.0\] \(now"):
        runs.run(other, 1, RESUME)


# --- stopped and resumed ------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("plan", "ranks", "saves"),
    [
        ("fp64", 1, {"save_every": 1, "keep": 1, "async_save": True}),
        ("pp2 1f1b:4 fp64", 2, {"save_every": 0}),  # the last batch has rows for two microbatches
    ],
)
def test_a_stopped_run_goes_on_under_another_plan(
    plan: str, ranks: int, saves: dict[str, int], whole: list[Record], tmp_path: Path
):
    """SIGTERM to one of two ranks stops both after that step; the resumed curve has no seam."""
    given = runs.settings(tmp_path / "run", "dp2 zero3 fp64", **saves)
    run_gloo(2, runs.stopped, given, 1, "loop.tell", 3)
    assert names(given.folder / "checkpoints") == ["step-000003"]
    assert not (given.folder / "report.md").exists()
    resumed = runs.settings(tmp_path / "run", plan)
    same(runs.run(resumed, ranks, RESUME), whole)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by the compiler
def test_fewer_records_are_of_the_same_run(whole: list[Record], tmp_path: Path):
    """Compiled blocks and a record every third step change no number, and the loss falls."""
    given = runs.settings(tmp_path / "run", record_every=3, save_every=0, compile=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
        found = runs.run(given)
    assert [record.step for record in found] == [3, 6, 7]
    same(found, [record for record in whole if record.validation is not None])
    assert whole[-1].loss < whole[0].loss - 0.1


def test_a_run_that_reaches_its_limit_is_queued_again(tmp_path: Path, whole: list[Record]):
    """The command saves on all ranks and ends with 75; with --resume auto it goes on."""
    given = runs.settings(tmp_path / "run", "dp2 zero3 fp64")
    file = tmp_path / "run.toml"
    file.write_text(config.dump(given))
    with pytest.raises(SystemExit) as left:
        cli.main(["train", str(file), "--set", "run.max_hours=1e-9", "--resume", "auto"])
    assert left.value.code == REQUEUE
    assert names(given.folder / "checkpoints") == ["step-000001"]
    same(runs.run(given, 2, RunStart(auto=True)), whole)


def test_a_run_begins_with_the_weights_of_another(tmp_path: Path):
    """Its first validation loss is the other's last one, under another plan, from step 0."""
    first = runs.settings(tmp_path / "first", save_every=0)
    validation = runs.run(first)[-1].validation
    given = runs.settings(tmp_path / "run", "dp2 zero1 fp64", steps=1, warmup=0, lr=1e-12)
    given = runs.changed(given, "train", init_from=str(tmp_path / "first"))
    (begun,) = runs.run(given, 2)
    assert begun.consumed == 5
    assert begun.validation == pytest.approx(validation, rel=1e-8)
    wrong = runs.settings(tmp_path / "other", init_from=str(tmp_path / "text"))
    with pytest.raises(InputError, match="no complete checkpoint in it"):
        runs.run(wrong)
    assert not (tmp_path / "other").exists()


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", ["prepare", "build", "opening"])
def test_a_signal_before_the_first_step_ends_the_run(where: str, tmp_path: Path) -> None:
    """Heard by one of two ranks in start-up, it ends both; the same command can be given again."""
    given = runs.settings(tmp_path / "run", "dp2 zero3 fp64", steps=2)
    said = run_gloo(2, runs.stopped, given, 1, f"loop.{where}")
    assert said[0].endswith(f"{NOTHING}\n")
    assert (tmp_path / "run").exists() == (where == "opening")
    assert len(runs.run(given, 2)) == 2


@pytest.mark.full
@pytest.mark.parametrize("where", ["own_cost", "publish_report"])
def test_a_signal_after_the_last_step_ends_without_a_report(where: str, tmp_path: Path) -> None:
    """Rank 0 alone or all ranks: the checkpoint is there, and --resume makes the report."""
    given = runs.settings(tmp_path / "run", "dp2 zero3 fp64", steps=2)
    run_gloo(2, runs.stopped, given, 0, f"run.{where}")
    assert not (given.folder / "report.md").exists()
    assert names(given.folder / "checkpoints") == ["step-000002"]
    assert len(runs.run(given, 2, RESUME)) == 2
    assert run_folder.has_report(given.folder)


def test_a_run_that_has_made_its_steps_says_so(tmp_path: Path):
    """Resumed once more, under another plan, no byte of it changes."""
    runs.run(runs.settings(tmp_path / "run", steps=2))
    given = runs.settings(tmp_path / "run", "dp1 zero3", steps=2)
    before = contents(given.folder)
    assert runs.shown(alone(), given, RESUME) == (
        f"the run in {given.folder} is finished: step 2 of 2. Nothing was changed; to train on: "
        "--resume --set train.steps=4\n"
    )
    assert contents(given.folder) == before


def test_other_data_or_another_model_cannot_be_resumed_with(tmp_path: Path):
    """What differs is named where the run says its own; the run stays as it was."""
    given = runs.settings(tmp_path / "run", steps=2)
    runs.run(given)
    before = contents(given.folder)
    longer = runs.changed(given, "train", steps=3)
    other = runs.changed(longer, "model", hidden_size=24, layers=1)
    sizes = (
        r"--resume with model\.layers = 1 \(was 2\), model\.hidden_size = 24 \(was 16\)\..*"
        r"Write instead: model\.layers = 2, model\.hidden_size = 16, or --overwrite"
    )
    seed = r"train\.seed = 0 \(now 5\)"
    for wrong, said in ((runs.changed(longer, "train", seed=5), seed), (other, sizes)):
        with pytest.raises(InputError, match=said):
            loop.train(wrong, alone(), RESUME)
    assert contents(given.folder) == before
    (given.folder / "config.toml").unlink()
    with pytest.raises(InputError, match=r"'model/embed\.weight' of shape \(257, 24\)"):
        loop.train(other, alone(), RESUME)


def test_damage_is_answered_with_what_resume_can_follow(tmp_path: Path):
    """The folder to remove is named; without it the same command goes on from the one before."""
    given = runs.settings(tmp_path / "run", steps=4, eval_every=2)
    runs.run(given)
    more = runs.settings(tmp_path / "run", steps=6)
    damaged = given.folder / "checkpoints" / "step-000004"
    for file in damaged.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:-9])
    before = contents(given.folder)
    with pytest.raises(InputError, match="from the checkpoint before") as refused:
        loop.train(more, alone(), RESUME)
    assert f"Write instead: rm -r {damaged}, then the same command" in str(refused.value)
    assert contents(given.folder) == before
    shutil.rmtree(damaged)
    said = runs.shown(alone(), more, RESUME)
    assert "names step-000004, which is no complete checkpoint: step-000002 is" in said
    assert len(read(given.folder)) == 6


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["run_report.loss", "run.metrics.read", "run.dry_twin"])
def test_nothing_fails_a_run_after_its_last_save(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: runs.Capture
):
    """A picture, the report or a prediction fails: a line says so; --resume makes the report."""
    given = runs.settings(tmp_path / "run", steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(f"shardwise.train.{where}", runs.full_disk)
        runs.trained(alone(), given)
    said = capfd.readouterr()
    assert (said.out + said.err).replace("\n", " ").count("No space left on device") == 1
    assert (given.folder / "report.md").exists() == ("metrics" not in where)
    shutil.rmtree(given.folder / "plots")
    runs.run(given, start=RESUME)
    assert run_folder.has_report(given.folder)
    assert "2 of 2" in (given.folder / "report.md").read_text()


@pytest.mark.full
@pytest.mark.parametrize("where", ["run_folder.publish_config", "metrics.keep_until"])
def test_a_full_disk_ends_all_ranks_in_one_paragraph(where: str, tmp_path: Path):
    """What rank 0 alone writes: every rank raises rank 0's error, and the run can be repeated."""
    given = runs.settings(tmp_path / "run", "dp2 ddp fp64", steps=1, warmup=0)
    first, second = run_gloo(2, runs.on_a_full_disk, given, where)
    assert first == second and first[0] == "InputError"
    assert "(No space left on device)" in first[1] and "\n" not in first[1]
    assert len(runs.run(given, 2)) == 1


def test_what_fails_before_its_first_step_can_be_started_again(tmp_path: Path) -> None:
    """Nothing of it could be resumed, so the same command is not refused."""
    given = runs.settings(tmp_path / "run", steps=2)
    with runs.before("loop.steps", runs.full_disk), pytest.raises(OSError, match="No space"):
        loop.train(given, alone())
    with hold_folder(given, RunStart()), pytest.raises(InputError, match="another process is writ"):
        loop.train(given, alone(), RunStart(overwrite=True))
    assert len(runs.run(given)) == 2


def test_what_is_not_a_number_names_step_and_ranks(tmp_path: Path):
    """Rank 1's loss is NaN in step 4: both ranks stop, the checkpoint of 2 stays."""
    given = runs.settings(tmp_path / "run", "dp2 zero2 fp64", save_every=2)
    errors = run_gloo(2, runs.poisoned, given, 1, 4)
    assert errors[0] == errors[1]
    assert "Step 4: the loss is not finite, on rank 1; the first parameter" in errors[0]
    assert str(given.folder / "checkpoints" / "step-000002") in errors[0]
    assert names(given.folder / "checkpoints") == ["step-000002"]


def test_a_step_can_be_left_out(tmp_path: Path):
    """With train.on_nonfinite = "skip": the run ends, and its record and report say which step."""
    given = runs.settings(tmp_path / "run", "dp2 zero1 fp64", on_nonfinite="skip", steps=5)
    assert run_gloo(2, runs.poisoned, given, 1, 4) == ["", ""]
    records = read(given.folder)
    assert [record.skipped for record in records] == [record.step == 4 for record in records]
    assert len(records) == given.train.steps
    assert [math.isfinite(record.loss) for record in records] == [r.step != 4 for r in records]
    assert '"loss": null' in (given.folder / "metrics.jsonl").read_text()
    assert "nan" not in (given.folder / "report.md").read_text()


# --- refused at the start -----------------------------------------------------------------------


def test_memory_that_is_not_there_is_a_paragraph(tmp_path: Path):
    """Where the allocator refuses: how many parameters, and under which plan."""
    given = runs.settings(tmp_path / "run")
    large = runs.changed(given, "model", vocabulary=10**9, hidden_size=10**7, heads=1)
    with pytest.raises(RunError, match=r"Rank 0 ran out of memory .* parameters under '"):
        loop.train(large, alone())
    assert not given.folder.exists()


@pytest.mark.parametrize(
    ("plan", "section", "values", "phrase"),
    [
        ("tp2", "model", {"sequence": 10**9}, r"\d+ tokens with sequences of 1000000000"),
        ("", "train", {"batch": 10**9}, r"train.batch = 1000000000 with \d+ training sequences"),
        ("pp1 1f1b:8", "train", {}, r"1 x 8 microbatches\. Allowed: 8 or more.*batch = 8"),
        ("accumulate:2", "train", {"batch": 1}, r"train\.batch = 1 under the plan"),
        ("", "model", {"vocabulary": 100}, r"model\.vocabulary = 100 for bytes"),
        ("", "model", {"name": "gpt:smal"}, r"Write instead: model\.name = 'gpt:small'"),
        ("", "model", {"hidden_size": 15, "heads": 2}, "hidden_size = 15"),
        ("", "model", {"gate": "switch"}, r"model\.gate = .*model\.experts = 8"),
        ("offload:optim@disk", "train", {"async_save": True}, r"asynchronous save .* on a disk"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_before_memory_is_allocated(
    plan: str,
    section: str,
    values: dict[str, Any],
    phrase: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The process stays as large as it was, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    given = runs.changed(runs.settings(tmp_path / "run", plan), section, **values)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=phrase):
        prepare(given, 2 if "p2" in plan else 1, RunStart())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert not given.folder.exists()


# --- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_comes_again_changes_nothing(number: int):
    """A group of processes and a launcher send it twice; afterwards the handlers are as before."""
    before = signal.signal(number, signal.default_int_handler)  # `nohup` ignores SIGHUP
    with StopSignal() as stop:
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop.received is True and stop.number == number
    assert signal.signal(number, before) is signal.default_int_handler


def test_a_second_interrupt_ends_the_program(monkeypatch: pytest.MonkeyPatch):
    """Of a person, not a copy of the first; while a process may leave alone, the first one does."""
    now = iter([10.0, 10.1, 20.0, 21.0, 30.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with StopSignal() as stop:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.number == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with StopSignal(leaving=True) as stop:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received


def test_what_nohup_ignores_stays_ignored():
    """SIGHUP of a terminal that closes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.received
    finally:
        signal.signal(signal.SIGHUP, before)
