"""The launcher: starts several ranks on this machine, and ends all of them when one fails.

The first failure names the cause.  A moment later the launcher kills the other ranks, because a
rank inside a collective handles no signal, and would complain about a lost peer.
"""

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import register_after_fork
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from shardwise.comm.start.excepthook import (
    Failure,
    death_text,
    described,
    first_cause,
    install_excepthook,
)
from shardwise.comm.start.peers import reported_failure
from shardwise.comm.start.rendezvous import (
    LAUNCHER,
    read_limits,
    require_local,
    require_loopback,
)
from shardwise.comm.start.worker import SIGNALS, StopSignal, Work, run, run_command
from shardwise.core.errors import InputError, RankError, bad
from shardwise.core.tools.arguments import choice, integer, rank_names, short_repr

_POLL_S = 0.1
#: How long other ranks may still report their errors after the first failure.
_GRACE_S = 1.0
#: How long a process may take to exit once all ranks have results.
_LINGER_S = 20.0
_KILL_S = 3.0


def spawn(
    function: Callable[..., Any],
    ranks: int = 4,
    args: Sequence[Any] = (),
    device: str = "cpu",
    *,
    fork: bool = False,
) -> list[Any]:
    """Call `function(*args)` in `ranks` new processes, and return the results in rank order.

    Inside the function, `sw.init()` returns the world.  Function, arguments and results are
    pickled, so the function must be at the top level of a module.  Each rank has one thread, unless
    OMP_NUM_THREADS is set.  With device "cpu" the ranks see no GPU; with "cuda" each has its own.

    With `fork` the ranks are forked from this process.  Then the function and its arguments need
    not be pickled, so they may be defined in a notebook or inside another function, and the main
    script needs no guard.  Ranks cannot be forked on a machine with a GPU (`can_fork`).

    Raises:
        RankError: a rank failed; the others have been killed.
        InputError: a rank raised one (`__cause__` names the rank); there are too few GPUs or
            processors; the function cannot be called or pickled.
    """
    install_excepthook()
    require_ranks(ranks, device)
    if not callable(function):
        given = f"spawn of {short_repr(function)}"
        allowed = "a function at the top level of a module"
        raise bad(given, allowed, "spawn(work, 2), after def work(): ...")
    work = (function, tuple(args)) if fork else _pickled(function, tuple(args))
    started = Ranks()
    started.run(ranks, work, device)
    if (results := started.results()) is not None:
        return [pickle.loads(result) for result in results]  # noqa: S301
    failures = started.failures()
    first = first_cause(failures)
    failed = RankError(first.rank, described(failures, first))
    if first.input_error:
        raise InputError(first.input_error) from failed
    raise failed


def can_fork(device: str = "cpu") -> bool:
    """Whether ranks on `device` can be forked: CUDA and autograd's GPU threads cannot."""
    return sys.platform == "linux" and device == "cpu" and not torch.cuda.is_available()


def launch(argv: Sequence[str], nproc: int, module: str = "shardwise.cli.main") -> int:
    """Run the command `main()` of `module` with `argv` as `nproc` ranks; return one exit code.
    It is 0 if every rank exited with 0, otherwise that of the rank that failed first, whose
    error is printed once.  Error output of rank 0 appears as it is written, that of other ranks
    only if they fail first.  The first signal of worker.py is forwarded as SIGTERM, and the ranks
    have `save_s` to save and leave.  A second Ctrl-C kills them at once, with the code 130.
    """
    require_ranks(nproc, None)
    work, started = pickle.dumps((run_command, (module, tuple(argv)))), Ranks()
    try:
        with StopSignal() as stop:
            started.run(nproc, work, None, stop, quiet=True)
    except KeyboardInterrupt:
        print("the ranks were killed by a second Ctrl-C", file=sys.stderr)
        return 130
    if started.results() is not None:
        return 0
    failures = started.failures()
    if not failures:
        late = rank_names([rank.number for rank in started.ranks if rank.killed])
        limit = f"{read_limits().save_s:.0f} s (SHARDWISE_SAVE_TIMEOUT_S)"
        print(f"{late} did not end within {limit} after the signal: killed", file=sys.stderr)
        return 1
    first = first_cause(failures)
    if stop.received and -(started.ranks[first.rank].process.exitcode or 0) in SIGNALS:
        return 128 + stop.number
    if first.code is not None:  # it has printed its error; that of rank 0 is on the screen
        if not any(each.rank == 0 and each.code == first.code for each in failures):
            print(first.output or f"rank {first.rank} failed: {first.text}", file=sys.stderr)
        return first.code
    if first.input_error:  # of a script
        print(first.input_error, file=sys.stderr)
        return 2
    print(RankError(first.rank, described(failures, first)), file=sys.stderr)
    return 1


