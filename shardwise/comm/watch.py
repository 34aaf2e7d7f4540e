"""The launcher's watch over its ranks: it sees the first failure, and ends those that remain."""

import os
import signal
import sys
import threading
import time
from collections.abc import Collection

from shardwise.comm.beat import Listener, hung
from shardwise.comm.ending import LaunchOutcome
from shardwise.comm.host import host_number
from shardwise.comm.limits import read_limits
from shardwise.comm.status_dir import Room

#: Between two looks into the room: of ranks as many as processors each look holds one up.
GLANCE_S = 0.05
#: How long the ranks may take to save and leave after SIGTERM or SIGINT.
SAVE_S = 60.0
#: How long the others may still write down what happened to them after a first failure.
_GRACE_S = 1.0
#: How long a process may take to end once the results of all ranks are there.
_LINGER_S = 20.0


def watch(room: Room, over: threading.Event, ended: LaunchOutcome, signals: list[int]) -> None:
    """Return when the agent has ended, or when the time has come to end the ranks."""
    deadline = float("inf")
    told: set[int] = set()  # ranks that the signal was passed on to; others may yet begin
    seen, noted, working = frozenset[str](), 0, dict[int, int]()
    pulse = _Pulse(room)
    while time.monotonic() < deadline and not over.wait(GLANCE_S):
        if signals:
            deadline = min(deadline, time.monotonic() + SAVE_S)
            told |= _send(room, signal.SIGTERM, besides=told)
        if len(signals) > 1:  # asked twice: now
            ended.hurried = not noted and ended.missing is None
            return
        pulse.feel(working)
        if (word := room.word()) != seen:
            seen, noted = word, len(room.notes())
            finished = room.finished()
            working = {rank: pid for rank, pid in room.pids().items() if rank not in finished}
            if len(finished) == room.ranks:  # a process that lingers after its result is killed
                deadline = min(deadline, time.monotonic() + _LINGER_S)
        ended.missing = _gone(room, working) if ended.missing is None else ended.missing
        if noted or ended.missing is not None:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if noted == room.ranks:
            return
    told_all = bool(signals) and ended.missing is None
    ended.overdue = told_all and not over.is_set() and not room.notes()


class _Pulse:
    """The beats of all ranks, heard once a beat."""

    def __init__(self, room: Room) -> None:
        self.room, self.limits, self.heard = room, read_limits(), time.monotonic()
        self.listeners = [Listener(self.limits, host_number()) for _ in range(room.ranks)]

    def feel(self, working: Collection[int]) -> None:
        """Write down the failure of a rank in `working` that is frozen or hangs."""
        elapsed_s = time.monotonic() - self.heard
        if elapsed_s < self.limits.beat_s:
            return
        self.heard += elapsed_s
        beats = self.room.beats()
        for rank in working:
            listener = self.listeners[rank]
            why = listener.hear(beats.get(rank), elapsed_s)
            if why:
                self.room.fail(rank, listener.frozen(why))
            elif warning := listener.warning(rank):
                print(warning, file=sys.stderr)
        found = hung(beats, self.limits.patience_s)
        if found and not self.room.notes():
            self.room.fail(*found)


def _gone(room: Room, working: dict[int, int]) -> int | None:
    """A rank whose process has ended though its function has not returned."""
    over = {rank for rank, pid in working.items() if _is_over(pid)}
    return min(over - room.finished(), default=None) if over else None


def _is_over(pid: int) -> bool:
    """Whether a child has ended; it stays there for the agent to wait for."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # the agent has waited for it already
        return True


def _send(room: Room, number: int, besides: set[int] | frozenset[int] = frozenset()) -> set[int]:
    """Signal the ranks that have begun, but for some; those that were reached."""
    reached = set()
    for rank, pid in room.pids().items():
        if rank in besides or _is_over(pid):
            continue
        try:
            os.kill(pid, number)
            reached.add(rank)
        except ProcessLookupError:
            continue
    return reached


def end_all(room: Room, ended: LaunchOutcome, over: threading.Event) -> None:
    """Kill the ranks, unless the agent has seen them all end."""
    if over.is_set():
        return
    room.close()
    give_up = time.monotonic() + 3.0
    while time.monotonic() < give_up:
        ended.killed |= _send(room, signal.SIGKILL)
        if over.wait(GLANCE_S):
            return
