"""The directory of status files that a launcher and its ranks share.

    0.pid     rank 0 has started              0.failed   its error, with the time
    0.done    its pickled result              0.stderr   its error output, if held back
    0.waits   it waits for other ranks        closed     a rank that starts now exits at once
    0.beat    its latest heartbeat            launcher   the process that owns the directory

A rank that fails writes `failed` first and then waits, with its connections open, until the
launcher kills it.  The other ranks therefore see no lost connection, and the earliest `failed` file
names the cause.  A rank that dies without writing one is found by its pid.

The launcher removes its directory at exit.  If the launcher was killed, the next launcher of the
same user removes the directory and kills any ranks that are still alive (stopped processes, say).
It removes the semaphores too, through which the launcher starts its ranks: multiprocessing names
them in /dev/shm, here by the directory, and if all processes are killed at once they stay.
"""

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.comm.heartbeat import Heartbeat, parse
from shardwise.comm.host import identity, is_dead

_POLL_S = 0.005
_SEMAPHORES = Path("/dev/shm")  # noqa: S108  where Linux keeps them, as files
_PREFIX = "shardwise-"
_BEAT_BYTES = 4096
_LAST_CALLS = 500  # characters kept of a long stack; each takes up to six bytes in JSON


@dataclass(frozen=True, order=True)
class Failure:
    """Why a rank failed: the time `at_ns` (monotonic clock) and the text of its error.

    `code` is the exit code of a rank that called sys.exit, otherwise None.  `input_error` is the
    text of an InputError, empty for any other error.
    """

    at_ns: int
    rank: int
    code: int | None
    text: str
    input_error: str = ""


@dataclass(frozen=True)
class StatusDir:
    """The status files of one launch of `ranks` processes."""

    folder: Path
    ranks: int

    # ---- written by a rank -----------------------------------------------------------------------

    def enter(self, rank: int) -> bool:
        """Record that `rank` has started.  False if the launcher has already given up."""
        self._write(f"{rank}.pid", identity(os.getpid()))
        return not (self.folder / "closed").exists()

    def finish(self, rank: int, result: bytes) -> None:
        """Record the result, then wait for the results of all ranks.

        A rank that left earlier would close connections that others still use.
        """
        self._write(f"{rank}.done", result)
        while len(self.finished()) < self.ranks:
            time.sleep(_POLL_S)

    def fail(self, rank: int, text: str, code: int | None = None, input_error: str = "") -> None:
        """Record the error of `rank`.  The launcher calls this for a rank that is frozen."""
        failure = Failure(time.monotonic_ns(), rank, code, text, input_error)
        self._write(f"{rank}.failed", json.dumps(asdict(failure)))

    def set_waiting(self, rank: int, waiting: bool) -> None:
        """Record whether `rank` has been waiting for other ranks for a long time."""
        path = self.folder / f"{rank}.waits"
        if waiting and not path.exists():
            self._write(path.name, "")
        elif not waiting:
            path.unlink(missing_ok=True)

    def send_heartbeat(self, rank: int, beat: Heartbeat) -> None:
        """Write a heartbeat in place, at a fixed size: works on a full disk."""
        text = beat.text().encode()
        if len(text) > _BEAT_BYTES:
            text = replace(beat, calls=beat.calls[-_LAST_CALLS:]).text().encode()
        file = os.open(self.folder / f"{rank}.beat", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.write(file, text.ljust(_BEAT_BYTES))
        finally:
            os.close(file)

    # ---- read by the launcher, and some by the ranks ---------------------------------------------

    def waiting(self) -> set[int]:
        """The ranks that have been waiting for others for a long time."""
        return {int(path.stem) for path in self.folder.glob("*.waits")}

    def heartbeats(self) -> dict[int, Heartbeat]:
        """The latest heartbeat of each rank."""
        found: dict[int, Heartbeat] = {}
        for path in self.folder.glob("*.beat"):
            with suppress(ValueError):  # the file is being written
                found[int(path.stem)] = parse(path.read_text())
        return found

    def file_names(self) -> frozenset[str]:
        """The names of all status files except heartbeats.  Files never change, names appear."""
        names = (path.name for path in self.folder.iterdir())
        return frozenset(name for name in names if ".beat" not in name)

    def stderr(self, rank: int) -> Path:
        """The file for the error output of `rank`."""
        return self.folder / f"{rank}.stderr"

    def pids(self) -> dict[int, int]:
        """The process id of every rank that has started."""
        return {int(p.stem): int(p.read_text().split()[0]) for p in self.folder.glob("*.pid")}

    def finished(self) -> set[int]:
        """The ranks that have written their results."""
        return {int(path.stem) for path in self.folder.glob("*.done")}

    def results(self) -> dict[int, bytes] | None:
        """The results of all ranks; None while some are missing."""
        found = {int(path.stem): path.read_bytes() for path in self.folder.glob("*.done")}
        return found if len(found) == self.ranks else None

    def failures(self) -> list[Failure]:
        """The failures recorded so far, earliest first."""
        return sorted(Failure(**json.loads(p.read_text())) for p in self.folder.glob("*.failed"))

    def close(self) -> None:
        """Make ranks that start from now on exit at once."""
        self._write("closed", "")

    def _write(self, name: str, content: str | bytes) -> None:
        unfinished = self.folder / f"{name}.{os.getpid()}"
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(self.folder / name)


@contextmanager
def open_status_dir(ranks: int) -> Iterator[StatusDir]:
    """Make a status directory, and remove it on exit.  Sweeps the directories of dead launchers."""
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        status = StatusDir(Path(folder), ranks)
        status._write("launcher", identity(os.getpid()))
        settings: Any = multiprocessing.current_process()
        before = settings._config["semprefix"]
        settings._config["semprefix"] = f"/{status.folder.name}"
        try:
            yield status
        finally:
            settings._config["semprefix"] = before


def sweep(folder: Path) -> None:
    """Remove the status directories in `folder` of dead launchers, and kill their live ranks."""
    for old in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if old.stat().st_uid == os.getuid() and is_dead((old / "launcher").read_text()):
                _remove(old)


def _remove(folder: Path) -> None:
    for known in [file.read_text() for file in folder.glob("*.pid")]:
        pid = int(known.split()[0])
        if known == identity(pid):
            os.kill(pid, signal.SIGKILL)
    for semaphore in _SEMAPHORES.glob(f"sem.{folder.name}-*"):
        semaphore.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
