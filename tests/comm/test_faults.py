"""Ranks that freeze, hang, abort or linger are named and killed, or told what they wait for."""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import filesystem

from shardwise.comm import call_stack, hang_detector, watch
from shardwise.comm.hang_detector import HangDetector
from shardwise.comm.heartbeat import Heartbeat, HeartbeatMonitor, find_hang
from shardwise.comm.host import identity
from shardwise.comm.launch import spawn
from shardwise.comm.limits import Limits, read_limits
from shardwise.comm.move import all_reduce, receive
from shardwise.comm.outcome import LaunchOutcome
from shardwise.comm.status_dir import StatusDir, open_status_dir, sweep
from shardwise.comm.world import init
from shardwise.core.errors import InputError, RankError
from tests.comm.test_launch import is_alive

HERE = 7  # the number of a host
LIMITS = Limits(frozen_s=10.0)


@pytest.fixture
def sleeper() -> "Iterator[subprocess.Popen[bytes]]":
    with subprocess.Popen(["sleep", "600"]) as process:
        while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "S":
            time.sleep(0.01)
        yield process
        process.kill()


def silence(monitor: HeartbeatMonitor, beat: Heartbeat) -> tuple[float, str]:
    """After how many seconds without another beat the rank is frozen, and why."""
    monitor.receive(beat, 1.0)
    for second in range(1, 101):
        if why := monitor.receive(beat, 1.0):
            return second, why
    return float("inf"), ""


def test_a_process_that_is_stopped_is_frozen_after_the_limit(sleeper: "subprocess.Popen[bytes]"):
    """The system says that it is stopped, so nobody waits longer to be sure."""
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    found = silence(HeartbeatMonitor(LIMITS, HERE), Heartbeat(1, sleeper.pid, HERE))
    assert found == (10, "is stopped (by SIGSTOP or the like)")


@pytest.mark.parametrize(("host", "why"), [(HERE, "does not run"), (8, "is on another host")])
def test_a_process_that_may_be_frozen_is_warned_of_first(
    host: int, why: str, sleeper: "subprocess.Popen[bytes]"
):
    """It sleeps, or is out of sight: a warning after the limit, the end after four times that."""
    monitor, beat = (
        HeartbeatMonitor(LIMITS, HERE),
        Heartbeat(1, sleeper.pid, host, calls="a.py:3 in f"),
    )
    monitor.receive(beat, 1.0)
    warned = [monitor.receive(beat, 1.0) or monitor.warning(3) for _ in range(12)]
    (warning,) = filter(None, warned)
    assert 9 <= warned.index(warning) <= 11
    assert f"rank 3 (process {sleeper.pid})" in warning
    assert "a.py:3 in f" in warning
    found = silence(monitor, beat)
    assert found[0] in (27, 28, 29) and found[1].startswith(why)


def test_a_process_that_computes_without_a_beat_is_not_frozen():
    """A long call into C that keeps the interpreter's lock uses a processor."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            monitor, beat = HeartbeatMonitor(LIMITS, HERE), Heartbeat(1, busy.pid, HERE)
            assert all(used_processor(busy.pid) and not monitor.receive(beat, 1) for _ in range(50))
        finally:
            busy.kill()


def used_processor(pid: int) -> bool:
    """Wait until the process has used more processor time."""
    before = ticks(pid)
    while ticks(pid) == before:
        time.sleep(0.005)
    return True


def ticks(pid: int) -> int:
    """The processor time of a process, in units of the system's clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_listener_that_did_not_run_has_heard_no_silence(sleeper: "subprocess.Popen[bytes]"):
    """After an hour in which the listener was stopped too, a rank has the whole limit again."""
    monitor, beat = HeartbeatMonitor(LIMITS, HERE), Heartbeat(1, sleeper.pid, HERE)
    monitor.receive(beat, 1.0)
    assert monitor.receive(beat, 3600.0) == "" and monitor.warning(0) == ""


def test_the_rank_that_others_wait_for_is_the_one_that_hangs():
    """Ranks that wait are not the cause, and every rank's place is told."""
    places = {
        0: Heartbeat(9, 1, calls="a.py:1 in f", waits_s=60.0),
        1: Heartbeat(9, 2, calls="b.py:2 in g"),
    }
    assert find_hang(places, 61.0) is None
    rank, text = find_hang(places, 60.0) or (0, "")
    assert rank == 1
    assert "rank 0 has waited for 60 s" in text and "rank 1 has not joined" in text
    assert "rank 0: a.py:1 in f\n  rank 1: b.py:2 in g" in text


