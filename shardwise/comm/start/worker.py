"""What a process of the launcher does around its function, and the signals that stop a run.

    launcher  <-- None       the rank has started
    one pipe  <-- bytes      the pickled result          or  <-- Failure   its error
    a rank    --> b""        all ranks have results, and may exit

A failed rank keeps its connections open until the launcher kills it, so that other ranks see no
lost connection.  If the launcher dies, the pipe closes and the rank exits.

    start-up     inputs are checked, nothing is written yet    the process exits at once
    run          all ranks take part in every step             sets a flag; ranks agree (stop.py)

SIGTERM and SIGHUP come from batch systems, SIGUSR1 from `sbatch --signal=USR1@120`, SIGINT from
Ctrl-C.  A process often receives one request several times, so repeats are ignored while the
checkpoint is written.  Only a second Ctrl-C ends the process without it.
"""

import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from types import FrameType, TracebackType
from typing import Any, Final, Self

import torch
import torch.distributed as dist

from shardwise.comm.gloo.shared import leave
from shardwise.comm.start.excepthook import Failure
from shardwise.comm.start.peers import HIDDEN_FILES
from shardwise.comm.torch_links import TorchLinks
from shardwise.core.errors import InputError

#: A function and its arguments; pickled, unless the rank is forked.
Work = bytes | tuple[Callable[..., Any], tuple[Any, ...]]


def run(
    work: Work,
    variables: Mapping[str, str],
    pipe: "Connection[Any, Any]",
    errors: "Connection[Any, Any]",
    quiet: bool,
) -> None:
    """The entry point of a rank, whose `variables` are set in its environment. A fatal signal
    writes the stacks of all threads to `errors`; with `quiet`, error output goes there.
    """
    os.environ.update(variables)
    os.setsid()  # so that Ctrl-C reaches only the launcher
    all_ended = threading.Event()
    threading.Thread(target=_listen, args=(pipe, all_ended), daemon=True).start()
    pipe.send(None)
    if quiet:
        os.dup2(errors.fileno(), 2)
    faulthandler.enable(errors.fileno())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        function, args = pickle.loads(work) if isinstance(work, bytes) else work  # noqa: S301 (ours)
        result = pickle.dumps(function(*args))
        leave()  # before waiting for the other ranks, since one may wait for this rank
        links = TorchLinks.of_process
        if links is not None and links.peers is not None:
            links.peers.stop()
        pipe.send(result)
    except SystemExit as error:
        _fail(pipe, f"it ended by sys.exit({error.code!r})", _exit_code(error))
    except BaseException as error:  # noqa: BLE001  every error that ends a rank is reported
        _fail(pipe, _traceback(error), None, str(error) if isinstance(error, InputError) else "")
    all_ended.wait()  # a rank that left earlier would close connections that others still use
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def run_command(module: str, argv: Sequence[str]) -> None:
    """Call `main()` of a module with these arguments in sys.argv; an exit with 0 is a return."""
    sys.argv = [module, *argv]
    try:
        import_module(module).main()
    except SystemExit as error:
        if _exit_code(error) != 0:
            raise


def _listen(pipe: "Connection[Any, Any]", all_ended: threading.Event) -> None:
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):  # the launcher has died
        os._exit(1)
    all_ended.set()


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _traceback(error: BaseException) -> str:
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in HIDDEN_FILES:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _fail(pipe: "Connection[Any, Any]", text: str, code: int | None, input_error: str = "") -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pipe.send(Failure(time.monotonic_ns(), int(os.environ["RANK"]), text, code, input_error))


# --- signals that stop a run ----------------------------------------------------------------------

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
#: SIGINT that comes sooner after the first one is a copy of it.
COPY_S: Final = 0.5
#: The exit code of a run that ended at its time limit: EX_TEMPFAIL of sysexits.h.
REQUEUE: Final = 75
NOTHING: Final = "stopped by a signal before its first step: nothing was trained"


class StopSignal:
    """Inside `with`, `number` is that of the first signal, which has no other effect.
    A second SIGINT raises KeyboardInterrupt.  While `leaving` is true, any signal does.  Python
    handles signals only in the main thread; in other threads this does nothing.  SIGHUP that is
    ignored (`nohup`) stays so.  With `until_end` the handlers stay after `with`, for a rank whose
    process then ends: its launcher may still forward the signal.
    """

    def __init__(self, leaving: bool = False, *, until_end: bool = False) -> None:
        self.number = 0
        self.code = 0  # the exit code that the run asks for
        self.leaving = leaving
        self.until_end = until_end
        self._interrupted_s = 0.0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def received(self) -> bool:
        return self.number > 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            numbers = [each for each in SIGNALS if not (nohup and each == signal.SIGHUP)]
            self._before = {number: signal.signal(number, self._take) for number in numbers}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items() if not self.until_end else ():
            signal.signal(number, handler)
        self._before = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        now, before = time.monotonic(), self._interrupted_s
        self.number = self.number or number
        if number == signal.SIGINT and not before:
            self._interrupted_s = now
        if self.leaving or (number == signal.SIGINT and before and now - before > COPY_S):
            raise KeyboardInterrupt
