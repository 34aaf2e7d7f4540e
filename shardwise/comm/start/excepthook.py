"""An excepthook that prints an InputError as one paragraph, once per run, and the first cause.

    shardwise: train.py, line 12: Given: ... Allowed: ... Write instead: ...

Python would print a traceback on every rank.  Instead rank 0 prints the paragraph and the others
stay silent.  If rank 0 has no such error, the rank that has it prints it with its number.  Ranks
that lose their connection to one that has printed print nothing.  The process exits with code 2,
after its atexit handlers have run and its open files are written.  torchrun adds its own report.

Ranks that made different calls (OtherCallError), or whose peer is gone, each print a paragraph,
which names their own line, and exit with code 1.
"""

import atexit
import gc
import io
import os
import re
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from shardwise.core.errors import InputError, OtherCallError, RankError

#: How long another rank waits for rank 0 to print.
_GRACE_S = 2.0
#: The keys that printing ranks set in the store: of an InputError, and of different calls.
_REFUSAL, _OTHER_CALL = "shardwise/refusal", "shardwise/other call"
#: Errors of a rank whose peer is gone.  They are never the cause if another rank has one.
_GONE = r"rank \d+( of the group)? (is gone: process|has left, but)|the connection to .* failed in"
LOST_CONNECTION = re.compile(
    r"closed by peer|reset by peer|Connection reset|Broken pipe|pair\.cc|recvValue failed"
    rf"|Failed to recv|ncclRemoteError|remote process exited|{_GONE}"
)
_PACKAGE = f"{Path(__file__).resolve().parents[2]}{os.sep}"
#: Where code is that is not the user's script: ours, torch's, Python's.
_NOT_SCRIPT = (_PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+)', re.MULTILINE)

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def install_excepthook(
    rank: int = 0, size: int = 1, close: Callable[[], Any] | None = None
) -> None:
    """Install the hook for this process; `close` is the atexit handler that closes connections."""
    if getattr(sys.excepthook, "func", None) is not _excepthook:
        sys.excepthook = partial(_excepthook, sys.excepthook, rank, size, close)


def _excepthook(
    before: Hook,
    rank: int,
    size: int,
    close: Callable[[], Any] | None,
    kind: type[BaseException],
    error: BaseException,
    frames: TracebackType | None,
) -> None:
    """The hook; `before` is the hook it replaced.  With several ranks it exits before connections
    close: else the others would fail, and torchrun would kill this process before its exit code.
    """
    refused, trace = isinstance(error, InputError), "".join(traceback.format_tb(frames))
    lost = not refused and LOST_CONNECTION.search(str(error))
    if lost and (_printed(_REFUSAL, 0) or _printed(_OTHER_CALL, 0)):
        return
    if not (refused or isinstance(error, OtherCallError) or re.search(_GONE, str(error))):
        before(kind, error, frames)
        return
    failed_rank = rank
    if isinstance(error.__cause__, RankError):  # from spawn: show the rank's line of the script
        failed_rank, trace = error.__cause__.rank, error.__cause__.text
    if close is not None:
        atexit.unregister(close)
    if size > 1:
        _end_program()  # before rank 0 prints: then torchrun may end this rank
    if rank and size > 1 and refused:
        time.sleep(_GRACE_S)  # if another rank failed first, the launcher kills this one meanwhile
    if size == 1 or _printed(_REFUSAL if refused else _OTHER_CALL, 1) in (0, 1) or not refused:
        where = [f"rank {failed_rank}"] if failed_rank else []
        text = ": ".join(["shardwise", *where, *_script_line(trace), str(error)])
        print(text, file=sys.stderr, flush=True)
    code = 2 if refused else 1
    if size > 1 and not (refused or rank):
        time.sleep(_GRACE_S)  # rank 0 has the store, which other ranks need to print theirs
    if size > 1:
        os._exit(code)
    if not hasattr(sys, "ps1"):  # an interpreter goes on
        raise SystemExit(code)


def _end_program() -> None:
    """What Python does for a program that ends: atexit handlers, and the rest of open files."""
    with suppress(BaseException):  # as Python, which ends whatever a handler raises
        atexit._run_exitfuncs()
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):
            with suppress(Exception):  # closed, or not writable
                each.flush()


def _script_line(trace: str) -> list[str]:
    frames = _FRAME.findall(trace)
    frames = [(path, line) for path, line in frames if not path.startswith(_NOT_SCRIPT)]
    known = [(path, line) for path, line in frames if Path(path).exists()]
    return [f"{Path(path).name}, line {line}" for path, line in known[-1:]]


def _printed(key: str, more: int) -> int:
    """How many ranks have set the key, with `more`; 0 without a store, or if it has closed."""
    try:
        return dist.distributed_c10d._get_default_store().add(key, more)
    except (RuntimeError, ValueError):
        return 0


# --- the first cause of a failure -----------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Failure:
    """Why a rank failed: the time `at_ns` (monotonic clock) and the text of its error.
    `code` is the exit code of a rank that called sys.exit, otherwise None.  `input_error` is the
    text of an InputError, empty for any other error.  `output` is what a dead rank had written.
    """

    at_ns: int
    rank: int
    text: str
    code: int | None = None
    input_error: str = ""
    output: str = ""


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The earliest failure that is no lost connection; of equal InputErrors the lowest rank's."""
    ordered = sorted(failures)
    own = [each for each in ordered if not LOST_CONNECTION.search(each.text)] or ordered
    same = [each for each in own if each.input_error and each.input_error == own[0].input_error]
    return min(same, key=lambda each: each.rank, default=own[0])


def death_text(code: int, started: bool) -> str:
    """How a rank died that reported no error."""
    text = f"it {ended(code)}"
    if code < 0:
        return text + ", as the system does when memory runs out" * (code == -signal.SIGKILL)
    text += " before its function had returned"
    if not started:
        text += (
            ". It had not started yet. Every rank imports the main script, so put the script's own"
            " code under 'if __name__ == \"__main__\":'"
        )
    return text


def ended(code: int) -> str:
    name = signal.Signals(-code).name if code < 0 else ""
    return f"was ended by {name}" if name else f"left with exit code {code}"


def described(failures: Iterable[Failure], first: Failure) -> str:
    own = f"{first.text}. Its error output:\n{first.output}" if first.output else first.text
    others = (each for each in failures if each.rank != first.rank)
    return own + "".join(f"\n(then rank {o.rank}: {_summary(o.text)})" for o in others)


def _summary(text: str) -> str:
    lines = text.splitlines()
    below = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=-1) + 1
    return next((line for line in lines[below:] if not line.startswith(" ")), lines[-1])
