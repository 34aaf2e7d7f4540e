"""The processes of a launch: the launcher starts them, watches them, and kills those that remain.

The first failure names the cause.  A moment later the launcher kills the other ranks, because a
rank inside a collective handles no signal, and would complain about a lost peer.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch._C._distributed_c10d import TCPStore

from shardwise.comm.start.excepthook import LOST_CONNECTION
from shardwise.comm.start.peers import reported_failure
from shardwise.comm.start.worker import Failure, Job, run

#: How long the ranks may take to save and exit after SIGTERM or SIGINT.
SAVE_S = 60.0
_POLL_S = 0.1
#: How long other ranks may still report their errors after the first failure.
_GRACE_S = 1.0
#: How long a process may take to exit once all ranks have results.
_LINGER_S = 20.0
_KILL_S = 3.0


class Rank:
    """A process, which starts when this is made, and what it has reported."""

    def __init__(
        self, number: int, work: Any, variables: Mapping[str, Any], *, quiet: bool
    ) -> None:
        self.number = number
        self.started = self.killed = False
        self.result: bytes | None = None
        self.failure: Failure | None = None
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  closed by Ranks.kill
        self.pipe, theirs = multiprocessing.Pipe()
        errors = Connection(os.dup(self.file.fileno()))
        with theirs, errors, warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*use of fork.. may lead to deadlocks")
            own = {name: str(value) for name, value in variables.items()}
            self.process = process_of(Job(work, own, quiet and number > 0, theirs, errors))
            self.process.start()

    @property
    def works(self) -> bool:
        """Whether the rank has reported neither a result nor a failure."""
        return self.result is None and self.failure is None

    def read(self) -> None:
        """Take the messages that have arrived, or note that the process has died."""
        died = not self.process.is_alive()  # asked first, so that all its messages are there
        try:
            while self.works and self.pipe.poll():
                message, self.started = self.pipe.recv(), True
                if isinstance(message, Failure):
                    output = "" if message.code is None else self._output()
                    self.failure = replace(message, output=output)
                self.result = message if isinstance(message, bytes) else None
        except (EOFError, OSError):
            died = True
        if died and self.works:
            self.process.join(1.0)
            self.fail(death_text(self.process.exitcode or 0, self.started), self._output())

    def fail(self, text: str, output: str = "") -> None:
        """Record the failure of a rank that cannot report its own."""
        now_ns = time.monotonic_ns()
        self.failure = self.failure or Failure(now_ns, self.number, text, output=output, lost=True)

    def release(self) -> None:
        """Let the process exit, since all ranks have results."""
        with suppress(OSError):  # it has just died
            self.pipe.send_bytes(b"")

    def late_exit(self) -> str:
        """How the process ended if it aborted or was killed after all results were there."""
        if self.killed:
            return f"rank {self.number} was killed: its process did not end after it had returned\n"
        if not (code := self.process.exitcode):
            return ""
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"rank {self.number} ended with {how} after it had returned; its result stands\n"

    def _output(self) -> str:
        """Its error output if that is held back, and its stacks at a fatal signal."""
        size = os.fstat(self.file.fileno()).st_size
        return os.pread(self.file.fileno(), size, 0).decode(errors="replace").strip()


def process_of(job: Job) -> BaseProcess:
    """The process of a job; it is forked if the job's work is not pickled."""
    if isinstance(job.work, bytes):
        return multiprocessing.get_context("spawn").Process(target=run, args=(job,))
    return multiprocessing.get_context("fork").Process(target=run, args=(job,))


