"""Replacing a folder: the new one is written beside it, and gets its name when it is complete.

weights/                 complete, or absent
.writing-weights/        written now, or left by a killed writer
.replaced-weights/       the folder that --overwrite replaces, until the new one has its name

Only the holder of the lock on the folder (lock.py) does so.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors import SafetensorError

from shardwise.checkpoint.lock import only_writer
from shardwise.core.errors import RunError, bad


@contextmanager
def writing(path: Path, lock: Path) -> Iterator[None]:
    """Hold the lock on a folder that a command writes.

    Raises InputError if another process holds it or nothing can be written there, and RunError if
    the disk fails or is full in the block.
    """
    with ExitStack() as held:
        try:
            held.enter_context(only_writer(path, lock))
        except OSError as error:
            raise bad(
                f"the folder '{path}', which cannot be written ({error.strerror})",
                "a folder that this user may write to, on a disk with free space",
                f"--to /tmp/{path.name}",
            ) from None
        try:
            yield
        except (OSError, SafetensorError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise RunError(
                f"'{path}' could not be written: {why}. What was there before is unchanged."
            ) from None


def settle(to: Path) -> Path:
    """Remove what a killed writer of `to` left; returns the name to write under, which is free.

    If it was killed between two renames, the folder that it was replacing gets its name back.
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
