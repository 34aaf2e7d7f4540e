"""An InputError that a script does not catch is shown as one paragraph, once.

    shardwise: train.py, line 12: Given: ... Allowed: ... Write instead: ...

Python would print a traceback on every rank.  Here rank 0 prints the paragraph and the others stay
silent; where rank 0 has no such error, the rank that has it prints it, with its number, and ranks
that lose their connection to it say nothing.  The process ends with exit code 2.  torchrun adds a
report of its own, which a worker cannot prevent; the report says that the paragraph has been
printed.  If the script catches InputError, nothing here runs.
"""

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from shardwise.comm.ending import LOST
from shardwise.core.errors import InputError, RankError

#: How long a rank leaves it to rank 0 to print, whose error may come a little later.
_GRACE_S = 2.0
#: Set by the rank that prints.
_KEY = "shardwise/refusal"
_PACKAGE = str(Path(__file__).resolve().parent.parent)
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+)', re.MULTILINE)

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def show_refusals(rank: int = 0, size: int = 1) -> None:
    """From now on an InputError that ends this process is shown as said above."""
    if getattr(sys.excepthook, "func", None) is not _shown:
        sys.excepthook = partial(_shown, sys.excepthook, rank, size)


def _shown(
    before: Hook,
    rank: int,
    size: int,
    kind: type[BaseException],
    error: BaseException,
    frames: TracebackType | None,
) -> None:
    """The hook; `before` is the one that it replaced. It ends the process.

    One of several ranks leaves at once: while Python ends, the others lose their connections and
    fail, and torchrun would end this process before it has its exit code.
    """
    if not isinstance(error, InputError):
        if not (LOST.search(str(error)) and _another_said()):
            before(kind, error, frames)
        return
    said, text = rank, "".join(traceback.format_tb(frames))
    if isinstance(error.__cause__, RankError):  # of spawn: the place in the script is the rank's
        said, text = error.__cause__.rank, error.__cause__.text
    sys.stdout.flush()
    if _turn(rank, size):
        where = [f"rank {said}"] if said else []
        print(": ".join(["shardwise", *where, *_place(text), str(error)]), file=sys.stderr)
        _tell_torchrun(rank)
    sys.stderr.flush()
    if size > 1:
        os._exit(2)
    raise SystemExit(2)


def _place(text: str) -> list[str]:
    """The last line of the script's own that a traceback names."""
    frames = [(path, line) for path, line in _FRAME.findall(text) if not path.startswith(_PACKAGE)]
    known = [(path, line) for path, line in frames if Path(path).exists()]
    return [f"{Path(path).name}, line {line}" for path, line in known[-1:]]


def _turn(rank: int, size: int) -> bool:
    """Whether this rank is the one to print: rank 0, or the first of the others after a while."""
    if size == 1:
        return True
    if rank:
        time.sleep(_GRACE_S)  # a launcher ends this rank meanwhile, if another one has failed
    try:
        return dist.distributed_c10d._get_default_store().add(_KEY, 1) == 1
    except (RuntimeError, ValueError):  # there is none, or whoever kept it has gone
        return True


def _another_said() -> bool:
    """Whether a rank is gone because of an InputError, which it prints."""
    try:
        return dist.distributed_c10d._get_default_store().check([_KEY])
    except (RuntimeError, ValueError):
        return False


def _tell_torchrun(rank: int) -> None:
    """Write what torchrun's report says of this rank, in the file that it has named for that."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    message = f"InputError: see the paragraph that rank {rank} has printed"
    told = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
    try:
        Path(path).write_text(json.dumps({"message": told}), encoding="utf-8")
    except OSError:
        return
