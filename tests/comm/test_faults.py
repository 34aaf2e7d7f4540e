"""Ranks that freeze, hang, abort, linger, or wait for what cannot come are named and killed."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import filesystem

from shardwise.comm.move import all_reduce
from shardwise.comm.start import launch, peers
from shardwise.comm.start.excepthook import Failure, first_cause
from shardwise.comm.start.launch import spawn
from shardwise.comm.start.peers import (
    CallStack,
    Heartbeat,
    HeartbeatMonitor,
    find_hang,
    reported_failure,
    watch_peers,
)
from shardwise.comm.start.rendezvous import Limits, host_number
from shardwise.comm.world import init
from shardwise.core.errors import RankError
from tests.comm.test_launch import any_alive

HERE = 7  # the number of a host
LIMITS = Limits(frozen_s=10.0)


# --- heartbeats -----------------------------------------------------------------------------------


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


def test_when_a_process_without_a_beat_is_frozen(sleeper: "subprocess.Popen[bytes]"):
    """After the limit if it is stopped, after three if it may be slow, of a listener that runs."""
    monitor, beat = HeartbeatMonitor(LIMITS, HERE), Heartbeat(1, sleeper.pid, HERE)
    monitor.receive(beat, 1.0)
    assert monitor.receive(beat, 3600.0) == ""
    for host, text in ((HERE, "does not run"), (8, "is on another host")):
        monitor, beat = HeartbeatMonitor(LIMITS, HERE), Heartbeat(1, sleeper.pid, host)
        second, why = silence(monitor, beat)
        assert second in (30, 31) and text in why
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    beat = Heartbeat(1, sleeper.pid, HERE, calls="a.py:3 in f")
    second, why = silence(HeartbeatMonitor(LIMITS, HERE), beat)
    assert second == 10
    assert f"its process {sleeper.pid} is stopped (by SIGSTOP or the like)" in why
    assert why.endswith("a.py:3 in f")


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
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_the_rank_that_others_wait_for_is_the_one_that_hangs():
    """Ranks that wait are not the cause, and every rank's place is told."""
    places = {
        0: Heartbeat(9, 1, calls="a.py:1 in f", waits_s=60.0),
        1: Heartbeat(9, 2, calls="b.py:2 in g"),
    }
    assert find_hang(places, 61.0) is None
    rank, text = find_hang(places, 60.0) or (0, "")
    assert rank == 1
    assert "rank 0 has waited for 60 s" in text and "rank 1 did not join" in text
    assert "rank 0: a.py:1 in f\n  rank 1: b.py:2 in g" in text


@pytest.mark.parametrize(
    ("idle_s", "left", "said"),
    [
        (9.0, False, None),
        (10.0, False, "every rank is waiting in a collective that no other rank will join"),
        (2.0, True, None),
        (3.0, True, "rank 2 ended the program, and this collective waits for all ranks"),
    ],
)
def test_ranks_that_all_wait_are_told(idle_s: float, left: bool, said: str | None):
    """Earlier if one of them has left, since none can come late then."""
    waiting = Heartbeat(9, 1, calls="a.py:1 in f", waits_s=idle_s, idle_s=idle_s)
    places = {0: waiting, 1: waiting} | ({2: Heartbeat(9, 3, left=True)} if left else {})
    found = find_hang(places, 600.0)
    assert found is None if said is None else (found is not None and found[1].startswith(said))


def test_a_rank_that_waits_for_its_gpu_waits_for_others(monkeypatch: pytest.MonkeyPatch):
    """It stays in a call after NCCL's collectives; one that torch's modules keep busy does not."""
    monkeypatch.setattr("shardwise.comm.start.peers._GPU_S", 0.05)
    monkeypatch.setattr("shardwise.comm.start.peers._is_busy", lambda gpu: gpu == 3)
    release, waits_s = threading.Event(), dict[int | None, float]()
    waiting = threading.Thread(target=release.wait)
    waiting.start()
    for gpu in (3, None):
        assert waiting.ident is not None
        stack = CallStack(waiting.ident, gpu)
        for _ in range(3):
            waits_s[gpu], _ = stack.waits()
            time.sleep(0.06)
        assert "in wait" in stack.calls()
    release.set()
    waiting.join()
    assert waits_s[3] > 0.05 and waits_s[None] == 0.0
    assert distributed_c10d.__file__.startswith(peers._COLLECTIVE_FILES)
    assert not filesystem.__file__.startswith(peers._COLLECTIVE_FILES)