def hold_the_lock_then_stop() -> None:
    """Rank 0 computes in C without giving up the interpreter's lock; then rank 1 is stopped."""
    world = init("cpu")
    if world.rank == 0:
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            sum(range(10**8))
    all_reduce(torch.ones(1), world.everyone)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_reduce(torch.ones(1), world.everyone)


@pytest.mark.full
def test_a_rank_that_is_stopped_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    """It is named, with its place; a slow rank that gives no beat for as long is left alone."""
    monkeypatch.setenv("SHARDWISE_FROZEN_S", "0.5")
    with pytest.raises(RankError, match="is stopped") as caught:
        spawn(hold_the_lock_then_stop, 2)
    assert caught.value.rank == 1
    assert "in hold_the_lock_then_stop" in str(caught.value)


def hang_on_1() -> None:
    world = init("cpu")
    all_reduce(torch.ones(1), world.everyone)  # opens the mailboxes, in which rank 0 waits
    if world.rank == 1:
        time.sleep(60)
    all_reduce(torch.ones(1), world.everyone)


def test_a_rank_that_hangs_is_told_with_the_place_of_every_rank(monkeypatch: pytest.MonkeyPatch):
    """Its process sends heartbeats, but does not join the collective that the others are in."""
    monkeypatch.setenv("SHARDWISE_PATIENCE_S", "2")
    with pytest.raises(RankError, match="rank 0 has waited for 2 s") as caught:
        spawn(hang_on_1, 2)
    assert caught.value.rank == 1
    first, last = str(caught.value).splitlines()[-2:]
    assert "rank 0: " in first and "in hang_on_1 > " in first and "comm/shared.py" in first
    assert "rank 1: " in last and last.endswith("in hang_on_1")


