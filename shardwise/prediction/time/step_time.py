"""The seconds of a step: what a rank issues (prediction.py), played on its streams (streams.py).

    compute    kernels of the passes, recomputation included
    exposed    by axis, the time for which the compute stream waits for messages and copies
    bubble     in a pipeline, the time for which the rank waits for other stages
    update     gradients and states are read, states and weights written, on the device or in host
               memory; of a delayed update, only what takes longer than the next step

All microbatches have the shapes of the first, and experts an even load. Of many equal microbatches
a dry run takes only a few, since those in the middle of a step repeat. In a pipeline, the clock of
the schedule uses the mean time of each action of each stage. Of the ranks between the first and the
last, only one is run for each number of parameters. A message to another stage overlaps with
computation and takes one hop. All ranks wait for each other at the end of a step, so a rank idles
until the last action of the schedule, while its reductions go on.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.core.mesh import PIPELINE
from shardwise.core.plan.plan_check import schedule_of
from shardwise.core.schedule.clock import ActionCosts, clock
from shardwise.core.schedule.schedule import OPS, Schedule
from shardwise.core.tally import TIER
from shardwise.core.zero import Tier
from shardwise.prediction.cluster import Cluster, cluster_of
from shardwise.prediction.prediction import Begun, Issued
from shardwise.prediction.time.network import PRECISIONS, Network
from shardwise.prediction.time.streams import Span, message_s, spans

if TYPE_CHECKING:
    from shardwise.prediction.prediction import Prediction


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step of a rank, and their parts.

    tokens       of a step, over all ranks; 0 if the model reads no text
    flops        of a rank in a step as torch counts them, recomputation apart; in a pipeline the
                 mean of its ranks
    peak_flops   a second, of the device, in the precision of most of them
    unmodelled   the parts of the plan whose time is missing
    """

    compute_s: float
    exposed_s: Mapping[str, float]
    bubble_s: float
    update_s: float
    tokens: int
    flops: float
    peak_flops: float
    unmodelled: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.compute_s + sum(self.exposed_s.values()) + self.bubble_s + self.update_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: FLOPs over those that the peak allows (arXiv 2204.02311)."""
        return self.flops / (self.seconds * self.peak_flops)

    @property
    def parts(self) -> dict[str, float]:
        found = {"compute": self.compute_s}
        found |= {f"exposed {axis}": seconds for axis, seconds in self.exposed_s.items()}
        found |= {"bubble": self.bubble_s, "update": self.update_s}
        return {name: seconds for name, seconds in found.items() if seconds}

    def as_json(self) -> dict[str, Any]:
        parts = {"compute_s": self.compute_s, "exposed_s": dict(self.exposed_s)}
        parts |= {"bubble_s": self.bubble_s, "update_s": self.update_s}
        more = {"tokens_per_s": self.tokens_per_s, "mfu": self.mfu}
        return {"step_s": self.seconds, **parts, **more, "unmodelled": list(self.unmodelled)}


def step_time(found: "Prediction", cluster: Cluster | str | Path) -> StepTime:
    """The time of a step after the first.
    Raises InputError for a wrong cluster, or one without the peak of a precision.
    """
    cluster = cluster if isinstance(cluster, Cluster) else cluster_of(cluster)
    schedule, bubble_s = schedule_of(found.plan), 0.0
    if schedule is None:
        own = every = _unstaged(found, cluster)
    else:
        own, every, bubble_s = _staged(found, cluster, schedule)
    exposed_s, flops = defaultdict[str, float](float), defaultdict[str, float](float)
    for times, span in own:
        for axis, seconds in span.exposed_s.items():
            exposed_s[axis] += times * seconds
    for times, span in every:
        for dtype, n in span.flops.items():
            flops[dtype] += times * n
    most = max(flops, key=lambda name: flops[name], default="")
    peak = cluster.device.peak_flops[PRECISIONS.get(most, most)] if flops.get(most) else 1.0
    compute_s = sum(times * span.compute_s for times, span in own)
    (on_device_s, on_host_s), offload = update_s(found, cluster), found.plan.offloaded
    if offload is not None and offload.undelayed is not None:  # beside the next step
        on_host_s = max(0.0, on_host_s - compute_s - sum(exposed_s.values()) - bubble_s)
    return StepTime(
        compute_s=compute_s,
        exposed_s={axis: s for axis, s in sorted(exposed_s.items()) if s},
        bubble_s=bubble_s,
        update_s=on_device_s + on_host_s,
        tokens=found.tokens,
        flops=sum(flops.values()) / found.plan.mesh.size_of(PIPELINE),
        peak_flops=peak,
        unmodelled=unmodelled(found, cluster),
    )


def unmodelled(found: "Prediction", cluster: Cluster) -> tuple[str, ...]:
    """The words of the plan, of any layer, that take time which `step_time` does not count: states
    in host memory or on a disk of which the cluster has no rate.
    """
    words = dict[str, None]()
    for word in (plan.offload or "" for plan in found.plan.of_all_layers):
        known = cluster.host_rate and (cluster.disk_bytes_per_s or "@disk" not in word)
        words |= {f"offload:{word}": None} if word and not known else {}
    return tuple(words)


def update_s(found: "Prediction", cluster: Cluster) -> tuple[float, float]:
    """The seconds in which norm and update read and write, on the device and in host memory, beside
    which states on a disk are copied; on a measured cluster also `step_s`. A schedule that updates
    by itself updates several times in a step.
    """
    schedule, memory = schedule_of(found.plan), found.dry_step.memory
    updates = schedule.microbatches // schedule.update if schedule and schedule.update else 1

    def seconds(rate: float | None, *tiers: Tier) -> float:
        stored = sum((Counter(memory[tier]) for tier in tiers), Counter[str]())
        reads = stored["gradients"] * (2 if found.norm else 1) + stored["optimizer"]
        written = stored["optimizer"] + stored["parameters"]
        return updates * (reads + written) / rate if rate else 0.0

    disk = (n for key, n in found.sent().items() if key.axis == TIER and "disk" in key.kind)
    disk_s = sum(disk) / (cluster.disk_bytes_per_s or math.inf)
    on_device_s = seconds(cluster.bytes_per_s, "device") + cluster.device.step_s
    return on_device_s, max(disk_s, seconds(cluster.host_rate, "host", "disk"))


#: Spans, each with how often it is in a step.
Spans = list[tuple[int, Span]]


def _unstaged(found: "Prediction", cluster: Cluster) -> Spans:
    """The spans of a step without a pipeline; one microbatch in the middle stands for more."""
    step, network = found.dry_step, Network(cluster, found.plan, found.rank)
    few, more = step.few.microbatches, found.plan.microbatches - step.few.microbatches
    return [
        (1 + more * (span.action is not None and span.action.microbatch == few // 2), span)
        for span in spans(step.issued, network)
    ]


# --- pipelines ------------------------------------------------------------------------------------


class StageTimes(NamedTuple):
    """The mean spans of the actions of a pipeline, by op and stage; the seconds of a message."""

    means: Mapping[tuple[str, int], Span]
    hop_s: float

    def costs(self, stages: Iterable[int]) -> dict[str, tuple[float, ...]]:
        """The seconds of each kind of action, by stage; of B only if it is not I and W."""
        every = [*stages]
        found = {op: tuple(self._seconds(op, stage) for stage in every) for op in OPS}
        return {op: s for op, s in found.items() if op != "B" or any(s)}

    def _seconds(self, op: str, stage: int) -> float:
        span = self.means.get((op, stage))
        return 0.0 if span is None else span.seconds


def stage_times(found: "Prediction", cluster: Cluster) -> StageTimes:
    """The times of all stages of a pipeline."""
    schedule = schedule_of(found.plan)
    assert schedule is not None
    line, sizes = found.plan.mesh.line(PIPELINE, found.rank), found.dry_step.stages
    like = dict[object, int]()
    means, hop_s = dict[tuple[str, int], Span](), 0.0
    known = dict[int, Mapping[tuple[str, int], Span]]()
    ends, here = (line[0], line[-1]), line.index(found.rank)
    for place in (here, *(n for n in range(len(line)) if n != here)):
        rank, own = line[place], schedule.stages(place)
        key = rank if rank in ends else tuple(sizes[stage] for stage in own)
        if key not in like:
            like[key] = place
            issued = found.brief_step(rank).issued
            network = Network(cluster, found.plan, rank)
            known[place] = _means(spans(issued, network))
            hop_s = max(hop_s, _hop_s(issued, network))
        twin = like[key]
        stages = dict(zip(schedule.stages(twin), own, strict=True))
        means |= {(op, stages[stage]): span for (op, stage), span in known[twin].items()}
    return StageTimes(means, hop_s)


def _means(every: Iterable[Span]) -> dict[tuple[str, int], Span]:
    by_action = defaultdict[tuple[str, int], list[Span]](list)
    for span in every:
        if span.action is not None:
            by_action[span.action[:2]].append(span)
    return {key: _mean(of) for key, of in by_action.items()}


def _mean(of: Sequence[Span]) -> Span:
    def mean(numbers: Callable[[Span], Mapping[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for span in of for name in numbers(span))
        return {name: sum(numbers(span).get(name, 0) for span in of) / len(of) for name in names}

    compute_s = sum(span.compute_s for span in of) / len(of)
    return Span(None, compute_s, mean(lambda x: x.exposed_s), mean(lambda x: x.flops))


def _hop_s(issued: Sequence[Issued], network: Network) -> float:
    sent = (each for each in issued if isinstance(each, Begun))
    own = (each for each in sent if each.key[:2] == (PIPELINE, "send"))
    most = max(own, key=lambda each: each.sent_bytes, default=None)
    return 0.0 if most is None else message_s(network, most.key, most.sent_bytes)


def _staged(
    found: "Prediction", cluster: Cluster, schedule: Schedule
) -> tuple[Spans, Spans, float]:
    """The spans of the rank, those of all ranks of its pipeline, and the seconds of its bubble."""
    here = found.plan.mesh.coordinate(found.rank).get(PIPELINE, 0)
    times, runs = stage_times(found, cluster), found.plan.accumulate
    costs = ActionCosts(**times.costs(range(len(schedule.home))), hop=times.hop_s)
    timeline = clock(schedule, costs)
    every = Counter(span.action[:2] for row in timeline.spans for span in row)
    own = Counter(span.action[:2] for span in timeline.spans[here])
    means = times.means
    mine = [(runs * n, means[key]) for key, n in own.items() if key in means]
    idle_s = timeline.makespan - timeline.spans[here][-1].end
    network = Network(cluster, found.plan, found.rank)
    *_, rest = spans(found.dry_step.issued, network, idle_s)
    bubble_s = runs * timeline.makespan - sum(n * span.seconds for n, span in mine)
    whole = [(runs * n, means[key]) for key, n in every.items() if key in means]
    return [*mine, (1, rest)], [*whole, (1, rest)], bubble_s
