"""this file is how one process starts several ranks on this machine and brings them all to an end.

    launcher   main thread    watches the room, forwards signals, ends what has to be ended
               agent thread   torch.distributed's elastic launcher: rendezvous, processes, results
    ranks      child.run      (see worker.py; they leave word in the room, see status_dir.py)

The agent knows a failure when a process ends, sends the others SIGTERM and gives them half a
minute.  A rank that waits in a collective handles no signal in that time, and its complaint that a
peer is gone would hide the cause.  Hence the watch: whoever fails first is reported, and the
others are killed a moment later.
"""

import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.comm.ending import LaunchOutcome, afterlife, afterwards, first_failure, report, take
from shardwise.comm.limits import read_limits
from shardwise.comm.local import require_local
from shardwise.comm.refusal import show_refusals
from shardwise.comm.rendezvous import LAUNCHER
from shardwise.comm.status_dir import open_room
from shardwise.comm.watch import GLANCE_S, SAVE_S, end_all, watch
from shardwise.comm.worker import Job, run, run_module
from shardwise.core.errors import InputError, RankError, bad

_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
_EVENTS = "torchelastic-events-null"  # made when the first event is told


def spawn(
    function: Callable[..., Any], ranks: int = 4, args: Sequence[Any] = (), device: str = "cpu"
) -> list[Any]:
    """Call `function(*args)` in `ranks` new processes; their results, in rank order.

    In the function `sw.init()` gives the world.  Function, arguments and results are pickled, so
    the function is one of a module.  Each rank has one thread, unless OMP_NUM_THREADS says another
    number.  With device "cpu" the ranks see no GPU; with "cuda" each has its own.

    Raises:
        RankError: a rank failed; the others have been ended.
        InputError: a rank raised one (its cause tells the rank); there are not so many GPUs or
            processors; the function is none, or cannot be pickled.
    """
    show_refusals()
    _check(ranks, device)
    _callable(function)
    work = _pickled(function, tuple(args))
    with open_room(ranks) as room:
        ended = _together(Job(work, room, _threads(), quiet=False), device, signals=[])
        if ended.results is None:
            note = first_failure(room, ended)
            failed = RankError(note.rank, note.text + afterwards(room, note))
            if note.refused:  # what the user wrote, and not the run: one paragraph, said once
                raise InputError(note.refused) from failed
            raise failed
        return [pickle.loads(ended.results[rank]) for rank in range(ranks)]  # noqa: S301


def launch(argv: Sequence[str], nproc: int, module: str = "shardwise.train.cli") -> int:
    """Run `python -m module argv` as `nproc` ranks; the exit code for the whole.

    SIGTERM and SIGINT are passed on as SIGTERM, and the ranks have a minute to save; a second one
    ends them at once, with the code 128 + its number.  The code is
    0 when every rank ended with 0, and else that of the rank that failed first, whose error is
    shown, once: the error output of the first rank is shown as it comes, of others only then.
    Raises InputError for fewer than one process.
    """
    _check(nproc, None)
    work = pickle.dumps((run_module, (module, tuple(argv))))
    with open_room(nproc) as room, _signals() as received:
        ended = _together(Job(work, room, _threads(), quiet=True), None, received)
        if ended.results is not None:
            return 0
        if ended.hurried:
            said = (
                "ended at once by a second signal; a checkpoint that was said to be saved is whole"
            )
            print(said, file=sys.stderr)
            return 128 + received[1]
        note = first_failure(room, ended)
        if ended.overdue:
            late = ", ".join(map(str, sorted(ended.killed)))
            print(f"ranks {late} did not end within {SAVE_S:.0f} s", file=sys.stderr)
            return 1
        if received and ended.died is not None and ended.died[1] == -signal.SIGTERM:
            return 128 + received[0]
        return report(room, note)


def _check(ranks: int, device: str | None) -> None:
    if not isinstance(ranks, int) or isinstance(ranks, bool):
        given = f"ranks={repr(ranks)[:60]}"
        raise bad(given, "a whole number of processes, from 1 up", "ranks=2 (--nproc 2)")
    if ranks < 1:
        raise bad(f"{ranks} ranks", "one rank or more", "ranks=2 (--nproc 2)")
    if device not in (None, "cpu", "cuda"):
        raise bad(f"device '{device}'", "cpu or cuda", 'device="cpu"')
    if device == "cuda" and ranks > torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        raise bad(
            f"{ranks} ranks on cuda, where {gpus} GPUs can be used",
            "one GPU for each rank",
            f'ranks={gpus}, or device="cpu"' if gpus else 'device="cpu"',
        )
    require_local(ranks)
    read_limits()


def _callable(function: Any) -> None:
    if not callable(function):
        raise bad(
            f"spawn of {repr(function)[:60]}",
            "a function at the top level of a module, which each rank calls",
            "spawn(work, 2), after def work(): ...",
        )


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise bad(
            f"a function or arguments that cannot be sent to another process ({error})",
            "a function at the top level of a module, and arguments that can be pickled",
            "def work(...): ... outside any other function, then spawn(work, ...)",
        ) from error


def _together(job: Job, device: str | None, signals: list[int]) -> LaunchOutcome:
    """Run the ranks to their end, whatever end that is; no process is left afterwards."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.room.ranks,
        run_id=job.room.folder.name,
        role="shardwise",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # 0: a free port
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=2 * GLANCE_S,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(job.room.folder / "agent")),
    )
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
    over = threading.Event()  # a thread that Ctrl-C finds joining another takes that for ended

    def agent() -> None:
        try:
            outcomes.put(elastic_launch(config, run)(job))
        except BaseException as error:  # noqa: BLE001  handed to the main thread
            outcomes.put(error)
        over.set()

    ended = LaunchOutcome()
    with _silent(), _variables(_for_ranks(job, device)):
        # A daemon: should every rank leave by os._exit(0), the agent would wait for ever.
        thread = threading.Thread(target=agent, name="agent", daemon=True)
        thread.start()
        try:
            watch(job.room, over, ended, signals)
        finally:
            end_all(job.room, ended, over)
    if over.is_set():
        thread.join()  # no thread is left that would hold a store while the interpreter ends
    take(ended, None if outcomes.empty() else outcomes.get(), job.room)
    print(afterlife(ended), end="", file=sys.stderr)
    return ended


def _threads() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) > 0 else 1


def _for_ranks(job: Job, device: str | None) -> dict[str, str]:
    """The variables the ranks are to find, besides those of the agent."""
    variables = {"OMP_NUM_THREADS": str(job.threads), LAUNCHER: str(os.getpid())}
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        # The host's name may lead to an address that is down, or to none.
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
    """The elastic launcher's log is kept off the screen: what matters of it is in our error."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_LOGGERS)]
    loggers = map(logging.getLogger, [*names, _EVENTS])
    loud = [logger for logger in loggers if not logger.disabled]
    for logger in loud:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in loud:
            logger.disabled = False


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT instead of obeying them; only the main thread can."""
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
