"""this file is how one process starts several ranks on this machine and brings them all to an end.

    launcher   main thread    watches the room, forwards signals, ends what has to be ended
               agent thread   torch.distributed's elastic launcher: rendezvous, processes, results
    ranks      child.run      (see child.py; they leave word in the room, see room.py)

The agent knows a failure when a process ends, sends the others SIGTERM and gives them half a
minute.  A rank that waits in a collective handles no signal in that time, and its complaint that a
peer is gone would hide the cause.  Hence the watch: whoever fails first is reported, and the
others are killed a moment later.
"""

import logging
import os
import pickle
import queue
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.comm.child import Job, run, run_module
from shardwise.comm.local import require_local
from shardwise.comm.room import Note, Room
from shardwise.core.errors import InputError, RankError, bad

#: How long the others may still write down what happened to them after a first failure.
_GRACE_S = 1.0
#: How long the ranks may take to save and leave after SIGTERM or SIGINT.
_SAVE_S = 60.0
#: Between two looks into the room: of ranks as many as processors each look holds one up.
_GLANCE_S = 0.05
#: What a rank says whose peer has gone: true, but never the cause where another has one.
_LOST = re.compile(
    r"closed by peer|reset by peer|Connection reset|Broken pipe|pair\.cc|recvValue failed"
    r"|Failed to recv|ncclRemoteError|remote process exited|of the group is gone: process"
)
_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
_EVENTS = "torchelastic-events-null"  # made when the first event is told


@dataclass
class _Ended:
    """How a launch ended: the results of all ranks, or else what is known of the first death."""

    results: dict[int, bytes] | None = None
    died: tuple[int, int] | None = None  # rank and exit code, as the agent saw it
    missing: int | None = None  # the rank the watch first saw gone
    killed: set[int] = field(default_factory=set)
    error: BaseException | None = None  # of the agent itself
    overdue: bool = False  # the ranks were killed for not leaving in time after a signal


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
    _check(ranks, device)
    _callable(function)
    work = _pickled(function, tuple(args))
    with _room(ranks) as room:
        ended = _together(Job(work, room, _threads(), quiet=False), device, signals=[])
        if ended.results is None:
            note = _first_failure(room, ended)
            failed = RankError(note.rank, note.text + _afterwards(room, note))
            if note.refused:  # what the user wrote, and not the run: one paragraph, said once
                raise InputError(note.refused) from failed
            raise failed
        return [pickle.loads(ended.results[rank]) for rank in range(ranks)]  # noqa: S301


def launch(argv: Sequence[str], nproc: int, module: str = "shardwise.train.cli") -> int:
    """Run `python -m module argv` as `nproc` ranks; the exit code for the whole.

    SIGTERM and SIGINT are passed on as SIGTERM, and the ranks have a minute to save.  The code is
    0 when every rank ended with 0, and else that of the rank that failed first, whose error is
    shown, once: the error output of the first rank is shown as it comes, of others only then.
    Raises InputError for fewer than one process.
    """
    _check(nproc, None)
    work = pickle.dumps((run_module, (module, tuple(argv))))
    with _room(nproc) as room, _signals() as received:
        ended = _together(Job(work, room, _threads(), quiet=True), None, received)
        if ended.results is not None:
            return 0
        note = _first_failure(room, ended)
        if ended.overdue:
            late = ", ".join(map(str, sorted(ended.killed)))
            print(f"ranks {late} did not end within {_SAVE_S:.0f} s", file=sys.stderr)
            return 1
        if received and ended.died is not None and ended.died[1] == -signal.SIGTERM:
            return 128 + received[0]
        return _report(room, note)


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


@contextmanager
def _room(ranks: int) -> Iterator[Room]:
    with tempfile.TemporaryDirectory(prefix="shardwise-", ignore_cleanup_errors=True) as folder:
        yield Room(Path(folder), ranks)


def _together(job: Job, device: str | None, signals: list[int]) -> _Ended:
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
        monitor_interval=2 * _GLANCE_S,
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

    ended = _Ended()
    with _silent(), _variables(_for_ranks(job, device)):
        # A daemon: should every rank leave by os._exit(0), the agent would wait for ever.
        threading.Thread(target=agent, name="agent", daemon=True).start()
        try:
            _watch(job.room, over, ended, signals)
        finally:
            _end(job.room, ended, over)
    _take(ended, None if outcomes.empty() else outcomes.get())
    return ended


