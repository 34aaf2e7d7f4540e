"""The processes of a launch: the launcher starts them, watches them, and kills those that remain.

The first failure names the cause.  A moment later the launcher kills the other ranks, because a
rank inside a collective handles no signal, and would complain about a lost peer.
"""

import multiprocessing
import os
import signal
import socket
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
from shardwise.comm.start.rendezvous import LAUNCHER
from shardwise.comm.start.worker import Failure, Work, run

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
        self, number: int, work: Work, variables: Mapping[str, str], *, quiet: bool
    ) -> None:
        self.number = number
        self.started = self.killed = False
        self.outcome: bytes | Failure | None = None
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  closed by Ranks.run
        self.pipe, theirs = multiprocessing.Pipe()
        errors = Connection(os.dup(self.file.fileno()))
        with theirs, errors, warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*use of fork.. may lead to deadlocks")
            own = {**variables, "RANK": str(number), "LOCAL_RANK": str(number)}
            self.process = process_of(work, own, theirs, errors, quiet and number > 0)
            self.process.start()

    def read(self) -> None:
        """Take the messages that have arrived, or note that the process has died."""
        died = not self.process.is_alive()  # asked first, so that all its messages are there
        try:
            while self.outcome is None and self.pipe.poll():
                message, self.started = self.pipe.recv(), True
                if isinstance(message, Failure) and message.code is not None:
                    message = replace(message, output=self._output())
                self.outcome = message
        except (EOFError, OSError):
            died = True
        if died and self.outcome is None:
            self.process.join(1.0)
            self.fail(death_text(self.process.exitcode or 0, self.started), self._output())

    def fail(self, text: str, output: str = "") -> None:
        """Record the failure of a rank that cannot report its own."""
        if not isinstance(self.outcome, Failure):
            at_ns = time.monotonic_ns()
            self.outcome = Failure(at_ns, self.number, text, output=output, lost=True)

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
        return f"rank {self.number} {_ended(code)} after it had returned; its result stands\n"

    def _output(self) -> str:
        """Its error output if that is held back, and its stacks at a fatal signal."""
        size = os.fstat(self.file.fileno()).st_size
        return os.pread(self.file.fileno(), size, 0).decode(errors="replace").strip()


def process_of(work: Work, *args: Any) -> BaseProcess:
    """The process of a rank; it is forked if its work is not pickled."""
    if isinstance(work, bytes):
        return multiprocessing.get_context("spawn").Process(target=run, args=(work, *args))
    return multiprocessing.get_context("fork").Process(target=run, args=(work, *args))


class Ranks:
    """All ranks of a launch, and the store where they meet."""

    def __init__(self) -> None:
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.ranks: list[Rank] = []
        self.stopped = False  # stopped as by a signal

    def run(
        self,
        size: int,
        work: Work,
        device: str | None,
        signals: list[int],
        *,
        quiet: bool = False,
        stop_when: Callable[[], bool] | None = None,
    ) -> None:
        """Run the ranks until they have all exited; no process is left afterwards.

        When `stop_when` returns true, the ranks are stopped as by a signal.
        """
        variables = {
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        try:
            with _environment(_early_variables(device)):
                for number in range(size):
                    self.ranks.append(Rank(number, work, variables, quiet=quiet))
            self._watch(signals, stop_when)
        finally:
            self._kill()
        if self.results() is not None:
            print("".join(rank.late_exit() for rank in self.ranks), end="", file=sys.stderr)

    def results(self) -> list[bytes] | None:
        """The results of all ranks; None while some are missing."""
        results = [rank.outcome for rank in self.ranks if isinstance(rank.outcome, bytes)]
        return results if len(results) == len(self.ranks) else None

    def failures(self) -> list[Failure]:
        """The failures so far, earliest first."""
        return sorted(rank.outcome for rank in self.ranks if isinstance(rank.outcome, Failure))

    def _watch(self, signals: list[int], stop_when: Callable[[], bool] | None) -> None:
        """Return when all processes have exited, or when it is time to kill those that remain."""
        deadlines = dict[str, float]()  # each begins at the first event of its kind
        while (alive := self._alive()) and time.monotonic() < min(deadlines.values(), default=inf):
            pipes = [rank.pipe for rank in alive if rank.outcome is None]
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

    def _kill(self) -> None:
        """Kill the ranks that are left, and close the files."""
        for rank in self._alive():
            rank.killed = True
            rank.process.kill()
        end = time.monotonic() + _KILL_S
        for rank in self.ranks:
            rank.process.join(max(0.0, end - time.monotonic()))
            rank.pipe.close()
            rank.file.close()

    def _alive(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.process.is_alive()]

    def _read(self) -> None:
        for rank in self.ranks:
            rank.read()
        if (reported := reported_failure(self.store)) is not None:
            self.ranks[reported[0]].fail(reported[1])


def _early_variables(device: str | None) -> dict[str, str]:
    """The environment variables of all ranks that are read when modules are loaded."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    given = threads.isdecimal() and int(threads) > 0
    variables = {"OMP_NUM_THREADS": threads if given else "1", LAUNCHER: str(os.getpid())}
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Without this gloo resolves the host's name, which may have no usable address.
        variables["GLOO_SOCKET_IFNAME"] = loopback.pop()
    return variables


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
    text = f"it {_ended(code)}"
    if code < 0:
        return text + ", as the system does when memory runs out" * (code == -signal.SIGKILL)
    text += " before its function had returned"
    if not started:
        text += (
            ". It had not started yet. Every rank imports the main script, so put the script's own"
            " code under 'if __name__ == \"__main__\":'"
        )
    return text


def _ended(code: int) -> str:
    name = signal.Signals(-code).name if code < 0 else ""
    return f"was ended by {name}" if name else f"left with exit code {code}"


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
