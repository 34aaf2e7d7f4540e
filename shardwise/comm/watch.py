"""The launcher's watch over its ranks: it finds the first failure, then kills the other ranks."""

import os
import signal
import sys
import threading
import time
from collections.abc import Collection

from shardwise.comm.heartbeat import HeartbeatMonitor, find_hang
from shardwise.comm.host import host_number
from shardwise.comm.limits import read_limits
from shardwise.comm.outcome import LaunchOutcome
from shardwise.comm.status_dir import StatusDir

#: Time between two polls of the status directory.  A poll takes a processor from the ranks.
POLL_S = 0.05
#: How long the ranks may take to save and exit after SIGTERM or SIGINT.
SAVE_S = 60.0
#: How long other ranks may still record their errors after the first failure.
_GRACE_S = 1.0
#: How long a process may take to exit once all ranks have results.
_LINGER_S = 20.0


def watch(
    status: StatusDir, exited: threading.Event, outcome: LaunchOutcome, signals: list[int]
) -> None:
    """Return when all processes have exited, or when it is time to kill those that remain."""
    deadline = float("inf")
    signalled: set[int] = set()  # a rank that starts later is signalled in a later poll
    seen, failed, working = frozenset[str](), 0, dict[int, int]()
    heartbeats = _Heartbeats(status)
    while time.monotonic() < deadline and not exited.wait(POLL_S):
        if signals:
            deadline = min(deadline, time.monotonic() + SAVE_S)
            signalled |= _signal(status, signal.SIGTERM, besides=signalled)
        if len(signals) > 1:  # a second signal: kill now
            outcome.hurried = not failed and outcome.missing is None
            return
        heartbeats.check(working)
        if (names := status.file_names()) != seen:
            seen, failed = names, len(status.failures())
            finished = status.finished()
            working = {rank: pid for rank, pid in status.pids().items() if rank not in finished}
            if len(finished) == status.ranks:
                deadline = min(deadline, time.monotonic() + _LINGER_S)
        if outcome.missing is None:
            outcome.missing = _exited_early(status, working)
        if failed or outcome.missing is not None:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failed == status.ranks:
            return
    in_time = exited.is_set() or outcome.missing is not None
    outcome.overdue = bool(signals) and not in_time and not status.failures()


class _Heartbeats:
    """The heartbeat monitors of all ranks."""

    def __init__(self, status: StatusDir) -> None:
        self.status, self.limits, self.checked = status, read_limits(), time.monotonic()
        host = host_number()
        self.monitors = [HeartbeatMonitor(self.limits, host) for _ in range(status.ranks)]

    def check(self, working: Collection[int]) -> None:
        """Record the failure of a rank in `working` that is frozen or hangs."""
        elapsed_s = time.monotonic() - self.checked
        if elapsed_s < self.limits.heartbeat_s:
            return
        self.checked += elapsed_s
        beats = self.status.heartbeats()
        for rank in working:
            monitor = self.monitors[rank]
            why = monitor.receive(beats.get(rank), elapsed_s)
            if why:
                self.status.fail(rank, monitor.frozen(why))
            elif warning := monitor.warning(rank):
                print(warning, file=sys.stderr)
        found = find_hang(beats, self.limits.patience_s)
        if found and not self.status.failures():
            self.status.fail(*found)


def _exited_early(status: StatusDir, working: dict[int, int]) -> int | None:
    """A rank whose process has exited before its function returned."""
    exited = {rank for rank, pid in working.items() if _has_exited(pid)}
    return min(exited - status.finished(), default=None) if exited else None


def _has_exited(pid: int) -> bool:
    """Whether a child process has exited.  Leaves it unreaped, for the elastic agent."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # the agent has reaped it already
        return True


def _signal(
    status: StatusDir, number: int, besides: set[int] | frozenset[int] = frozenset()
) -> set[int]:
    """Signal the running ranks except those in `besides`; returns the ranks signalled."""
    reached = set()
    for rank, pid in status.pids().items():
        if rank in besides or _has_exited(pid):
            continue
        try:
            os.kill(pid, number)
            reached.add(rank)
        except ProcessLookupError:
            continue
    return reached


def kill_all(status: StatusDir, outcome: LaunchOutcome, exited: threading.Event) -> None:
    """Kill the ranks that are left, unless the agent has seen all of them exit."""
    if exited.is_set():
        return
    status.close()
    give_up = time.monotonic() + 3.0
    while time.monotonic() < give_up:
        outcome.killed |= _signal(status, signal.SIGKILL)
        if exited.wait(POLL_S):
            return
