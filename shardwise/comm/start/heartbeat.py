"""Heartbeats: each rank reports about once a second that it is alive and where its program is.

Its monitor (see peers.py) ends the run in these cases:

    no heartbeat for `frozen_s`, and the process is stopped or has ended
    no heartbeat for `frozen_s` from another host, which does not answer any more
    no heartbeat for 4 `frozen_s`, and the process neither uses nor waits for a processor; of a
      process on another host nothing but the heartbeats is known
    some ranks have waited for `patience_s` in one collective, and another does not join it
    every rank that has not left waits in a collective, and no message moves

The thread that sends heartbeats needs Python's interpreter lock, which a long call into C may hold.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shardwise.comm.start.hosts import Reach, process
from shardwise.comm.start.rendezvous import Limits

_UNSURE = 4  # times `frozen_s`, where the process may be computing
#: How long every rank waits before the run ends: if some rank has left, and if none has.
_LEFT_S, _ALL_S = 3.0, 10.0


@dataclass(frozen=True)
class Heartbeat:
    """The `count`-th heartbeat of a rank, from process `pid` on `host` (see `host_number`).

    `address` is that of the host, "" if it is not known; `sent` names the last calls that its
    ledger counts.

    The rank is in `calls`, has waited for `waits_s` in one collective, for `idle_s` of them without
    the use of a processor.  A rank that has `left` has ended normally, and sends no more.
    """

    count: int
    pid: int
    host: int = 0
    calls: str = ""
    waits_s: float = 0.0
    idle_s: float = 0.0
    left: bool = False
    sent: str = ""
    address: str = ""

    def text(self) -> str:
        """The heartbeat as JSON."""
        return json.dumps(asdict(self))


class HeartbeatMonitor:
    """Watches the heartbeats of one rank.

    `host` is the monitor's own host number, `reach` what it knows of others.
    """

    def __init__(self, limits: Limits, host: int, reach: Reach | None = None) -> None:
        self.limits, self.host, self.reach = limits, host, reach or Reach()
        self.beat: Heartbeat | None = None
        self._silent_s = self._idle_s = self._cpu_s = 0.0

    def receive(self, beat: Heartbeat, elapsed_s: float) -> str:
        """Take the latest heartbeat, `elapsed_s` after the previous call.

        Returns the error of a rank that is frozen, or "".  If the monitor itself was stopped, that
        time does not count.
        """
        elapsed_s = min(elapsed_s, 2 * self.limits.heartbeat_s)
        if beat.left or beat != self.beat:
            if beat.host != self.host:
                self.reach.know(beat.address)
            self.beat, self._silent_s, self._idle_s = beat, 0.0, 0.0
            return ""
        self._silent_s += elapsed_s
        self._idle_s += elapsed_s
        local = beat.host == self.host and self.host
        state, cpu_s = process(beat.pid) if local else ("?", 0.0)
        if state in "Rt" or cpu_s != self._cpu_s:  # t: in a debugger
            self._idle_s, self._cpu_s = 0.0, cpu_s
        long = self._silent_s >= self.limits.frozen_s
        if state in "XZ" and long:
            why = "has ended without leaving the run (killed, perhaps)"
        elif state == "T" and long:
            why = "is stopped (by SIGSTOP or the like)"
        elif long and not local and self.reach.lost(beat.address):
            why = f"is on another host, {beat.address}, which does not answer any more"
        elif self._idle_s >= _UNSURE * self.limits.frozen_s:
            why = "does not run" if local else "is on another host, which is frozen or unreachable"
        else:
            return ""
        return (
            f"its process {beat.pid} {why}. It has sent no heartbeat for {self._silent_s:.0f} s "
            "(SHARDWISE_FROZEN_S), and the other ranks would wait for it forever. It was last in "
            f"{beat.calls or 'its start'}{_sent(beat)}"
        )


def find_hang(heartbeats: Mapping[int, Heartbeat], patience_s: float) -> tuple[int, str] | None:
    """A rank that makes others wait too long, and the error; None while there is none.

    If every rank waits, it is the one that has waited longest.
    """
    present = {rank: beat for rank, beat in heartbeats.items() if not beat.left}
    left = sorted(heartbeats.keys() - present.keys())
    longest = max(present, key=lambda rank: present[rank].waits_s)
    if present[longest].waits_s >= patience_s:
        late = sorted(rank for rank, beat in present.items() if not beat.waits_s)
        named = f"rank {', '.join(map(str, late))} has not joined it"
        named = named if late else "no rank can continue"
        cause = late[0] if late else longest
        why = (
            f"rank {longest} has waited for {patience_s:.0f} s (SHARDWISE_PATIENCE_S) in one "
            f"collective, and {named}"
        )
    elif min(beat.idle_s for beat in present.values()) >= (_LEFT_S if left else _ALL_S):
        cause = longest
        why = "every rank is waiting in a collective that no other rank will join"
        if left:
            ranks = f"rank {', '.join(map(str, left))} {'has' if len(left) == 1 else 'have'}"
            why = f"{ranks} ended the program, and this collective waits for all ranks"
        why += ". All ranks must run the same number of steps"
    else:
        return None
    places = [
        f"  rank {rank}: {'has ended' if beat.left else beat.calls or 'in its start'}{_sent(beat)}"
        for rank, beat in sorted(heartbeats.items())
    ]
    return cause, f"{why}. Where the main thread of each rank is:\n" + "\n".join(places)


def _sent(beat: Heartbeat) -> str:
    return f"; its last calls: {beat.sent}" if beat.sent else ""
