"""Copies of a run's checkpoints in a second folder, made by a thread of rank 0.

RUN/checkpoints/    on a fast local disk, which all ranks of this machine see
MIRROR/             on a shared or remote disk, with the same names and files

A copy is written under a hidden name, compared with the hashes in the manifest, and published by
one rename, as a save is.  If saves come faster than copies, the newest is copied next.
"""

import shutil
import threading
from pathlib import Path

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.lock import SAVING_LOCK, only_writer
from shardwise.checkpoint.manifest import read_manifest, require_files
from shardwise.core.errors import InputError, one_line
from shardwise.train.config_sections import TrainSection


class Mirror:
    """The copies in `folder`, of which as many stay as of the checkpoints.

    `take_failure` says which copy failed last, and why.
    """

    def __init__(self, folder: Path, train: TrainSection) -> None:
        self.folder, self.train, self.failure = folder, train, ""
        self._next: Path | None = None
        self._now: Path | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def sources(self) -> list[Path]:
        """The checkpoints that are being copied, or will be."""
        return [path for path in (self._now, self._next) if path is not None]

    def copy(self, path: Path) -> None:
        """Copy a checkpoint beside the next steps."""
        with self._lock:
            self._next = path
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="shardwise-mirror", daemon=True
                )
                self._thread.start()

    def take_failure(self) -> str:
        """What to say of the last copy that failed, once; "" if none has."""
        said, self.failure = self.failure, ""
        return said

    def wait(self, limit_s: float | None = None) -> None:
        """Wait for all copies, at most `limit_s`.  Raises nothing."""
        thread = self._thread
        if thread is not None:
            thread.join(limit_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._now, self._next = self._next, None
                if self._now is None:
                    self._thread = None
                    return
            try:
                self._copy(self._now)
            except (OSError, InputError) as error:
                why = one_line(str(error))
                self.failure = f"{self._now.name} could not be copied to '{self.folder}': {why}"

    def _copy(self, path: Path) -> None:
        """Copy, compare and publish a checkpoint, and remove old copies.

        Raises OSError if that fails, and InputError for a damaged copy or another writer there.
        """
        step, manifest = folders.step_of(path), read_manifest(path)
        unfinished = folders.unfinished(self.folder, step)
        with only_writer(self.folder, self.folder / SAVING_LOCK):
            try:
                folders.clear(unfinished)
                for name in (*manifest.files, folders.MANIFEST):
                    shutil.copyfile(path / name, unfinished / name)
                require_files(unfinished, manifest, manifest.files)
                folders.publish(unfinished, step)
                folders.prune(self.folder, self.train.keep, best=self.train.keep_best)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
