"""Beats: the signs of life of the ranks, and what follows when one of them gives none.

A thread of every rank sends a beat about once a second: a number that grows, where the program
stands, and for how long it has waited there for others.  A listener (the launcher; under torchrun
the rank before) reads them:

    no beat for `frozen_s`, and its process is stopped                  frozen: the run ends
      or uses a processor, or is ready to run                           it works on
      or neither is so, or it is on another host                        a warning
    no beat for 4 `frozen_s`, and still neither                         frozen: the run ends
    another waits for `patience_s`, and this one beats and does not come    the run ends

The thread needs Python's interpreter lock, which a long call into C may hold.  On the same host the
system says whether such a process computes; of another host it is not known, hence four times.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from shardwise.comm.limits import Limits

_UNSURE = 4  # times as long without a beat, where it is not certain that a process is frozen


@dataclass(frozen=True)
class Beat:
    """One sign of life of a rank: the `count`-th, from process `pid` on `host` (see `_host`)."""

    count: int
    pid: int
    host: int = 0
    calls: str = ""
    waits_s: float = 0.0
    left: bool = False  # the rank has come to its end, and sends no more

    def text(self) -> str:
        """The beat as a line of JSON."""
        return json.dumps(asdict(self))


def parse(text: str) -> Beat:
    """The beat whose `text` this is."""
    return Beat(**json.loads(text))


class Listener:
    """Hears the beats of one rank; `host` is the listener's own."""

    def __init__(self, limits: Limits, host: int) -> None:
        self.limits, self.host = limits, host
        self.beat: Beat | None = None
        self.warned = False
        self._silent_s = self._idle_s = self._used_s = 0.0

    def hear(self, beat: Beat | None, elapsed_s: float) -> str:
        """The newest beat, `elapsed_s` after the call before; why the rank is frozen, or "".

        Time in which the listener itself did not run does not count.
        """
        elapsed_s = min(elapsed_s, 2 * self.limits.beat_s)
        if beat is None or beat.left or beat != self.beat:
            self.beat, self.warned = beat, False
            self._silent_s = self._idle_s = 0.0
            return ""
        self._silent_s += elapsed_s
        self._idle_s += elapsed_s
        local = beat.host == self.host and self.host
        state, used_s, _ = process(beat.pid) if local else ("?", 0.0, 0)
        if state in "RtXZ" or used_s != self._used_s:  # t: a debugger has it; X, Z: it is over
            self._idle_s, self._used_s = 0.0, used_s
        if state == "T" and self._silent_s >= self.limits.frozen_s:
            return "is stopped (by SIGSTOP or the like)"
        if self._idle_s < _UNSURE * self.limits.frozen_s:
            return ""
        return "does not run" if local else "is on another host, which is frozen or out of reach"

    def warning(self, rank: int) -> str:
        """What to say, once, of a rank that is silent and may be frozen; "" otherwise."""
        if self.beat is None or self.warned or self._idle_s < self.limits.frozen_s:
            return ""
        self.warned = True
        return (
            f"rank {rank} (process {self.beat.pid}) has given no sign of life for "
            f"{self._silent_s:.0f} s; if that goes on for {_UNSURE * self.limits.frozen_s:.0f} s "
            f"the run is ended. It was last in {self.beat.calls or 'its start'}"
        )

    def frozen(self, why: str) -> str:
        """The error of a rank that is frozen, without the rank's number."""
        assert self.beat is not None
        return (
            f"its process {self.beat.pid} {why}. It has given no sign of life for "
            f"{self._silent_s:.0f} s (SHARDWISE_FROZEN_S), and the other ranks would wait for it "
            f"for ever. It was last in {self.beat.calls or 'its start'}"
        )


def hung(beats: Mapping[int, Beat], patience_s: float) -> tuple[int, str] | None:
    """The rank that others have waited for too long, and the error; None where nobody has.

    Where all wait, none of them for another that works, the one that has waited longest.
    """
    waiting = {rank: beat for rank, beat in beats.items() if beat.waits_s > 0}
    longest = max(waiting, key=lambda rank: waiting[rank].waits_s, default=None)
    if longest is None or waiting[longest].waits_s < patience_s:
        return None
    late = [rank for rank in sorted(beats) if rank not in waiting and not beats[rank].left]
    named = f"rank {', '.join(map(str, late))} has not come" if late else "no rank can go on"
    stands = [
        f"  rank {rank}: {'has ended' if beat.left else beat.calls or 'in its start'}"
        for rank, beat in sorted(beats.items())
    ]
    return late[0] if late else longest, (
        f"rank {longest} has waited for {patience_s:.0f} s (SHARDWISE_PATIENCE_S) in one "
        f"collective, and {named}. Where the main thread of each rank is:\n" + "\n".join(stands)
    )


class Process(NamedTuple):
    """What the system says of a process of this host."""

    state: str  # a letter of proc(5); "X" if it is gone, "?" if nothing is known
    used_s: float  # the processor time it has used
    started: int  # when, in ticks since the boot


def process(pid: int) -> Process:
    """The process with that number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return Process("X" if Path("/proc/self/stat").exists() else "?", 0.0, 0)
    except OSError:
        return Process("?", 0.0, 0)
    used_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Process(fields[0], used_s, int(fields[19]))