class Ranks:
    """All ranks of a launch, and the store where they meet."""

    def __init__(self) -> None:
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.ranks: list[Rank] = []
        self.stopped = False  # stopped as by a signal

    def start(self, size: int, work: Any, variables: Mapping[str, str], *, quiet: bool) -> None:
        """Start the processes, in the environment that torchrun would give them and `variables`."""
        shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
        shared |= {"MASTER_ADDR": "localhost", "MASTER_PORT": self.store.port}
        shared |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        with _environment(variables):  # read by libraries when they are loaded
            for number in range(size):
                own = shared | {"RANK": number, "LOCAL_RANK": number}
                self.ranks.append(Rank(number, work, own, quiet=quiet))

    def watch(self, signals: list[int], stop_when: Callable[[], bool] | None = None) -> None:
        """Return when all processes have exited, or when it is time to kill those that remain.

        When `stop_when` returns true, the ranks are stopped as by a signal.
        """
        deadlines = dict[str, float]()  # each begins at the first event of its kind
        while (alive := self._alive()) and time.monotonic() < min(deadlines.values(), default=inf):
            pipes = [rank.pipe for rank in alive if rank.works]
            wait([*pipes, *(rank.process.sentinel for rank in alive)], _POLL_S)
            self._read()
            failed, now = len(self.failures()), time.monotonic()
            if len(signals) > 1 or failed == len(self.ranks):
                return
            if failed:
                deadlines.setdefault("failed", now + _GRACE_S)
            self.stopped = self.stopped or (stop_when is not None and stop_when())
            if (signals or self.stopped) and "signalled" not in deadlines:
                deadlines["signalled"] = now + SAVE_S
                for rank in alive:
                    rank.process.terminate()
            if "returned" not in deadlines and self.results() is not None:
                deadlines["returned"] = now + _LINGER_S
                for rank in alive:
                    rank.release()
        self._read()

    def kill(self) -> None:
        """Kill the ranks that are left, and close the files."""
        for rank in self._alive():
            rank.killed = True
            rank.process.kill()
        end = time.monotonic() + _KILL_S
        for rank in self.ranks:
            rank.process.join(max(0.0, end - time.monotonic()))
            rank.pipe.close()
            rank.file.close()

    def results(self) -> list[bytes] | None:
        """The results of all ranks; None while some are missing."""
        found = [rank.result for rank in self.ranks if rank.result is not None]
        return found if len(found) == len(self.ranks) else None

    def failures(self) -> list[Failure]:
        """The failures so far, earliest first."""
        return sorted(rank.failure for rank in self.ranks if rank.failure is not None)

    def _alive(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.process.is_alive()]

    def _read(self) -> None:
        for rank in self.ranks:
            rank.read()
        if (found := reported_failure(self.store)) is not None:
            self.ranks[found[0]].fail(found[1])


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The earliest failure that is no lost connection.

    Several ranks often raise the same InputError: then it is the one of the lowest rank.
    """
    ordered = sorted(failures)
    own = [each for each in ordered if not LOST_CONNECTION.search(each.text)] or ordered
    same = [each for each in own if each.input_error and each.input_error == own[0].input_error]
    return min(same, key=lambda each: each.rank, default=own[0])


def death_text(code: int, started: bool) -> str:
    """How a rank died that reported no error."""
    if code < 0:
        name = signal.Signals(-code).name
        text = f"it was ended by {name}"
        return text + ", as the system does when memory runs out" * (name == "SIGKILL")
    text = f"it left with exit code {code} before its function had returned"
    if not started:
        text += (
            ". It had not started yet. Every rank imports the main script, so put the script's own"
            " code under 'if __name__ == \"__main__\":'"
        )
    return text


def described(failures: Iterable[Failure], first: Failure) -> str:
    """The error of the first rank that failed, and a line for the error of each other rank."""
    own = f"{first.text}. Its error output:\n{first.output}" if first.output else first.text
    others = (each for each in failures if each.rank != first.rank)
    return own + "".join(f"\n(then rank {o.rank}: {_summary(o.text)})" for o in others)


def _summary(text: str) -> str:
    """The first line of an error's message, below the traceback."""
    lines = text.splitlines()
    below = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=-1) + 1
    return next((line for line in lines[below:] if not line.startswith(" ")), lines[-1])


def report(failures: list[Failure], first: Failure) -> int:
    """Print the error of the first rank that failed, unless rank 0 has; returns the exit code."""
    if first.code is None:
        print(f"rank {first.rank} failed:\n{described(failures, first)}", file=sys.stderr)
        return 1
    if not any(each.rank == 0 and each.code == first.code for each in failures):
        print(first.output or f"rank {first.rank} failed: {first.text}", file=sys.stderr)
    return first.code
