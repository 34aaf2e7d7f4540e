"""The worker: what a process that the launcher started does around its function.

start      become leader of a session, so that Ctrl-C reaches only the launcher; set the number of
           threads; start a thread that exits the process when the launcher dies
run        call the function, with a hang detector beside it
end        write the result, wait for the other ranks, destroy the process group
or fail    write the error, and wait to be killed
"""

import multiprocessing
import os
import pickle
import runpy
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.hang_detector import HangDetector
from shardwise.comm.shared import leave
from shardwise.comm.status_dir import StatusDir
from shardwise.core.errors import InputError

#: How long a failed rank waits to be killed before it exits by itself.
_HOLD_S = 8.0
#: Files whose frames are left out of tracebacks.
_HIDDEN_FILES = (__file__, runpy.__file__, "<frozen runpy>")


@dataclass(frozen=True)
class Job:
    """What every rank runs: `work` is (function, args), pickled unless the rank is forked.

    With `quiet`, the error output of all ranks but the first goes to the status directory.
    """

    work: bytes | tuple[Callable[..., Any], tuple[Any, ...]]
    status: StatusDir
    threads: int
    quiet: bool


def run(job: Job) -> None:
    """The entry point of a rank: writes the pickled result of its function."""
    rank = int(os.environ["RANK"])
    os.setsid()
    _exit_with_launcher()
    if not job.status.enter(rank):
        os._exit(1)
    if job.quiet and rank > 0:
        _redirect_stderr(job.status, rank)
    torch.set_num_threads(job.threads)
    detector = HangDetector(job.status, rank, _HIDDEN_FILES)
    try:
        packed = _work(job)
        leave()  # before waiting for the other ranks, since one may wait for this rank
        detector.stop()
        job.status.finish(rank, packed)
    except SystemExit as error:
        _hold(job.status, rank, f"it ended by sys.exit({error.code!r})", _exit_code(error))
    except InputError as error:
        _hold(job.status, rank, _traceback(error), input_error=str(error))
    except BaseException as error:  # noqa: BLE001  every error that ends a rank is reported
        _hold(job.status, rank, _traceback(error))
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def run_module(module: str, argv: Sequence[str]) -> None:
    """Do what `python -m module argv` does, but return if it exits with code 0."""
    sys.argv = [module, *argv]
    # The launcher's main module is imported again in every child, and may be this module.
    warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if _exit_code(error) != 0:
            raise


def _work(job: Job) -> bytes:
    work = job.work
    function, args = pickle.loads(work) if isinstance(work, bytes) else work  # noqa: S301 (ours)
    result = function(*args)
    return pickle.dumps(result)


def _exit_code(error: SystemExit) -> int:
    """The exit code that Python would use.  Prints a text passed to sys.exit, as Python does."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _traceback(error: BaseException) -> str:
    """The traceback without the frames of this file and runpy."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _HIDDEN_FILES:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _hold(
    status: StatusDir, rank: int, text: str, code: int | None = None, input_error: str = ""
) -> Any:
    """Record the failure and wait to be killed, so that other ranks keep their connections."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        status.fail(rank, text, code, input_error)
        time.sleep(_HOLD_S)
    except OSError:  # the disk is full, say
        print(f"rank {rank} failed:\n{text}", file=sys.stderr, flush=True)
    os._exit(1)


def _redirect_stderr(status: StatusDir, rank: int) -> None:
    sys.stderr.flush()
    file = os.open(status.stderr(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.close(file)


def _exit_with_launcher() -> None:
    launcher = multiprocessing.parent_process()

    def wait() -> None:
        if launcher is not None:
            launcher.join()
            os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
