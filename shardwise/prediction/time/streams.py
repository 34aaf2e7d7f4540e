"""The streams of a rank: one computes, and one for each axis sends; and a unit's acts on them.

    compute   use 0 . use 1 . use 2          an act that waits moves `now` to the arrival
    dp        gather 0 | gather 1 | gather 2     an act that begins a move does not

Hooks do the same acts in a run (core/unit_order.py).  So what overlaps with computation is
what the machine lets overlap; the rest is exposed. If messages take a part of the device's own
time, as between processes on processors, that part is exposed when the move begins.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.core.reduce_order import Act
from shardwise.prediction.unit_acts import FREES, GATHERS, UnitActs

#: Seconds by axis.
AxisSeconds = Mapping[str, float]


class UnitSeconds(NamedTuple):
    """The seconds of a unit: its kernels, its collectives within them, and its own moves.

    inline    by phase and axis: of layers, which wait for their results
    gather    of its parameters, before a use
    sums      the first sum of its gradient, and later ones on other axes
    """

    compute: Mapping[str, float]
    inline: Mapping[str, AxisSeconds]
    gather: AxisSeconds
    sums: tuple[AxisSeconds, AxisSeconds]


class Streams:
    """The time on the compute stream, and until when each axis sends."""

    def __init__(self, overlap: float = 1.0) -> None:
        self.overlap = overlap
        self.now = self.compute_s = 0.0
        self.busy_until: dict[str, float] = {}
        self.exposed_s = defaultdict[str, float](float)
        self.waited_s = defaultdict[str, float](float)  # the part for moves that had begun before

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.compute_s += seconds

    def exchange(self, moves: AxisSeconds) -> None:
        for axis, seconds in moves.items():
            self.now += seconds
            self.exposed_s[axis] += seconds

    def begin(self, moves: AxisSeconds) -> dict[str, float]:
        """Begin moves; returns the end on each axis."""
        ends: dict[str, float] = {}
        for axis, seconds in moves.items():
            own_s = (1 - self.overlap) * seconds
            self.wait({axis: self.now + own_s})
            begin = max(self.now, self.busy_until.get(axis, 0.0))
            ends[axis] = self.busy_until[axis] = begin + self.overlap * seconds
        return ends

    def wait(self, ends: Mapping[str, float]) -> None:
        for axis, end in ends.items():
            waits_s = max(0.0, end - self.now)
            self.exposed_s[axis] += waits_s
            self.waited_s[axis] += waits_s
            self.now = max(self.now, end)


class TimedActs:
    """Does the acts of `acts` on streams of its own, from when it is made."""

    def __init__(self, acts: UnitActs, units: Sequence[UnitSeconds], overlap: float) -> None:
        self.acts, self.units, self.overlap = acts, units, overlap
        self.restart()
        self.arrivals = dict[int, Mapping[str, float]]()  # of gathered units
        self.sums = dict[int, Mapping[str, float]]()
        acts.acted, acts.used = self.act, self.use

    def restart(self) -> None:
        self.streams = Streams(self.overlap)

    def use(self, unit: int) -> None:
        own, phase = self.units[unit], self.acts.phase
        self.streams.compute(own.compute[phase])
        self.streams.exchange(own.inline[phase])

    def act(self, act: Act) -> None:
        """Begin a move, or wait for one."""
        kind, unit = act
        if kind in GATHERS:
            if unit not in self.arrivals:
                self.arrivals[unit] = self.streams.begin(self.units[unit].gather)
            self.streams.wait(self.arrivals[unit] if kind != "gather" else {})
        elif kind in FREES:
            self.arrivals.pop(unit, None)
        elif kind == "reduce":
            self.sums[unit] = self.streams.begin(self.units[unit].sums[0])
        elif kind in ("reduced", "replicate", "arrive"):
            self.streams.wait(self.sums.get(unit, {}))
            further = self.units[unit].sums[1]
            again: AxisSeconds = further if kind == "replicate" else {}
            self.sums[unit] = self.streams.begin(again)
