"""The room: the directory of status files that a launcher and its ranks share.

A rank that fails writes its error down *before* anything else happens to it, and then holds still,
connections open, until the launcher ends it.  So the others get no error from its leaving, and
the first note in the room is the cause.  A rank that dies without a word is found by its pid.

    0.pid     the rank has begun                  0.failed   its error, with the time
    0.done    its function's result, pickled      0.stderr   what it wrote there, where kept back
    0.waits   it waits for others                 closed     whoever begins now leaves at once
    0.beat    its last sign of life               launcher   the process whose room it is

A launcher removes its room at its end.  The room of one that was killed is removed by the next
launcher of the same user, and ranks of it that are stopped, and so did not end with it, are killed.
"""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shardwise.comm.beat import Beat, parse, process

_GLANCE_S = 0.005
_PREFIX = "shardwise-"
_BEAT_BYTES = 4096
_LAST_CALLS = 500  # characters of a long stack, of six bytes each at most in JSON


@dataclass(frozen=True, order=True)
class Note:
    """Why a rank ended: when (`at_ns`, on the clock all processes share), and its own words.

    `code` is the exit code the rank asked for, where it said all else itself; otherwise None.
    `refused` is the text of an InputError, which is the user's to mend; empty of any other error.
    """

    at_ns: int
    rank: int
    code: int | None
    text: str
    refused: str = ""


@dataclass(frozen=True)
class Room:
    """The folder of one launch of so many ranks. Each method is for the side it names."""

    folder: Path
    ranks: int

    def enter(self, rank: int) -> bool:
        """Rank: I have begun. False when the launcher has given up already."""
        self._write(f"{rank}.pid", identity(os.getpid()))
        return not (self.folder / "closed").exists()

    def finish(self, rank: int, result: bytes) -> None:
        """Rank: my result. Returns when all have theirs: nobody hangs up on one still working."""
        self._write(f"{rank}.done", result)
        while len(self.finished()) < self.ranks:
            time.sleep(_GLANCE_S)

    def fail(self, rank: int, text: str, code: int | None = None, refused: str = "") -> None:
        """Rank: I have failed, and this is my error.  Launcher: the error of a frozen rank."""
        note = Note(time.monotonic_ns(), rank, code, text, refused)
        self._write(f"{rank}.failed", json.dumps(asdict(note)))

    def waits(self, rank: int, long: bool) -> None:
        """Rank: whether I have waited for others for long."""
        path = self.folder / f"{rank}.waits"
        if long and not path.exists():
            self._write(path.name, "")
        elif not long:
            path.unlink(missing_ok=True)

    def waiting(self) -> set[int]:
        """Rank: those that wait for others."""
        return {int(path.stem) for path in self.folder.glob("*.waits")}

    def send_beat(self, rank: int, beat: Beat) -> None:
        """Rank: a sign of life, written in place: on a full disk there is still room for it."""
        text = beat.text().encode()
        if len(text) > _BEAT_BYTES:
            text = replace(beat, calls=beat.calls[-_LAST_CALLS:]).text().encode()
        file = os.open(self.folder / f"{rank}.beat", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.write(file, text.ljust(_BEAT_BYTES))
        finally:
            os.close(file)

    def beats(self) -> dict[int, Beat]:
        """Launcher: the newest sign of life of each rank."""
        found: dict[int, Beat] = {}
        for path in self.folder.glob("*.beat"):
            with suppress(ValueError):  # it is being written
                found[int(path.stem)] = parse(path.read_text())
        return found

    def word(self) -> frozenset[str]:
        """Launcher: what is in the room, by names; of one name it stays the same, beats apart."""
        names = (path.name for path in self.folder.iterdir())
        return frozenset(name for name in names if ".beat" not in name)

    def stderr(self, rank: int) -> Path:
        """Both: where the rank's error output is kept, if it is."""
        return self.folder / f"{rank}.stderr"

    def pids(self) -> dict[int, int]:
        """Launcher: the process of every rank that has begun."""
        return {int(p.stem): int(p.read_text().split()[0]) for p in self.folder.glob("*.pid")}

    def finished(self) -> set[int]:
        """Both: the ranks that have their results."""
        return {int(path.stem) for path in self.folder.glob("*.done")}

    def results(self) -> dict[int, bytes] | None:
        """Launcher: the results of all ranks; None while some are missing."""
        found = {int(path.stem): path.read_bytes() for path in self.folder.glob("*.done")}
        return found if len(found) == self.ranks else None

    def notes(self) -> list[Note]:
        """Launcher: the notes of the ranks that failed, the earliest first."""
        return sorted(Note(**json.loads(p.read_text())) for p in self.folder.glob("*.failed"))

    def close(self) -> None:
        """Launcher: whoever has not begun yet shall not."""
        self._write("closed", "")

    def _write(self, name: str, content: str | bytes) -> None:
        unfinished = self.folder / f"{name}.{os.getpid()}"
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(self.folder / name)


@contextmanager
def open_room(ranks: int) -> Iterator[Room]:
    """A room for so many ranks, removed at the end; those of launchers that are dead are swept."""
    sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        room = Room(Path(folder), ranks)
        room._write("launcher", identity(os.getpid()))
        yield room


def sweep(folder: Path) -> None:
    """Remove the rooms in `folder` whose launchers are dead, and kill ranks of theirs that live."""
    for room in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if room.stat().st_uid == os.getuid() and _dead((room / "launcher").read_text()):
                _remove(room)


def _remove(room: Path) -> None:
    for known in [file.read_text() for file in room.glob("*.pid")]:
        pid = int(known.split()[0])
        if known == identity(pid):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(room, ignore_errors=True)


def identity(pid: int) -> str:
    """A process: its number, when it was started, and in which boot and container that counts."""
    return f"{pid} {process(pid).started} {_where()}"


def _dead(known: str) -> bool:
    """Whether the process of this `identity` is known to be dead; of another host it is not."""
    pid, _, where = [*known.split(maxsplit=2), "", "", ""][:3]
    if not where or where != _where():
        return False
    return identity(int(pid)) != known or process(int(pid)).state in "XZ"


def _where() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""
