"""The worker: what a process that the launcher started does around its function.

    launcher  <-- None       the rank has started
    one pipe  <-- bytes      the pickled result          or  <-- Failure   its error
    a rank    --> b""        all ranks have results, and may exit

A failed rank keeps its connections open until the launcher kills it, so that other ranks see no
lost connection.  If the launcher dies, the pipe closes and the rank exits.
"""

import faulthandler
import os
import pickle
import runpy
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.gloo.shared import leave
from shardwise.comm.start.call_stack import HIDDEN_FILES
from shardwise.comm.torch_links import TorchLinks
from shardwise.core.errors import InputError


@dataclass(frozen=True, order=True)
class Failure:
    """Why a rank failed: the time `at_ns` (monotonic clock) and the text of its error.

    `code` is the exit code of a rank that called sys.exit, otherwise None.  `input_error` is the
    text of an InputError, empty for any other error.  `output` is what a dead rank had written.
    `lost`: the process died or hangs, and reported nothing.
    """

    at_ns: int
    rank: int
    text: str
    code: int | None = None
    input_error: str = ""
    output: str = ""
    lost: bool = False


@dataclass(frozen=True)
class Job:
    """What a rank runs: `work` is (function, args), pickled unless the rank is forked.

    `variables` are set in its environment.  A fatal signal writes the stacks of all threads to the
    file `errors`.  With `quiet`, the error output goes there too.
    """

    work: bytes | tuple[Callable[..., Any], tuple[Any, ...]]
    variables: Mapping[str, str]
    quiet: bool
    pipe: "Connection[Any, Any]"
    errors: "Connection[Any, Any]"


def run(job: Job) -> None:
    """The entry point of a rank: sends the pickled result of its function."""
    os.environ.update(job.variables)
    os.setsid()  # so that Ctrl-C reaches only the launcher
    all_ended = threading.Event()
    threading.Thread(target=_listen, args=(job.pipe, all_ended), daemon=True).start()
    job.pipe.send(None)
    if job.quiet:
        os.dup2(job.errors.fileno(), 2)
    faulthandler.enable(job.errors.fileno())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        function, args = pickle.loads(job.work) if isinstance(job.work, bytes) else job.work  # noqa: S301 (ours)
        result = pickle.dumps(function(*args))
        leave()  # before waiting for the other ranks, since one may wait for this rank
        links = TorchLinks.of_process
        if links is not None and links.peers is not None:
            links.peers.stop()
        job.pipe.send(result)
    except SystemExit as error:
        _fail(job, f"it ended by sys.exit({error.code!r})", _exit_code(error))
    except BaseException as error:  # noqa: BLE001  every error that ends a rank is reported
        _fail(job, _traceback(error), None, str(error) if isinstance(error, InputError) else "")
    all_ended.wait()  # a rank that left earlier would close connections that others still use
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


def _listen(pipe: "Connection[Any, Any]", all_ended: threading.Event) -> None:
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):  # the launcher has died
        os._exit(1)
    all_ended.set()


def _exit_code(error: SystemExit) -> int:
    """The exit code that Python would use.  Prints a text passed to sys.exit, as Python does."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _traceback(error: BaseException) -> str:
    """The traceback without the frames of this file and runpy."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in HIDDEN_FILES:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _fail(job: Job, text: str, code: int | None, input_error: str = "") -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    rank = int(os.environ["RANK"])
    job.pipe.send(Failure(time.monotonic_ns(), rank, text, code, input_error))
