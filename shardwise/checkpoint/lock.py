"""The lock on a folder: one process at a time writes into it, others may read.

It is an flock of a file that names its holder. The kernel releases it when its process ends,
however that ends; then the file stays, and the next writer locks it.

    RUN/run.lock                  a run of `shardwise train`, for its life; `checkpoint import`
    FOLDER/saving.lock            the save of a checkpoint in FOLDER, by rank 0
    .writing-WEIGHTS.lock         `checkpoint export` into WEIGHTS, beside it
"""

import errno
import fcntl
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from shardwise.core.errors import bad

POLL_S: Final = 0.1
LONGEST: Final = 1000  # bytes that are read of what a lock says
RUN_LOCK, SAVING_LOCK = "run.lock", "saving.lock"
#: What flock raises on a file system without locks, where nobody can be refused.
NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def locked(file: Path, patience_s: float = 0.0, folder: Path | None = None) -> Iterator[None]:
    """Hold the lock `file` on `folder`; None: on its own. Makes its own folder, which is removed at
    the end if it is empty then. Raises InputError if another process or thread holds it for
    `patience_s`, and OSError; warns where files have no locks.
    """
    made = [one for one in (file.parent, *file.parent.parents) if not one.exists()]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = _acquire(file, time.monotonic() + patience_s, folder or file.parent)
        try:
            yield
        finally:
            _release(file, opened)
    finally:
        with suppress(OSError):  # not empty, or never made
            for one in made:
                one.rmdir()


def _acquire(file: Path, until_s: float, folder: Path) -> int:
    while True:
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            free = _flock(opened, file)
            if free and _is_at(file, opened):
                _sign(opened)
                return opened
            if not free and time.monotonic() >= until_s:
                raise bad(
                    f"'{folder}', where another process is writing ({_holder(opened)})",
                    "one writer of a folder at a time; nothing was changed",
                    "the same command when that process has ended, or another folder",
                )
        except BaseException:
            os.close(opened)
            raise
        os.close(opened)
        if not free:
            time.sleep(POLL_S)


def _flock(opened: int, file: Path) -> bool:
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warnings.warn(
            f"{file.parent} is on a file system without locks ({error.strerror}): a second writer "
            "would not be refused",
            stacklevel=2,
        )
    return True


def _sign(opened: int) -> None:
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")}
    with suppress(OSError):  # a full disk: the lock holds without a text
        os.ftruncate(opened, 0)
        os.write(opened, json.dumps(holder).encode())


def _release(file: Path, opened: int) -> None:
    with suppress(OSError):
        if _is_at(file, opened):
            file.unlink()  # still locked: who opened it meanwhile sees that it is gone
    os.close(opened)


def _is_at(file: Path, opened: int) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), file.stat())
    except FileNotFoundError:
        return False


def _holder(opened: int) -> str:
    try:
        said = json.loads(os.pread(opened, LONGEST, 0))
        return f"process {said['pid']} on {said['host']}, since {said['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "unknown"