def test_no_thread_outlives_a_rank_s_program():
    """One that dropped the last reference to a process group at exit would abort the process."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    watch = watch_peers(store, 0, 2, Limits(frozen_s=1.0), None)
    assert watch is not None
    watch.stop()
    assert not any(thread.is_alive() for thread in watch.threads)
    assert watch._heartbeats([0])[0].left


def test_a_rank_beside_one_that_never_begins_is_watched(monkeypatch: pytest.MonkeyPatch):
    """Rank 1 of three is dead, and rank 2 never begins."""
    monkeypatch.setattr(peers, "launched", lambda: True)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    dead = subprocess.Popen(["true"])
    dead.wait()
    beat = json.dumps(asdict(Heartbeat(1, dead.pid, host_number())))
    PrefixStore("shardwise/heartbeats", store).set("beat/1", beat)
    watch = watch_peers(store, 0, 3, Limits(frozen_s=0.2), None)
    assert watch is not None
    try:
        store.wait(["shardwise/heartbeats/report"], timedelta(seconds=30))
    finally:
        watch.stop()
    failed = reported_failure(store)
    assert failed is not None and failed[0] == 1 and "has ended" in failed[1]


# --- ranks of spawn -------------------------------------------------------------------------------


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
    assert "rank 0: " in first and "in hang_on_1 > " in first and "gloo/shared.py" in first
    assert "rank 1: " in last
    assert last.endswith("in hang_on_1; its last calls: all_reduce world (start)")


def abort_or_linger(folder: Path) -> int:
    rank = int(os.environ["RANK"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    atexit.register(time.sleep, 60) if rank else atexit.register(os.abort)
    return rank


@pytest.mark.full
@pytest.mark.usefixtures("interpreters")
def test_what_a_process_does_after_its_result_does_not_undo_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One rank aborts at its exit, the other does not end: the results of both stand."""
    monkeypatch.setattr(launch, "_LINGER_S", 1.0)
    assert spawn(abort_or_linger, 2, (tmp_path,)) == [0, 1]
    assert not any_alive(tmp_path)


def take_fewer_steps_on_1() -> None:
    world = init("cpu")
    for step in range(3):
        if step < 2 or world.rank == 0:
            all_reduce(torch.ones(1), world.everyone)


def meet_without_1() -> None:
    """Rank 1 returns before anybody has met."""
    world = init("cpu")
    if world.rank != 1:
        all_reduce(torch.ones(1), world.everyone)


FEWER = r"rank 1 (has left, but .*all_reduce on axis world, called by take_fewer|ended the program)"


@pytest.mark.parametrize(
    ("ranks", "function", "said"),
    [
        (3, meet_without_1, r"rank 1 ended the program.*same number(?s:.)*in meet_without_1"),
        pytest.param(2, take_fewer_steps_on_1, FEWER, marks=pytest.mark.full),
    ],
)
def test_ranks_that_wait_for_what_cannot_come_are_told_where(ranks: int, function: Any, said: str):
    """Nobody else can come to what they wait for: an error with its place, within seconds."""
    with pytest.raises(RankError, match=said) as caught:
        spawn(function, ranks)
    assert caught.value.rank != 1
    assert function.__name__ in str(caught.value)
    assert "worker.py" not in str(caught.value)


@pytest.mark.parametrize(
    "lost",
    [
        "RuntimeError: rank 1 has left, but this rank waits for its message in send on axis pp",
        "RuntimeError: the connection to rank 1 failed in all_reduce on axis dp, called by f",
    ],
)
def test_a_rank_that_lost_another_is_not_the_cause(lost: str):
    """The one that raised is named, even if it recorded its error later."""
    own = Failure(2, 1, "ValueError: mine alone")
    assert first_cause([Failure(1, 0, lost), own]) == own
