"""The end of a run: by a signal, or after its last save, when nothing fails it."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from shardwise.checkpoint.folder import all_in
from shardwise.comm.ledger import Key
from shardwise.comm.start.stop_signal import SIGNALS, StopSignal
from shardwise.comm.world import World, alone
from shardwise.core.errors import RankError
from shardwise.train import run_folder as folder
from shardwise.train import run_lock as lock
from shardwise.train.prepare import RunStart
from shardwise.train.stop import any_rank, ranks_with
from tests.pool import run_gloo, run_threads
from tests.train import runs


@pytest.mark.parametrize("where", ["plots.loss", "metrics.read", "predict"])
def test_nothing_fails_a_run_after_its_last_save(
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A picture, the report or a prediction fails: a line says so; --resume makes the report."""
    given = runs.settings(tmp_path / "run", steps=2)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    places = {
        "predict": "shardwise.train.end.prediction_of",
        "metrics.read": "shardwise.train.end.metrics.read",
    }
    with monkeypatch.context() as patch:
        patch.setattr(places.get(where, f"shardwise.train.report.{where}"), full)
        trained = runs.trained(alone(), given, None)
    said = capfd.readouterr()
    assert (said.out + said.err).replace("\n", " ").count("No space left on device") == 1
    assert (given.folder / "report.md").exists() == (where != "metrics.read")
    shutil.rmtree(given.folder / "plots")
    runs.run(given, start=RunStart(resume=True))
    assert folder.has_report(given.folder)
    assert "2 of 2" in (given.folder / "report.md").read_text()
    assert trained or where == "metrics.read"


def test_old_checkpoints_that_stay_do_not_fail_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning at each save, the last one too, and the report is made."""
    given = runs.settings(tmp_path / "run", steps=3, save_every=1, keep=1)

    def busy(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("shardwise.checkpoint.folder.remove", busy)
    with pytest.warns(UserWarning, match="could not be removed .*busy"):
        runs.run(given)
    assert folder.has_report(given.folder)
    assert len(all_in(given.folder / "checkpoints")) == 3


@pytest.mark.full
@pytest.mark.parametrize("where", ["sample_text", "publish_report"])
def test_a_signal_after_the_last_step_ends_without_a_report(where: str, tmp_path: Path) -> None:
    """Rank 0 alone or all ranks: the checkpoint is there, and --resume makes the report."""
    given = runs.settings(tmp_path / "run", "dp2 zero3 fp64", steps=2)
    run_gloo(2, runs.stopped_at_the_end, given, 0, where)
    assert not (given.folder / "report.md").exists()
    assert all_in(given.folder / "checkpoints")[-1].name == "step-000002"
    assert len(runs.run(given, 2, RunStart(resume=True))) == 2
    assert folder.has_report(given.folder)


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("run_folder.publish_config", "InputError"),
        ("metrics.keep_until", "InputError"),
    ],
)
def test_a_full_disk_ends_all_ranks_in_one_paragraph(where: str, kind: str, tmp_path: Path) -> None:
    """What rank 0 alone writes: every rank raises rank 0's error, and the run can be repeated."""
    given = runs.settings(tmp_path / "run", "dp2 ddp fp64", steps=1, warmup=0)
    first, second = run_gloo(2, runs.on_a_full_disk, given, where)
    assert first == second and first[0] == kind
    assert "(No space left on device)" in first[1] and "\n" not in first[1]
    assert len(runs.run(given, 2)) == 1


@pytest.mark.full
def test_a_second_start_leaves_the_first_run_alone(tmp_path: Path) -> None:
    """All ranks of the second get the same refusal, also with --overwrite."""
    given = runs.settings(tmp_path / "run", "dp2 ddp fp64", steps=2)
    with lock.hold(given, RunStart()), pytest.raises(RankError, match="another run is writing"):
        run_gloo(2, runs.trained, given, RunStart(overwrite=True))
    assert len(runs.run(given, 2)) == 2
    assert not (given.folder / "run.lock").exists()


def agreed(world: World, wishing: list[int]) -> tuple[bool, list[int], dict[Key, int]]:
    flag = world.rank in wishing
    found = any_rank(flag, world), ranks_with(flag, world)
    return *found, {key: tally.sent_bytes for key, tally in world.ledger.lines.items()}


def test_one_rank_is_enough() -> None:
    """All four ranks hear of the one that was asked, and know which it was."""
    assert [result[:2] for result in run_threads(4, agreed, [2])] == [(True, [2])] * 4
    assert [result[:2] for result in run_threads(4, agreed, [])] == [(False, [])] * 4


def test_agreement_is_in_the_ledger() -> None:
    """Twice an all-reduce of four bytes over four ranks: 2 * 2 * 4 * 3/4 bytes, phase check."""
    for *_, lines in run_threads(4, agreed, [0]):
        assert lines == {Key("world", "all_reduce", "check"): 12}


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_comes_again_changes_nothing(number: int) -> None:
    """A group of processes and a launcher send it twice; afterwards the handlers are as before."""
    before = signal.getsignal(number)
    with StopSignal() as stop:
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop.received is True and stop.number == number
    assert signal.getsignal(number) is before


def test_a_second_interrupt_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a person: a copy comes at once. SIGTERM and SIGINT of one request end nothing either."""
    now = iter([10.0, 10.1, 20.0, 21.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with StopSignal() as stop:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.number == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_process_that_nobody_waits_for_leaves_at_once() -> None:
    """While it may leave alone, the signal ends what it is doing, and is remembered."""
    with StopSignal(leaving=True) as stop:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received


def test_what_nohup_ignores_stays_ignored() -> None:
    """SIGHUP of a terminal that closes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.received
    finally:
        signal.signal(signal.SIGHUP, before)
