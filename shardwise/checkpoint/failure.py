"""Why saving or loading failed: one paragraph in plain words, the same on every rank."""

import errno
import os
import re
import shutil
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from shardwise.checkpoint.folder import all_in
from shardwise.core.errors import InputError, RunError, bad

#: Room below which it is the likely reason why nothing can be written.
LITTLE_BYTES = 2**24
#: What torch's C++ puts before and around its own message: places in its sources, addresses.
_CPP = re.compile(r"\[enforce fail at [^]]*\]\s*\.?\s*|\(function \w+\)|Exception raised from.*")


def reason(error: CheckpointException, what: str) -> BaseException:
    """The error to raise on every rank instead of torch's.

    Bad input stays what it is, and so does an interrupt; anything else is a RunError that names
    the first rank that had it.
    """
    rank, (cause, _) = min(error.failures.items(), key=lambda entry: entry[0])
    refused = [c for c, _ in error.failures.values() if isinstance(c, InputError)]
    if refused:
        return refused[0]
    if isinstance(cause, KeyboardInterrupt | SystemExit | RunError):
        return cause
    return RunError(f"{what}: on rank {rank}, {type(cause).__name__}: {plain(str(cause))}")


def plain(text: str) -> str:
    """The first line of an error's text, without places in C++ sources."""
    lines = _CPP.sub("", text).strip().splitlines()
    return lines[0].strip() if lines else "no reason was given"


def unwritten(error: OSError | RuntimeError, folder: Path) -> OSError:
    """The operating system's error behind a write that failed.

    Where a disk is full, torch's zip writer fails a second time as it is closed, and what it
    raises then speaks of positions in a C++ stream.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    if free_bytes(folder) < LITTLE_BYTES:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return OSError(errno.EIO, plain(str(error)))


def free_bytes(folder: Path) -> float:
    """How much room is left on the disk of a folder; infinity where that cannot be found."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return float("inf")


def damaged(file: Path, why: str) -> InputError:
    """The error for a file whose contents cannot be what was saved."""
    return _unusable(file, f"which is damaged ({why})")


def foreign(file: Path, why: str) -> InputError:
    """The error for a file that was saved, but not in this checkpoint."""
    return _unusable(file, f"which does not belong to this checkpoint ({why})")


def _unusable(file: Path, what: str) -> InputError:
    path = file.parent
    others = [other.name for other in all_in(path.parent) if other != path]
    if others:
        instead = (
            f"rm -r '{path}', and the same command again: {others[-1]} is the newest then, and "
            "what was trained after it is trained again"
        )
    else:
        instead = (
            f"a copy of '{path}' from elsewhere, for no other checkpoint is beside it; or a new "
            "run (shardwise train with --overwrite)"
        )
    return bad(f"the file '{file}', {what}", "a checkpoint as it was saved", instead)
