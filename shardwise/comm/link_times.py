"""The time of messages between pairs of ranks, and the ranks whose links are slow."""

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from shardwise.comm import move
from shardwise.comm.world import Axis

PAIR_ELEMENTS: Final = 2**18
SLOW: Final = 2.0  # a link this many times slower than the median link is slow
ALL_PAIRS: Final = 8  # the most ranks of which every pair is measured
TRIES: Final = 7
PAIR_S: Final = 0.1  # seconds of a pair after which it begins no other try


class SlowLink(NamedTuple):
    """Seconds of a rank's fastest link, and of the median link between other ranks."""

    seconds: float
    others_s: float

    @property
    def times(self) -> float:
        """How many times slower the rank's link is."""
        return self.seconds / self.others_s


def pairs(
    axis: Axis, device: torch.device, ranks: Sequence[int] | None = None, numel: int = PAIR_ELEMENTS
) -> dict[tuple[int, int], float]:
    """Seconds of a round trip of `numel` fp32, for the pairs of `ranks` of which this one is first.

    Every rank of the axis calls it; `ranks` is ascending, None for all of them. Up to ALL_PAIRS
    ranks, every pair is timed; of more, every pair of neighbours and every pair with the first.
    One pair at a time, so that a slow one does not delay others; the minimum of a few tries.
    """
    ranks = range(axis.size) if ranks is None else ranks
    n = len(ranks)
    ways = {(r, (r + 1) % n) for r in range(n)} | {(0, r) for r in range(1, n)}
    if n <= ALL_PAIRS:
        ways = set(itertools.combinations(range(n), 2))
    ways = {(ranks[min(way)], ranks[max(way)]) for way in ways}
    x = torch.zeros(numel, dtype=torch.float32, device=device)
    found = dict[tuple[int, int], float]()
    for a, b in sorted(ways):
        move.barrier(axis)
        if axis.rank in (a, b):
            _shortest(x[:1], axis, a, b, tries=1)  # opens the connection
            found[a, b] = _shortest(x, axis, a, b, TRIES)
    return {way: s for way, s in found.items() if way[0] == axis.rank}  # the other did not wait


def _shortest(x: Tensor, axis: Axis, a: int, b: int, tries: int) -> float:
    """The time of the shortest try; `b` says in the first element whether another follows."""
    began, found, more = time.perf_counter(), list[float](), True
    while more:
        start = time.perf_counter()
        if axis.rank == a:
            move.begin_send(x, axis, b).wait()
            move.begin_receive(x, axis, b).wait()
        else:
            move.begin_receive(x, axis, a).wait()
            settle(x.device)
            x[0] = float(len(found) + 1 < tries and time.perf_counter() - began < PAIR_S)
            move.begin_send(x, axis, a).wait()
        settle(x.device)
        found.append(time.perf_counter() - start)
        more = bool(x[0].item())
    return min(found)


def settle(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slow_ranks(seconds: Mapping[tuple[int, int], float]) -> dict[int, SlowLink]:
    """The ranks whose links are all slow, relative to the median link between other ranks.

    With two ranks there is one link, so the slow rank is unknown.
    """
    ranks = sorted({rank for pair in seconds for rank in pair})
    if len(ranks) < 3:
        return {}
    found: dict[int, SlowLink] = {}
    for r in ranks:
        own = [s for pair, s in seconds.items() if r in pair]
        others = [s for pair, s in seconds.items() if r not in pair]
        if others and (link := SlowLink(min(own), statistics.median_low(others))).times > SLOW:
            found[r] = link
    return found
