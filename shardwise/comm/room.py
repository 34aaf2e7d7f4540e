"""this file is the room: the folder in which a launcher and its ranks leave word for each other.

A rank that fails writes its error down *before* anything else happens to it, and then holds still,
connections open, until the launcher ends it.  So the others get no error from its leaving, and
the first note in the room is the cause.  A rank that dies without a word is found by its pid.

    0.pid     the rank has begun                  0.failed   its error, with the time
    0.done    its function has returned           0.stderr   what it wrote there, where kept back
    0.waits   it waits for others                 closed     whoever begins now leaves at once
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_GLANCE_S = 0.005


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
        self._write(f"{rank}.pid", str(os.getpid()))
        return not (self.folder / "closed").exists()

    def finish(self, rank: int) -> None:
        """Rank: I have my result. Returns when all have: nobody hangs up on one still working."""
        self._write(f"{rank}.done", "")
        while len(self.finished()) < self.ranks:
            time.sleep(_GLANCE_S)

    def fail(self, rank: int, text: str, code: int | None = None, refused: str = "") -> None:
        """Rank: I have failed, and this is my error."""
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

    def word(self) -> frozenset[str]:
        """Launcher: what is in the room, by names; of one name it stays the same."""
        return frozenset(path.name for path in self.folder.iterdir())

    def stderr(self, rank: int) -> Path:
        """Both: where the rank's error output is kept, if it is."""
        return self.folder / f"{rank}.stderr"

    def pids(self) -> dict[int, int]:
        """Launcher: the process of every rank that has begun."""
        return {int(path.stem): int(path.read_text()) for path in self.folder.glob("*.pid")}

    def finished(self) -> set[int]:
        """Both: the ranks that have their results."""
        return {int(path.stem) for path in self.folder.glob("*.done")}

    def notes(self) -> list[Note]:
        """Launcher: the notes of the ranks that failed, the earliest first."""
        return sorted(Note(**json.loads(p.read_text())) for p in self.folder.glob("*.failed"))

    def close(self) -> None:
        """Launcher: whoever has not begun yet shall not."""
        self._write("closed", "")

    def _write(self, name: str, text: str) -> None:
        unfinished = self.folder / f"{name}.{os.getpid()}"
        unfinished.write_text(text)
        unfinished.replace(self.folder / name)
