"""How a launch of several ranks ended: their results, or which rank failed first and why."""

import re
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from shardwise.comm.status_dir import Failure, StatusDir

#: Errors of a rank whose peer is gone.  They are never the cause if another rank has one.
LOST_CONNECTION = re.compile(
    r"closed by peer|reset by peer|Connection reset|Broken pipe|pair\.cc|recvValue failed"
    r"|Failed to recv|ncclRemoteError|remote process exited"
    r"|rank \d+( of the group)? (is gone: process|has left, but)|the connection to .* failed in"
)


@dataclass
class LaunchOutcome:
    """The results of all ranks, or what is known about the first failure."""

    results: dict[int, bytes] | None = None
    died: tuple[int, int] | None = None  # rank and exit code, from the elastic agent
    missing: int | None = None  # the first rank that exited before its function returned
    killed: set[int] = field(default_factory=set)
    error: BaseException | None = None  # an error of the agent itself
    overdue: bool = False  # the ranks were killed because they did not exit in time after a signal
    hurried: bool = False  # the ranks were killed by a second signal, and none had failed

    def record(self, agent: Any, status: StatusDir) -> None:
        """Record the results, and what the elastic `agent` returned or raised.

        Results stand even if a process aborts or hangs after it wrote its own.
        """
        self.results = status.results()
        if isinstance(agent, ChildFailedError):
            rank, failure = agent.get_first_failure()
            self.died = (rank, failure.exitcode)
        elif isinstance(agent, BaseException):
            self.error = agent

    def late_exits(self) -> str:
        """Which processes aborted or were killed after all results were there; "" if none."""
        if self.results is None:
            return ""
        text = ""
        if self.died is not None and self.died[0] not in self.killed:
            rank, code = self.died
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            text += f"rank {rank} ended with {how} after it had returned; its result stands\n"
        for rank in sorted(self.killed):
            text += f"rank {rank} was killed: its process did not end after it had returned\n"
        return text

    def first_failure(self, status: StatusDir) -> Failure:
        """The cause: a rank's own error, else a process that died, else a lost connection."""
        failures = status.failures()
        own = [each for each in failures if not LOST_CONNECTION.search(each.text)]
        if own:  # several ranks often raise the same InputError: report the lowest of them
            same = (f for f in own if f.input_error and f.input_error == own[0].input_error)
            return min(same, key=_rank, default=own[0])
        recorded = {failure.rank for failure in failures}
        if self.died is not None and self.died[0] not in recorded | self.killed:
            return Failure(0, self.died[0], None, _death_text(status, *self.died))
        if self.missing is not None and self.missing not in recorded:
            return Failure(0, self.missing, None, _death_text(status, self.missing, 0))
        if failures:
            return failures[0]
        if self.error is not None:
            raise self.error
        return Failure(0, min(self.killed, default=0), None, "it was ended from outside")


def _rank(failure: Failure) -> int:
    return failure.rank


def _death_text(status: StatusDir, rank: int, code: int) -> str:
    """How a rank died that recorded no error."""
    if code < 0:
        name = signal.Signals(-code).name
        text = f"it was ended by {name}"
        text += ", as the system does when memory runs out" if name == "SIGKILL" else ""
    else:
        text = f"it left with exit code {code} before its function had returned"
    if code >= 0 and rank not in status.pids():
        text += (
            ". It had not started yet. Every rank imports the main script, so put the script's own"
            " code under 'if __name__ == \"__main__\":'"
        )
    stderr = _stderr(status, rank)
    return f"{text}. Its error output:\n{stderr}" if stderr else text


def _stderr(status: StatusDir, rank: int) -> str:
    path = status.stderr(rank)
    return path.read_text(errors="replace").strip() if path.exists() else ""


def other_failures(status: StatusDir, first: Failure) -> str:
    """One line for the error of each other rank."""
    others = [failure for failure in status.failures() if failure.rank != first.rank]
    return "".join(f"\n(then rank {o.rank}: {_summary(o.text)})" for o in others)


def _summary(text: str) -> str:
    """The first line of an error's message, below the traceback."""
    lines = text.splitlines()
    below = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=-1) + 1
    return next((line for line in lines[below:] if not line.startswith(" ")), lines[-1])


def report(status: StatusDir, failure: Failure) -> int:
    """Print the error of the first rank that failed, unless rank 0 has; returns the exit code."""
    if failure.code is None:
        others = other_failures(status, failure)
        print(f"rank {failure.rank} failed:\n{failure.text}{others}", file=sys.stderr)
        return 1
    if not any(each.rank == 0 and each.code == failure.code for each in status.failures()):
        stderr = _stderr(status, failure.rank)
        print(stderr or f"rank {failure.rank} failed: {failure.text}", file=sys.stderr)
    return failure.code
