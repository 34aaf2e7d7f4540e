"""One writer of a folder at a time: a lock file beside it, which the system frees with its holder.

weights/                 complete, or absent
.writing-weights/        written now, or left by a killed writer
.writing-weights.lock    locked while somebody writes; a file that nobody locks means nothing
.replaced-weights/       the folder that --overwrite replaces, until the new one has its name
"""

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from shardwise.core.errors import bad

#: What flock raises on a file system without locks, where nobody can be refused.
NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
LOCK_OF_A_RUN: Final = "run.lock"


@contextmanager
def only_writer(path: Path, file: Path | None = None) -> Iterator[None]:
    """Hold the lock of `path`, which is `file`, by default one beside it, in an existing folder.

    Raises InputError if another process or thread holds it, OSError if it cannot be made.
    """
    file = path.with_name(f".writing-{path.name}.lock") if file is None else file
    opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        if not _locked(opened, file):
            raise bad(
                f"'{path}', which {_holder(opened)} is writing",
                "one writer of a folder at a time; nothing was changed",
                "the same command when that process has ended, or another folder",
            )
        try:
            holder = {"host": socket.gethostname(), "pid": os.getpid()}
            os.ftruncate(opened, 0)
            os.write(opened, json.dumps(holder).encode())
            yield
        finally:
            file.unlink(missing_ok=True)  # still locked: who opened it meanwhile sees it is gone
    finally:
        os.close(opened)


def _locked(opened: int, file: Path) -> bool:
    """Whether the file is locked now, and still the one of that name."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(opened), file.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            return True
        raise


def _holder(opened: int) -> str:
    try:
        said = json.loads(os.pread(opened, 1000, 0))
        return f"process {said['pid']} on {said['host']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"


def settle(to: Path) -> Path:
    """Remove what a killed writer of `to` left; returns the name to write under, which is free.

    If it was killed between two renames, the folder that it was replacing gets its name back.
    Only the holder of the lock may call it.
    """
    unfinished, replaced = _beside(to, "writing"), _beside(to, "replaced")
    if replaced.exists() and not to.exists():
        replaced.rename(to)
    for left in (unfinished, replaced):
        if left.exists():
            shutil.rmtree(left)
    return unfinished


def replace(unfinished: Path, to: Path) -> None:
    """Give a complete folder its name, then remove the folder that had it."""
    replaced = _beside(to, "replaced")
    if to.exists():
        to.rename(replaced)
    try:
        unfinished.rename(to)
    except BaseException:
        if replaced.exists():
            replaced.rename(to)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _beside(to: Path, kind: str) -> Path:
    return to.with_name(f".{kind}-{to.name}")
