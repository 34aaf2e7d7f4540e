"""Errors of saving and loading: one paragraph, the same on every rank."""

import errno
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from shardwise.checkpoint.folder import all_in
from shardwise.core.errors import InputError, RunError, bad, causes

#: Less free space than this is the likely reason of a failed write.
LITTLE_BYTES = 2**24
#: Source locations and addresses that torch's C++ adds to its messages.
_CPP = re.compile(r"\[enforce fail at [^]]*\]\s*\.?\s*|\(function \w+\)|Exception raised from.*")


def reason(failures: Mapping[int, BaseException], what: str) -> BaseException:
    """The error to raise on every rank: an InputError, an interrupt, or a RunError of one rank."""
    rank, cause = min(failures.items(), key=lambda entry: entry[0])
    refused = [error for error in failures.values() if isinstance(error, InputError)]
    if refused:
        return refused[0]
    if isinstance(cause, KeyboardInterrupt | SystemExit | RunError):
        return cause
    return RunError(f"{what}: on rank {rank}, {type(cause).__name__}: {plain(str(cause))}")


def plain(text: str) -> str:
    """The first line of an error's text, without C++ source locations."""
    lines = _CPP.sub("", text).strip().splitlines()
    return lines[0].strip() if lines else "unknown reason"


def unwritten(error: OSError | RuntimeError, folder: Path) -> OSError:
    """The operating system's error behind a failed write. If the disk is full, torch's zip writer
    fails again when it is closed, with an error about positions in a C++ stream.
    """
    for cause in causes(error):
        if isinstance(cause, OSError):
            return cause
    if free_bytes(folder) < LITTLE_BYTES:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return OSError(errno.EIO, plain(str(error)))


def free_bytes(folder: Path) -> float:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return float("inf")


def damaged(file: Path, why: str) -> InputError:
    """The error for a file whose contents differ from the saved ones."""
    path = file.parent
    others = [other.name for other in all_in(path.parent) if other != path]
    if others:
        removed = f"rm -r {shlex.quote(str(path))}"
        instead = f"{removed}, then the same command; it continues from {others[-1]}"
    else:
        instead = (
            f"a backup copy of '{path}' (there is no other checkpoint beside it), or a new run "
            "(shardwise train with --overwrite)"
        )
    return bad(f"the file '{file}', which is damaged ({why})", "an undamaged checkpoint", instead)


def unread(file: Path, error: OSError) -> InputError:
    """A file that could not be read is damaged only if it is missing or no regular file. Without
    permission, or while a disk or a server does not answer, its contents may be right.
    """
    why = error.strerror or str(error)
    if error.errno in (errno.ENOENT, errno.EINVAL, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
        return damaged(file, "it is not there" if error.errno == errno.ENOENT else why)
    return bad(
        f"the file '{file}', which cannot be read ({why})",
        "a checkpoint whose files this process may read, on every rank",
        f"ls -l {shlex.quote(str(file.parent))}, and the same command when the file can be read",
    )