def abort_or_linger(folder: Path) -> int:
    rank = int(os.environ["RANK"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    atexit.register(time.sleep, 60) if rank else atexit.register(os.abort)
    return rank


@pytest.mark.full
@pytest.mark.usefixtures("interpreters")
def test_what_a_process_does_after_its_result_does_not_undo_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """One rank aborts at its exit, the other does not end: the results of both stand."""
    monkeypatch.setattr(watch, "_LINGER_S", 1.0)
    assert spawn(abort_or_linger, 2, (tmp_path,)) == [0, 1]
    assert not any(is_alive(int(file.read_text())) for file in tmp_path.glob("pid-*"))
    assert "after it had returned" in capfd.readouterr().err


def test_directories_of_dead_launchers_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: "subprocess.Popen[bytes]"
):
    """So are ranks of theirs that live on, stopped, and semaphores; those of a live one stay."""
    sleeper.send_signal(signal.SIGSTOP)
    memory = tmp_path.with_name("memory")
    memory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("shardwise.comm.status_dir._SEMAPHORES", memory)
    names = ("dead", "live", "foreign", "unknown")
    dead, live, foreign, unknown = (tmp_path / f"shardwise-{name}" for name in names)
    with subprocess.Popen(["sleep", "600"]) as launcher:
        told = {dead: identity(launcher.pid), live: identity(os.getpid())}
        told[foreign] = identity(launcher.pid).replace("-", "+")  # another boot, or container
        told[unknown] = f"{launcher.pid} 0 "  # of a system that tells nothing about processes
        for folder, text in told.items():
            folder.mkdir()
            (folder / "launcher").write_text(text)
            (memory / f"sem.{folder.name}-a1").touch()
        (dead / "0.pid").write_text(identity(sleeper.pid))
        sweep(tmp_path)
        assert len(list(tmp_path.iterdir())) == 4
        launcher.kill()
    with open_status_dir(1) as status:
        assert set(tmp_path.iterdir()) == {live, foreign, unknown, status.folder}
        assert identity(os.getpid()) == (status.folder / "launcher").read_text()
        lock: Any = multiprocessing.get_context("spawn").Lock()
        assert lock._semlock.name.startswith(f"/{status.folder.name}-")
    left = {f"sem.{folder.name}-a1" for folder in (live, foreign, unknown)}
    assert {file.name for file in memory.iterdir()} == left
    assert sleeper.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(("code", "hint"), [(-signal.SIGKILL, False), (1, True)])
def test_a_rank_that_ends_before_its_start_is_told_why(tmp_path: Path, code: int, hint: bool):
    """The main script is suspected only where the process ended by itself."""
    outcome = LaunchOutcome(died=(1, code))
    text = outcome.first_failure(StatusDir(tmp_path, 2)).text
    assert ("__name__" in text) == hint


@pytest.mark.parametrize(
    "lost",
    [
        "RuntimeError: rank 1 has left, but this rank waits for its message in send on axis pp",
        "RuntimeError: the connection to rank 1 failed in all_reduce on axis dp, called by f",
    ],
)
def test_a_rank_that_lost_another_is_not_the_cause(tmp_path: Path, lost: str):
    """The one that raised is named, even if it recorded its error later."""
    status = StatusDir(tmp_path, 2)
    status.fail(0, lost)
    status.fail(1, "ValueError: mine alone")
    assert LaunchOutcome().first_failure(status).rank == 1


def test_a_beat_is_read_as_it_was_sent(tmp_path: Path):
    """Also a shorter one after a longer; heartbeats are not among the file names.

    Of a stack that is too long its end is sent.
    """
    status = StatusDir(tmp_path, 1)
    for beat in (Heartbeat(1, 2, 3, "a" * 500, 0.5), Heartbeat(2, 2, 3, "b")):
        status.send_heartbeat(0, beat)
        assert status.heartbeats() == {0: beat}
    status.send_heartbeat(0, Heartbeat(3, 2, 3, "é" * 1000 + "b"))
    assert status.heartbeats()[0].calls == "é" * 499 + "b"
    assert not status.file_names()


def test_no_thread_outlives_a_rank_s_program(tmp_path: Path):
    """One that dropped the last reference to a process group at exit would abort the process."""
    detector = HangDetector(StatusDir(tmp_path, 2), 0, ())
    detector.stop()
    assert not any(thread.is_alive() for thread in detector.threads)
    assert detector.status.heartbeats()[0].left


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_limits_are_numbers_of_seconds(text: str):
    """Anything else in the environment is refused by name."""
    with pytest.raises(InputError, match=f"SHARDWISE_PATIENCE_S='{text}'"):
        read_limits({"SHARDWISE_PATIENCE_S": text})
    assert read_limits({"SHARDWISE_PATIENCE_S": "90"}) == Limits(patience_s=90.0)


def take_fewer_steps_on_1(closes: bool) -> None:
    world = init("cpu")
    for step in range(3):
        if step < 2 or world.rank == 0:
            all_reduce(torch.ones(1), world.everyone)
    if closes:
        world.close()
        time.sleep(60)


@pytest.mark.full
@pytest.mark.parametrize("closes", [False, True])
def test_a_rank_that_waits_for_one_that_is_done_is_told(closes: bool):
    """A loader that gives one rank fewer batches is an error, not a program that hangs."""
    with pytest.raises(
        RankError,
        match=r"rank 1 has left, but .*all_reduce on axis world, called by take_fewer",
    ) as caught:
        spawn(take_fewer_steps_on_1, 2, (closes,))
    assert caught.value.rank == 0


def wait_for_each_other() -> None:
    """Each rank waits for a message of the other."""
    hang_detector._MORE_POLLS = 8  # 4 s
    world = init("cpu")
    receive(torch.ones(1), world.everyone, 1 - world.rank)


@pytest.mark.full
def test_ranks_that_wait_for_each_other_are_told():
    """None of them is done, and none would ever be."""
    with pytest.raises(RankError, match=r"every rank is waiting in a collective") as caught:
        spawn(wait_for_each_other, 2)
    assert "in wait_for_each_other" in str(caught.value)


def meet_without_1(alone: bool) -> None:
    """Rank 1 returns before anybody has met."""
    world = init("cpu")
    if world.rank == 1:
        return
    if alone:
        time.sleep(6)
    else:
        all_reduce(torch.ones(1), world.everyone)


def test_ranks_that_wait_for_one_that_never_came_are_told():
    """Nobody else can come to what they wait for: an error with its place, within seconds."""
    with pytest.raises(RankError, match=r"rank 1 has ended the program.*same number") as caught:
        spawn(meet_without_1, 3, (False,))
    assert caught.value.rank != 1
    assert "in meet_without_1" in str(caught.value)
    assert "worker.py" not in str(caught.value)


def test_writing_a_checkpoint_is_no_waiting_for_others():
    """A rank that torch's own modules keep busy is not where others have to come."""
    assert distributed_c10d.__file__.startswith(call_stack._COLLECTIVE_FILES)
    assert not filesystem.__file__.startswith(call_stack._COLLECTIVE_FILES)


@pytest.mark.full
def test_a_rank_may_go_on_alone_for_as_long_as_it_likes():
    """What a rank does without the others is none of their business."""
    assert spawn(meet_without_1, 2, (True,)) == [None, None]