def require_ranks(ranks: int, device: str | None) -> None:
    """Raise InputError if so many ranks cannot run here. A script without a guard ends its rank."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(1)
    integer("--nproc" if device is None else "ranks", ranks, 1, 2)
    if device is not None:
        choice("device", device, ("cpu", "cuda"))
    if device == "cuda" and ranks > torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        on_cpu = 'device="cpu" (on the command line: --device cpu)'
        raise bad(
            f"{ranks} ranks on cuda, with {gpus} GPUs available",
            "one GPU for each rank",
            f"ranks={gpus}, or {on_cpu}" if gpus else on_cpu,
        )
    require_local(ranks)
    if ranks > 1:
        require_loopback()
    read_limits()


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    why = "they are defined in a notebook or an interactive session"
    try:
        work = pickle.dumps((function, args))
        if b"__main__" not in work or hasattr(sys.modules["__main__"], "__file__"):
            return work
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        why = str(error)
    raise bad(
        f"{short_repr(function)} or arguments that other processes cannot import ({why})",
        "a function at the top level of a module, and arguments that can be pickled",
        "the same functions in a file: from file import build",
    )


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
        register_after_fork(self.pipe, Connection.close)  # a rank's own copy would stay open
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
        if not isinstance(self.outcome, Failure):
            at_ns = time.monotonic_ns()
            self.outcome = Failure(at_ns, self.number, text, output=output)

    def release(self) -> None:
        with suppress(OSError):  # it has just died
            self.pipe.send_bytes(b"")

    def _output(self) -> str:
        size = os.fstat(self.file.fileno()).st_size
        return os.pread(self.file.fileno(), size, 0).decode(errors="replace").strip()


def process_of(work: Work, *args: Any) -> BaseProcess:
    if isinstance(work, bytes):
        return multiprocessing.get_context("spawn").Process(target=run, args=(work, *args))
    return multiprocessing.get_context("fork").Process(target=run, args=(work, *args))


class Ranks:
    """All ranks of a launch, and the store where they meet."""

    def __init__(self) -> None:
        self.address = socket.create_server(("localhost", 0))
        self.ranks: list[Rank] = []

    def run(
        self,
        size: int,
        work: Work,
        device: str | None,
        stop: StopSignal | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        """Run the ranks until they have all exited; no process is left afterwards."""
        port = self.address.getsockname()[1]
        variables = {
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        try:
            with _environment(_early_variables(device)):
                for number in range(size):
                    self.ranks.append(Rank(number, work, variables, quiet=quiet))
            # Its thread may hold a lock of the C library, which a fork would leave locked for ever.
            self.store: TCPStore | None = TCPStore(
                "localhost",
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=self.address.detach(),
            )
            self._watch(stop or StopSignal())
        finally:
            self._kill()
            self.store = None  # its thread is not in a later fork, which would collect it

    def results(self) -> list[bytes] | None:
        results = [rank.outcome for rank in self.ranks if isinstance(rank.outcome, bytes)]
        return results if len(results) == len(self.ranks) else None

    def failures(self) -> list[Failure]:
        return sorted(rank.outcome for rank in self.ranks if isinstance(rank.outcome, Failure))

    def _watch(self, stop: StopSignal) -> None:
        """Return when all processes have exited, or when it is time to kill the rest."""
        deadlines = dict[str, float]()  # each begins at the first event of its kind
        while (alive := self._alive()) and time.monotonic() < min(deadlines.values(), default=inf):
            pipes = [rank.pipe for rank in alive if rank.outcome is None]
            wait([*pipes, *(rank.process.sentinel for rank in alive)], _POLL_S)
            self._read()
            failed, now = len(self.failures()), time.monotonic()
            if failed == len(self.ranks):
                return
            if failed:
                deadlines.setdefault("failed", now + _GRACE_S)
            if stop.received and "signalled" not in deadlines:
                deadlines["signalled"] = now + read_limits().save_s
                for rank in alive:
                    rank.process.terminate()
            if "returned" not in deadlines and self.results() is not None:
                deadlines["returned"] = now + _LINGER_S
                for rank in alive:
                    rank.release()
        self._read()

    def _kill(self) -> None:
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
        if self.store and (reported := reported_failure(self.store)) is not None:
            self.ranks[reported[0]].fail(reported[1])


def _early_variables(device: str | None) -> dict[str, str]:
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
