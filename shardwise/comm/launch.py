"""The launcher: starts several ranks on this machine, and ends all of them when one fails.

    launcher   main thread    watches the status directory, forwards signals, kills ranks
               agent thread   torch.distributed's elastic launcher: rendezvous, processes, results
    ranks      worker.run     (worker.py; ranks report through status files, see status_dir.py)

The elastic agent alone is not enough.  When a process fails, it sends the others SIGTERM and waits
half a minute.  A rank inside a collective handles no signal, and later complains about a lost peer,
which hides the cause.  So the main thread watches too: it reports the first failure and kills the
other ranks a moment later.
"""

import logging
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.comm.excepthook import install_excepthook
from shardwise.comm.limits import read_limits
from shardwise.comm.local import require_local
from shardwise.comm.outcome import LaunchOutcome, other_failures, report
from shardwise.comm.rendezvous import LAUNCHER
from shardwise.comm.status_dir import open_status_dir
from shardwise.comm.watch import POLL_S, SAVE_S, kill_all, watch
from shardwise.comm.worker import Job, run, run_module
from shardwise.core.arguments import choice, integer, short_repr
from shardwise.core.errors import InputError, RankError, bad

_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
_EVENTS = "torchelastic-events-null"  # torch creates it with the first event


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
    _callable(function)
    if not isinstance(args, tuple | list):
        given = f"spawn with args={short_repr(args)}"
        raise bad(given, "a tuple of the function's arguments", "spawn(work, 2, args=(3,))")
    work = (function, tuple(args)) if fork else _pickled(function, tuple(args))
    with open_status_dir(ranks) as status:
        outcome = _run(Job(work, status, _threads(), quiet=False), device, signals=[])
        if outcome.results is None:
            failure = outcome.first_failure(status)
            failed = RankError(failure.rank, failure.text + other_failures(status, failure))
            if failure.input_error:
                raise InputError(failure.input_error) from failed
            raise failed
        return [pickle.loads(outcome.results[rank]) for rank in range(ranks)]  # noqa: S301


def can_fork(device: str = "cpu") -> bool:
    """Whether ranks on `device` can be forked from this process.

    Neither CUDA nor the threads of autograd, which a GPU has, work in a forked process.
    """
    return sys.platform == "linux" and device == "cpu" and not torch.cuda.is_available()


def launch(argv: Sequence[str], nproc: int, module: str = "shardwise.cli.main") -> int:
    """Run `python -m module argv` as `nproc` ranks, and return one exit code.

    The code is 0 if every rank exited with 0, otherwise that of the rank that failed first, whose
    error is printed once.  Error output of rank 0 appears as it is written, that of other ranks
    only if they fail first.

    SIGTERM and SIGINT are forwarded as SIGTERM, and the ranks have a minute to save.  A second
    signal kills them at once, with the code 128 + its number.

    Raises InputError for fewer than one process.
    """
    require_ranks(nproc, None)
    work = pickle.dumps((run_module, (module, tuple(argv))))
    with open_status_dir(nproc) as status, _signals() as received:
        outcome = _run(Job(work, status, _threads(), quiet=True), None, received)
        if outcome.results is not None:
            return 0
        if outcome.hurried:
            print(
                "killed by a second signal; checkpoints reported as saved are complete",
                file=sys.stderr,
            )
            return 128 + received[1]
        failure = outcome.first_failure(status)
        if outcome.overdue:
            late = ", ".join(map(str, sorted(outcome.killed)))
            print(f"ranks {late} did not end within {SAVE_S:.0f} s", file=sys.stderr)
            return 1
        if received and outcome.died is not None and outcome.died[1] == -signal.SIGTERM:
            return 128 + received[0]
        return report(status, failure)


def require_ranks(ranks: int, device: str | None) -> None:
    """Raise InputError if so many ranks cannot run on this machine's `device`.

    A rank that imports a main script without a guard ends here, and its launcher says why.
    """
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
    read_limits()


def _callable(function: Any) -> None:
    if not callable(function):
        raise bad(
            f"spawn of {short_repr(function)}",
            "a function at the top level of a module",
            "spawn(work, 2), after def work(): ...",
        )


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    allowed = "a function at the top level of a module, and arguments that can be pickled"
    try:
        work = pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise bad(
            f"a function or arguments that cannot be sent to another process ({error})",
            allowed,
            "def work(...): ... outside any other function, then spawn(work, ...)",
        ) from error
    if b"__main__" in work and not hasattr(sys.modules["__main__"], "__file__"):
        raise bad(
            f"{short_repr(function)} or arguments that are defined in a notebook or an interactive "
            "session, which new processes cannot import",
            allowed,
            "the same functions in a file: from file import build",
        )
    return work


def _run(job: Job, device: str | None, signals: list[int]) -> LaunchOutcome:
    """Run the ranks until they have all exited; no process is left afterwards."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.status.ranks,
        run_id=job.status.folder.name,
        role="shardwise",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # 0: a free port
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=2 * POLL_S,
        start_method="spawn" if isinstance(job.work, bytes) else "fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(job.status.folder / "agent")),
    )
    returned: queue.SimpleQueue[Any] = queue.SimpleQueue()
    exited = (
        threading.Event()
    )  # not Thread.join: interrupted by Ctrl-C, it takes the thread as ended

    def agent() -> None:
        try:
            returned.put(elastic_launch(config, run)(job))
        except BaseException as error:  # noqa: BLE001  handed to the main thread
            returned.put(error)
        exited.set()

    outcome = LaunchOutcome()
    with _silent(), _variables(_for_ranks(job, device)):
        # A daemon: if every rank exits by os._exit(0), the agent waits forever.
        thread = threading.Thread(target=agent, name="agent", daemon=True)
        thread.start()
        try:
            watch(job.status, exited, outcome, signals)
        finally:
            kill_all(job.status, outcome, exited)
    if exited.is_set():
        thread.join()  # so that no thread holds a store while the interpreter shuts down
    outcome.record(None if returned.empty() else returned.get(), job.status)
    print(outcome.late_exits(), end="", file=sys.stderr)
    return outcome


def _threads() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) > 0 else 1


def _for_ranks(job: Job, device: str | None) -> dict[str, str]:
    """The environment variables of the ranks, besides those that the agent sets."""
    variables = {"OMP_NUM_THREADS": str(job.threads), LAUNCHER: str(os.getpid())}
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Without this gloo resolves the host's name, which may have no usable address.
        variables["GLOO_SOCKET_IFNAME"] = loopback.pop()
    return variables


@contextmanager
def _variables(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _silent() -> Iterator[None]:
    """Silence the elastic launcher's log, for our own error says what failed; and Python's warning
    of a fork beside other threads, of which the ranks use none.
    """
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_LOGGERS)]
    loggers = map(logging.getLogger, [*names, _EVENTS])
    loud = [logger for logger in loggers if not logger.disabled]
    for logger in loud:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*use of fork.. may lead to deadlocks")
            yield
    finally:
        for logger in loud:
            logger.disabled = False


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT instead of ending; works only in the main thread."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    wanted = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda n, _: received.append(n)) for number in wanted]
    try:
        yield received
    finally:
        for number, handler in zip(wanted, before, strict=True):
            signal.signal(number, handler)
