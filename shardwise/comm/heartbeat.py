"""Heartbeats: each rank reports about once a second that it is alive and where its program is.

The monitor of a rank (the launcher; under torchrun the previous rank) decides from its heartbeats:

    no heartbeat for `frozen_s`, and the process is stopped         frozen: end the run
      or it has ended, without a word that it leaves                lost: end the run
      or the process uses or waits for a processor                  it computes: keep waiting
      or neither, or the process is on another host                 print a warning
    no heartbeat for 4 `frozen_s`, and still neither                frozen: end the run
    another rank has waited for `patience_s`, this one does not come    it hangs: end the run

The heartbeat thread needs Python's interpreter lock, which a long call into C may hold.  On its own
host the monitor can read whether such a process computes.  For another host it cannot, so it waits
four times as long.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shardwise.comm.host import process
from shardwise.comm.limits import Limits

_UNSURE = 4  # times `frozen_s`, where the process may be computing


@dataclass(frozen=True)
class Heartbeat:
    """The `count`-th heartbeat of a rank, from process `pid` on `host` (see `host_number`)."""

    count: int
    pid: int
    host: int = 0
    calls: str = ""
    waits_s: float = 0.0
    left: bool = False  # the rank has ended normally, and sends no more heartbeats

    def text(self) -> str:
        """The heartbeat as JSON."""
        return json.dumps(asdict(self))


def parse(text: str) -> Heartbeat:
    """Read a heartbeat from JSON."""
    return Heartbeat(**json.loads(text))


class HeartbeatMonitor:
    """Watches the heartbeats of one rank; `host` is the monitor's own host number."""

    def __init__(self, limits: Limits, host: int) -> None:
        self.limits, self.host = limits, host
        self.beat: Heartbeat | None = None
        self.warned = False
        self._silent_s = self._idle_s = self._cpu_s = 0.0

    def receive(self, beat: Heartbeat | None, elapsed_s: float) -> str:
        """Take the latest heartbeat, `elapsed_s` after the previous call.

        Returns why the rank is frozen, or "".  If the monitor itself was stopped, that time does
        not count.
        """
        elapsed_s = min(elapsed_s, 2 * self.limits.heartbeat_s)
        if beat is None or beat.left or beat != self.beat:
            self.beat, self.warned = beat, False
            self._silent_s = self._idle_s = 0.0
            return ""
        self._silent_s += elapsed_s
        self._idle_s += elapsed_s
        local = beat.host == self.host and self.host
        state, cpu_s, _ = process(beat.pid) if local else ("?", 0.0, 0)
        if state in "Rt" or cpu_s != self._cpu_s:  # t: in a debugger
            self._idle_s, self._cpu_s = 0.0, cpu_s
        if state in "XZ" and self._silent_s >= self.limits.frozen_s:
            return "has ended without leaving the run (killed, perhaps)"
        if state == "T" and self._silent_s >= self.limits.frozen_s:
            return "is stopped (by SIGSTOP or the like)"
        if self._idle_s < _UNSURE * self.limits.frozen_s:
            return ""
        return "does not run" if local else "is on another host, which is frozen or unreachable"

    def warning(self, rank: int) -> str:
        """The warning for a rank that may be frozen, returned once; "" otherwise."""
        if self.beat is None or self.warned or self._idle_s < self.limits.frozen_s:
            return ""
        self.warned = True
        return (
            f"rank {rank} (process {self.beat.pid}) has sent no heartbeat for "
            f"{self._silent_s:.0f} s. After {_UNSURE * self.limits.frozen_s:.0f} s the run will be "
            f"ended. It was last in {self.beat.calls or 'its start'}"
        )

    def frozen(self, why: str) -> str:
        """The error for a frozen rank, without the rank's number."""
        assert self.beat is not None
        return (
            f"its process {self.beat.pid} {why}. It has sent no heartbeat for "
            f"{self._silent_s:.0f} s (SHARDWISE_FROZEN_S), and the other ranks would wait for it "
            f"forever. It was last in {self.beat.calls or 'its start'}"
        )


def find_hang(heartbeats: Mapping[int, Heartbeat], patience_s: float) -> tuple[int, str] | None:
    """The rank that others have waited for longer than `patience_s`, and the error; else None.

    If every rank waits, it is the one that has waited longest.
    """
    waiting = {rank: beat for rank, beat in heartbeats.items() if beat.waits_s > 0}
    longest = max(waiting, key=lambda rank: waiting[rank].waits_s, default=None)
    if longest is None or waiting[longest].waits_s < patience_s:
        return None
    late = [
        rank for rank in sorted(heartbeats) if rank not in waiting and not heartbeats[rank].left
    ]
    named = (
        f"rank {', '.join(map(str, late))} has not joined it" if late else "no rank can continue"
    )
    places = [
        f"  rank {rank}: {'has ended' if beat.left else beat.calls or 'in its start'}"
        for rank, beat in sorted(heartbeats.items())
    ]
    return late[0] if late else longest, (
        f"rank {longest} has waited for {patience_s:.0f} s (SHARDWISE_PATIENCE_S) in one "
        f"collective, and {named}. Where the main thread of each rank is:\n" + "\n".join(places)
    )
