"""The streams of a rank: one computes, and one for each axis sends.

    compute   kernel . kernel . kernel .      a wait moves `now` to the arrival
    dp        gather 0 | gather 1 | reduce 1      what begins a move does not

They play what a dry run recorded, so what overlaps with computation is what the engine
lets overlap; the rest is exposed. Copies between tiers have a stream for each direction. If
messages take a part of the device's own time, as between processes on processors, that part is
exposed when the move begins.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardwise.core.mesh import PIPELINE
from shardwise.core.schedule.schedule import Action
from shardwise.core.tally import TIER, Key, Tally
from shardwise.prediction.prediction import Begun, Issued, Operation, Waited
from shardwise.prediction.time.network import Network, operation_s

#: Seconds by axis.
AxisSeconds = Mapping[str, float]


class Streams:
    """The time on the compute stream, and until when each axis sends."""

    def __init__(self, overlap: float = 1.0) -> None:
        self.overlap = overlap
        self.now = self.compute_s = 0.0
        self.busy_until: dict[str, float] = {}
        self.exposed_s = defaultdict[str, float](float)

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.compute_s += seconds

    def begin(self, axis: str, seconds: float) -> tuple[str, float]:
        """Begin a move; returns its axis and its end."""
        self.wait(axis, self.now + (1 - self.overlap) * seconds)
        begin = max(self.now, self.busy_until.get(axis, 0.0))
        self.busy_until[axis] = begin + self.overlap * seconds
        return axis, self.busy_until[axis]

    def wait(self, axis: str, end: float) -> None:
        self.exposed_s[axis] += max(0.0, end - self.now)
        self.now = max(self.now, end)


class Span(NamedTuple):
    """What a rank spends until an action is over, or, without one, until the step ends.

    exposed_s   by axis, the time for which it waits
    flops       by precision as torch names it, recomputation apart
    """

    action: Action | None
    compute_s: float
    exposed_s: AxisSeconds
    flops: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return self.compute_s + sum(self.exposed_s.values())


def spans(issued: Sequence[Issued], network: Network, idle_s: float = 0.0) -> Iterator[Span]:
    """Play what a rank issues, without messages to other stages; it idles after the last action."""
    cluster = network.cluster
    kernel_s = dict[Operation, float]()
    streams, ends = Streams(cluster.device.overlap), dict[int, tuple[str, float]]()
    flops, compute_s, exposed_s = defaultdict[str, float](float), 0.0, dict[str, float]()
    left = sum(isinstance(each, Action) for each in issued)

    def over(action: Action | None) -> Span:
        waited = defaultdict[str, float](float)
        for axis, seconds in streams.exposed_s.items():
            waited[axis.partition(" ")[0]] += seconds - exposed_s.get(axis, 0.0)
        return Span(action, streams.compute_s - compute_s, waited, dict(flops))

    for each in issued:
        match each:
            case Operation():
                if each not in kernel_s:
                    kernel_s[each] = operation_s(each, cluster)
                streams.compute(kernel_s[each])
                flops[each.dtype] += 0 if each.again else each.flops
            case Begun(number, key, sent_bytes):
                if key[:2] != (PIPELINE, "send"):
                    axis = f"{TIER} {key.kind}" if key.axis == TIER else key.axis
                    ends[number] = streams.begin(axis, message_s(network, key, sent_bytes))
            case Waited(number):
                if number in ends:
                    streams.wait(*ends.pop(number))
            case _:
                yield over(each)
                flops, compute_s = defaultdict[str, float](float), streams.compute_s
                exposed_s, left = dict(streams.exposed_s), left - 1
                streams.now += 0.0 if left else idle_s
    yield over(None)


def message_s(network: Network, key: Key, sent_bytes: int) -> float:
    if key.axis == TIER:
        return sent_bytes / network.tier_rate
    one = Tally(calls=1, sent_bytes=sent_bytes)
    return sum(network.seconds({Key(key.axis, key.kind, ""): one}).values())
