"""The lock on a run's folder: one run at a time writes into it.

The launcher holds it for its ranks; without our launcher rank 0 does.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from shardwise.checkpoint.lock import RUN_LOCK, LockedError, locked
from shardwise.core.errors import bad
from shardwise.core.tools.suggest import beside, setting
from shardwise.train import run_folder
from shardwise.train.config import Config
from shardwise.train.data.packed import unwritable_folder
from shardwise.train.prepare import RunStart


@contextmanager
def hold(config: Config, start: RunStart, patience_s: float = 0.0) -> Iterator[RunStart]:
    """Hold the lock on the run's folder; yields `start` with `auto` resolved under the lock.

    Raises InputError if another run holds it for `patience_s`, and unless a run can start in the
    folder in this way. Removes the folders that it made, if they are empty at the end.
    """
    path = config.folder / RUN_LOCK
    with ExitStack() as held:
        try:
            if not path.exists():
                settled = start.resolve_auto(config)
                run_folder.check(config, settled.resume, settled.overwrite)
            held.enter_context(locked(path, patience_s))
        except LockedError as error:
            raise bad(
                f"run.folder = '{config.folder}', where another run is writing ({error})",
                "a folder that no other run is using; nothing was changed",
                f"{setting('run.folder', beside(config.folder))}, or the same command when that "
                "run has ended",
            ) from None
        except OSError as error:
            raise unwritable_folder(config.folder, "run.folder", error) from None
        yield start.resolve_auto(config)
