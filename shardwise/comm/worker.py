"""this file is what a started process does around the function it was started for.

begin      a session of its own (a terminal's Ctrl-C reaches the launcher alone), its number of
           threads, and a lifeline: when the launcher dies, however it dies, so does the rank
work       the function, with a look-out for ranks that will not come (hang_detector.py)
end        wait for the others, destroy the process group, hand over the result
or fail    write the error down, and hold still until ended
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
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.hang_detector import LookOut
from shardwise.comm.shared import leave
from shardwise.comm.status_dir import Room
from shardwise.core.errors import InputError

#: How long a failed rank waits to be ended before it ends itself.
_HOLD_S = 8.0
#: Files whose frames are around the function's own.
_AROUND = (__file__, runpy.__file__, "<frozen runpy>")


@dataclass(frozen=True)
class Job:
    """What every rank is given: `work` is the pickled (function, args).

    Where `quiet`, the error output of all ranks but the first goes to the room.
    """

    work: bytes
    room: Room
    threads: int
    quiet: bool


def run(job: Job) -> None:
    """The entry point of a rank: the pickled result of its function goes to the room."""
    rank = int(os.environ["RANK"])
    os.setsid()
    _follow_launcher()
    if not job.room.enter(rank):
        os._exit(1)
    if job.quiet and rank > 0:
        _keep_stderr(job.room, rank)
    torch.set_num_threads(job.threads)
    look_out = LookOut(job.room, rank, _AROUND)
    try:
        packed = _work(job)
        leave()  # before the wait for the others, of whom one may wait for us
        look_out.stop()
        job.room.finish(rank, packed)
    except SystemExit as error:
        _hold(job.room, rank, f"it ended by sys.exit({error.code!r})", _exit_code(error))
    except InputError as error:
        _hold(job.room, rank, _told(error), refused=str(error))
    except BaseException as error:  # noqa: BLE001  whatever ends a rank is reported
        _hold(job.room, rank, _told(error))
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def run_module(module: str, argv: Sequence[str]) -> None:
    """What `python -m module argv` does. Leaving with exit code 0 is a plain return."""
    sys.argv = [module, *argv]
    # The launcher's main module is imported again in every child, and may be this one.
    warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if _exit_code(error) != 0:
            raise


def _work(job: Job) -> bytes:
    function, args = pickle.loads(job.work)  # noqa: S301  the launcher's own
    result = function(*args)
    return pickle.dumps(result)


def _exit_code(error: SystemExit) -> int:
    """The exit code Python would end with; a text is printed, as Python would."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _told(error: BaseException) -> str:
    """The traceback, from the first frame that is not this file's nor runpy's."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _AROUND:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _hold(room: Room, rank: int, text: str, code: int | None = None, refused: str = "") -> Any:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        room.fail(rank, text, code, refused)
        time.sleep(_HOLD_S)
    except OSError:  # no room to write it down: the screen is what is left
        print(f"rank {rank} failed:\n{text}", file=sys.stderr, flush=True)
    os._exit(1)


def _keep_stderr(room: Room, rank: int) -> None:
    sys.stderr.flush()
    kept = os.open(room.stderr(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(kept, 2)
    os.close(kept)


def _follow_launcher() -> None:
    launcher = multiprocessing.parent_process()

    def wait() -> None:
        if launcher is not None:
            launcher.join()
            os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
