"""The lock on a run's folder: one run at a time writes into it.

It is an flock of the file `run.lock`, which says who holds it. The launcher holds it for its ranks;
without our launcher rank 0 does. The kernel releases it when its process ends, however that ends;
then the file stays, and the next run locks it.
"""

import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from shardwise.core.errors import InputError, bad
from shardwise.core.suggest import beside
from shardwise.train import folder
from shardwise.train.config import Config
from shardwise.train.packed import unwritable_folder
from shardwise.train.prepare import Start

POLL_S: Final = 0.1
#: What flock raises on a file system without locks.
NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def hold(config: Config, start: Start, patience_s: float = 0.0) -> Iterator[Start]:
    """Hold the lock on the run's folder; yields `start` with `auto` resolved under the lock.

    Raises InputError if another run holds it for `patience_s`, and unless a run can start in the
    folder in this way. Removes the folders that it made, if they are empty at the end.
    """
    path = config.folder / folder.LOCK
    try:
        if not path.exists():
            settled = start.resolve_auto(config)
            folder.check(config, settled.resume, settled.overwrite)
        made = [one for one in (config.folder, *config.folder.parents) if not one.exists()]
        config.folder.mkdir(parents=True, exist_ok=True)
        opened = _acquire(path, time.monotonic() + patience_s)
    except OSError as error:
        raise unwritable_folder(config.folder, "run.folder", error) from None
    try:
        yield start.resolve_auto(config)
    finally:
        _release(path, opened, made)


def _acquire(path: Path, until_s: float) -> int:
    """Lock the file and write who holds it; returns its descriptor. Raises InputError."""
    while True:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(opened)
            if time.monotonic() >= until_s:
                raise _held(path) from None
            time.sleep(POLL_S)
            continue
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(opened)
                raise
            print(
                f"shardwise: {path.parent} is on a file system without locks ({error.strerror}): "
                "a second run in this folder would not be refused",
                file=sys.stderr,
            )
            return opened
        if _is_at(path, opened):
            break
        os.close(opened)  # the run that held it has removed it
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")}
    os.ftruncate(opened, 0)
    os.write(opened, json.dumps(holder).encode())
    return opened


def _release(path: Path, opened: int, made: list[Path]) -> None:
    """Remove the file, unless it is another run's, and the folders that were made and are empty."""
    with suppress(OSError):
        if _is_at(path, opened):
            path.unlink()
    os.close(opened)
    with suppress(OSError):
        for one in made:
            one.rmdir()


def _is_at(path: Path, opened: int) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), path.stat())
    except FileNotFoundError:
        return False


def _held(path: Path) -> InputError:
    """The error for a folder with another run, by what its lock says."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        who = f"process {found['pid']} on {found['host']}, since {found['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        who = f"{path} is locked"
    return bad(
        f"run.folder = '{path.parent}', where another run is writing ({who})",
        "a folder that no other run is using; nothing was changed",
        f"--set run.folder={beside(path.parent)}, or the same command when that run has ended",
    )