def _watch(room: Room, over: threading.Event, ended: _Ended, signals: list[int]) -> None:
    """Return when the agent has ended, or when the time has come to end the ranks."""
    deadline = float("inf")
    told: set[int] = set()  # ranks that the signal was passed on to; others may yet begin
    seen, noted, working = frozenset[str](), 0, dict[int, int]()
    while time.monotonic() < deadline and not over.wait(_GLANCE_S):
        if signals:
            deadline = min(deadline, time.monotonic() + _SAVE_S)
            told |= _send(room, signal.SIGTERM, besides=told)
        if len(signals) > 1:  # asked twice: now
            return
        if (word := room.word()) != seen:
            seen, noted = word, len(room.notes())
            finished = room.finished()
            working = {rank: pid for rank, pid in room.pids().items() if rank not in finished}
        ended.missing = _gone(room, working) if ended.missing is None else ended.missing
        if noted or ended.missing is not None:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if noted == room.ranks:
            return
    told_all = bool(signals) and ended.missing is None
    ended.overdue = told_all and not over.is_set() and not room.notes()


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
        if rank in besides:
            continue
        try:
            os.kill(pid, number)
            reached.add(rank)
        except ProcessLookupError:
            continue
    return reached


def _end(room: Room, ended: _Ended, over: threading.Event) -> None:
    """Kill the ranks, unless the agent has seen them all end."""
    if over.is_set():
        return
    room.close()
    give_up = time.monotonic() + 3.0
    while time.monotonic() < give_up:
        if len(room.finished()) < room.ranks:
            ended.killed |= _send(room, signal.SIGKILL)
        if over.wait(_GLANCE_S):
            return


def _take(ended: _Ended, outcome: Any) -> None:
    if isinstance(outcome, dict):
        ended.results = outcome
    elif isinstance(outcome, ChildFailedError):
        rank, failure = outcome.get_first_failure()
        ended.died = (rank, failure.exitcode)
    elif isinstance(outcome, BaseException):
        ended.error = outcome


def _first_failure(room: Room, ended: _Ended) -> Note:
    """The cause: an error of a rank's own, else a death without a word, else a lost connection."""
    notes = room.notes()
    own = [note for note in notes if not _LOST.search(note.text)]
    if own:
        return own[0]
    noted = {note.rank for note in notes}
    if ended.died is not None and ended.died[0] not in noted | ended.killed:
        return Note(0, ended.died[0], None, _obituary(room, *ended.died))
    if ended.missing is not None and ended.missing not in noted:
        return Note(0, ended.missing, None, _obituary(room, ended.missing, 0))
    if notes:
        return notes[0]
    if ended.error is not None:
        raise ended.error
    return Note(0, min(ended.killed, default=0), None, "it was ended from outside")


def _obituary(room: Room, rank: int, code: int) -> str:
    """How a rank died that left no word."""
    if code < 0:
        name = signal.Signals(-code).name
        text = f"it was ended by {name}"
        text += ", as the system does when memory runs out" if name == "SIGKILL" else ""
    else:
        text = f"it left with exit code {code} before its function had returned"
    if rank not in room.pids():
        text += (
            ". It had not yet begun: the main script is imported by every rank, so its own work"
            " stands under 'if __name__ == \"__main__\":'"
        )
    said = _said(room, rank)
    return f"{text}. Its last words:\n{said}" if said else text


def _said(room: Room, rank: int) -> str:
    path = room.stderr(rank)
    return path.read_text(errors="replace").strip() if path.exists() else ""


def _afterwards(room: Room, first: Note) -> str:
    """One line for each other rank that had an error to tell."""
    others = [note for note in room.notes() if note.rank != first.rank]
    return "".join(f"\n(then rank {o.rank}: {_line(o.text)})" for o in others)


def _line(text: str) -> str:
    """The first line of an error below its traceback; notes come after it."""
    lines = text.splitlines()
    below = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=-1) + 1
    return next((line for line in lines[below:] if not line.startswith(" ")), lines[-1])


def _report(room: Room, note: Note) -> int:
    """Show the error of the rank that failed first, unless it is on the screen; its exit code."""
    if note.code is None:
        print(f"rank {note.rank} failed:\n{note.text}{_afterwards(room, note)}", file=sys.stderr)
        return 1
    shown = any(other.rank == 0 and other.code == note.code for other in room.notes())
    if not shown:
        print(_said(room, note.rank) or f"rank {note.rank} failed: {note.text}", file=sys.stderr)
    return note.code


def _threads() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) > 0 else 1


def _for_ranks(job: Job, device: str | None) -> dict[str, str]:
    """The variables the ranks are to find, besides those of the agent."""
    variables = {"OMP_NUM_THREADS": str(job.threads)}
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
