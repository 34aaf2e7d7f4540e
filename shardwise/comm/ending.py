"""How a launch of several ranks ended: their results, or which failed first and with what error."""

import re
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from shardwise.comm.status_dir import Note, Room

#: What a rank says whose peer has gone: true, but never the cause where another has one.
LOST = re.compile(
    r"closed by peer|reset by peer|Connection reset|Broken pipe|pair\.cc|recvValue failed"
    r"|Failed to recv|ncclRemoteError|remote process exited|of the group is gone: process"
)


@dataclass
class LaunchOutcome:
    """How a launch ended: the results of all ranks, or else what is known of the first death."""

    results: dict[int, bytes] | None = None
    died: tuple[int, int] | None = None  # rank and exit code, as the agent saw it
    missing: int | None = None  # the rank the watch first saw gone
    killed: set[int] = field(default_factory=set)
    error: BaseException | None = None  # of the agent itself
    overdue: bool = False  # the ranks were killed for not leaving in time after a signal
    hurried: bool = False  # the ranks were killed since a second signal came, and none had failed


def take(ended: LaunchOutcome, outcome: Any, room: Room) -> None:
    """Note the results, which stand also if a process aborts or lingers after it gave its own.

    `outcome` is what came of the agent: an exception, or anything.
    """
    ended.results = room.results()
    if isinstance(outcome, ChildFailedError):
        rank, failure = outcome.get_first_failure()
        ended.died = (rank, failure.exitcode)
    elif isinstance(outcome, BaseException):
        ended.error = outcome


def afterlife(ended: LaunchOutcome) -> str:
    """What became of processes that had given their results; "" where they just ended."""
    text = ""
    if ended.results is not None and ended.died is not None and ended.died[0] not in ended.killed:
        rank, code = ended.died
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        text += f"rank {rank} ended with {how} after it had returned; its result stands\n"
    for rank in sorted(ended.killed) if ended.results is not None else ():
        text += f"rank {rank} was killed: its process did not end after it had returned\n"
    return text


def _rank(note: Note) -> int:
    return note.rank


def first_failure(room: Room, ended: LaunchOutcome) -> Note:
    """The cause: an error of a rank's own, else a death without a word, else a lost connection."""
    notes = room.notes()
    own = [note for note in notes if not LOST.search(note.text)]
    if own:  # what is refused is as a rule refused by several ranks
        return min(
            (n for n in own if n.refused and n.refused == own[0].refused), key=_rank, default=own[0]
        )
    noted = {note.rank for note in notes}
    if ended.died is not None and ended.died[0] not in noted | ended.killed:
        return Note(0, ended.died[0], None, _obituary(room, *ended.died))
    if ended.missing is not None and ended.missing not in noted:
        return Note(0, ended.missing, None, _obituary(room, ended.missing, 0))
    if notes:
        return notes[0]
    if ended.error is not None:
        raise ended.error
    return Note(0, min(ended.killed, default=0), None, "it was ended from outside")


def _obituary(room: Room, rank: int, code: int) -> str:
    """How a rank died that left no word."""
    if code < 0:
        name = signal.Signals(-code).name
        text = f"it was ended by {name}"
        text += ", as the system does when memory runs out" if name == "SIGKILL" else ""
    else:
        text = f"it left with exit code {code} before its function had returned"
    if rank not in room.pids():
        text += (
            ". It had not yet begun: the main script is imported by every rank, so its own work"
            " stands under 'if __name__ == \"__main__\":'"
        )
    said = _said(room, rank)
    return f"{text}. Its last words:\n{said}" if said else text


def _said(room: Room, rank: int) -> str:
    path = room.stderr(rank)
    return path.read_text(errors="replace").strip() if path.exists() else ""


def afterwards(room: Room, first: Note) -> str:
    """One line for each other rank that had an error to tell."""
    others = [note for note in room.notes() if note.rank != first.rank]
    return "".join(f"\n(then rank {o.rank}: {_line(o.text)})" for o in others)


def _line(text: str) -> str:
    """The first line of an error below its traceback; notes come after it."""
    lines = text.splitlines()
    below = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=-1) + 1
    return next((line for line in lines[below:] if not line.startswith(" ")), lines[-1])


def report(room: Room, note: Note) -> int:
    """Show the error of the rank that failed first, unless it is on the screen; its exit code."""
    if note.code is None:
        print(f"rank {note.rank} failed:\n{note.text}{afterwards(room, note)}", file=sys.stderr)
        return 1
    shown = any(other.rank == 0 and other.code == note.code for other in room.notes())
    if not shown:
        print(_said(room, note.rank) or f"rank {note.rank} failed: {note.text}", file=sys.stderr)
    return note.code
