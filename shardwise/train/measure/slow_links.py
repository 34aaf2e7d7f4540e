"""Slow links between the hosts of a run, each told once in a line.

    at the start                  time a message between the first ranks of each pair of hosts
    after a step that took long   again: whatever has slowed the link has slowed the step

Other programs on a host delay messages too: the shortest time of `LOOKS` measurements counts.  The
first of them is enough if it finds nothing.  All ranks have the times of all pairs, so all decide
the same.
"""

import socket
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from shardwise.comm.link_times import SLOW, pairs, slow_ranks
from shardwise.comm.objects import all_gather_object
from shardwise.comm.start.hosts import host_number
from shardwise.comm.world import World

LOOKS: Final = 3
ELEMENTS: Final = 2**16  # fp32 of a message: 256 KiB
LONG: Final = 1.5  # a step of this many times the median takes long
FEWEST, MOST = 3, 20  # steps of which it is the median
PAUSE_S: Final = 5.0  # from one look to the next: what it takes stays a small part of a run

Pairs = Mapping[tuple[int, int], float]


class SlowLinks:
    """The links between the hosts of a world.  All ranks create it; on one host it does nothing."""

    def __init__(self, world: World) -> None:
        self.world, name = world, socket.gethostname()
        with world.ledger.phase("check"):
            hosts = all_gather_object((host_number() or name, name), world)
        numbers = [number for number, _ in hosts]
        first = sorted({numbers.index(number) for number in numbers})
        self.names = {rank: hosts[rank][1] for rank in first}
        self.usual: Pairs = {}
        self.told = set[int | None]()
        self.steps = deque[float](maxlen=MOST)
        self.next_s = 0.0

    def suspected(self, seconds: float) -> bool:
        """Whether the last step of this rank took long, and it is time for a look.

        It sends nothing: ranks agree with other flags on whether one of them suspects a link.
        """
        long = takes_long(seconds, self.steps)
        self.steps.append(seconds)
        return len(self.names) > 1 and long and time.monotonic() >= self.next_s

    def look(self) -> list[str]:
        """Time the links; a line for each that is slow and was not told yet.  All ranks call it."""
        if len(self.names) < 2:
            return []
        seconds = self._measure()
        for _ in range(LOOKS - 1):
            if self.usual and not slow_links(seconds, self.usual, self.names):
                break
            again = self._measure()
            seconds = {way: min(s, again[way]) for way, s in seconds.items()}
        self.usual = self.usual or seconds
        self.next_s = time.monotonic() + PAUSE_S
        found = slow_links(seconds, self.usual, self.names)
        if found:
            self.steps.clear()  # steps that take as long are usual now
        new = [text for key, text in found.items() if key not in self.told]
        self.told |= found.keys()
        return new

    def _measure(self) -> Pairs:
        world = self.world
        with world.ledger.phase("check"):
            own = pairs(world.everyone, world.device, [*self.names], ELEMENTS)
            found = all_gather_object(own, world)
        return {way: s for each in found for way, s in each.items()}


def takes_long(seconds: float, before: Sequence[float]) -> bool:
    """Whether a step takes several times the median of those before."""
    return len(before) >= FEWEST and seconds > LONG * statistics.median(before)


def slow_links(seconds: Pairs, usual: Pairs, names: Mapping[int, str]) -> dict[int | None, str]:
    """A line for each rank with a slow link, or under None one if all links are slow.

    `seconds` and `usual` are the times of pairs of ranks, now and at the start; `names` those of
    their hosts.  Of two hosts there is one link, which is compared with itself at the start.
    """
    message = f"{4 * ELEMENTS // 2**10} KiB there and back"
    found: dict[int | None, str] = {
        rank: f"rank {rank} ({names[rank]}) has a slow link: {message} with another host takes at "
        f"least {_ms(link.seconds)}, and {_ms(link.others_s)} between the others"
        for rank, link in slow_ranks(seconds).items()
    }
    if not found and min(seconds[way] / usual[way] for way in seconds) > SLOW:
        a, b = way = min(seconds, key=lambda way: seconds[way])
        found[None] = (
            f"the links between all hosts are slow: {message} takes at least {_ms(seconds[way])}, "
            f"of rank {a} ({names[a]}) with rank {b} ({names[b]}), and took {_ms(usual[way])} at "
            "the start"
        )
    return found


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
