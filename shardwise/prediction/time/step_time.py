"""The seconds of a step: kernels on the roofline, collectives on links, and what of them overlaps.

    compute    kernels of the recorded pass, recomputation included
    exposed    by axis, the time for which the compute stream waits for collectives (streams.py)
    bubble     in a pipeline, the time for which the rank waits for other stages (staged.py)
    update     gradients and states are read, states and weights written, at memory bandwidth

Collectives within layers (tensor, expert and context parallelism) are exposed: the sum of an input
gradient, which overlaps with weight gradients in a run, is not credited.  Microbatches have the
shapes of the first, experts an even load.

Collectives take the latency of their hops, and bytes over bandwidth:

    tp8 in hosts of 8      1 host,  8 ranks in it     NVLink
    dp8 of dp8 tp8         8 hosts, 1 rank in each    one network link
    dp64                   8 hosts, 8 ranks in each   rings enter a host by all of its 8 links

    ring          all_gather, reduce_scatter, broadcast       n - 1 hops
    tree          all_reduce between hosts                    2 log2(hosts) hops, a ring's bytes
    pairs         all_to_all, send                            one hop; bytes by where the peers are

The bytes are those that the ledger counts (core/layouts/layout.py).  A measured cluster has a
latency and a rate of each collective relative to these.

Operations take as long as the device's roofline says; on a device that is not asynchronous, a
processor, the launch is added:

product        max(FLOPs / peak of its precision, bytes / memory bandwidth, launch)
others         max(bytes / memory bandwidth, launch)
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from shardwise.core.layouts.layout import Move, P, R, price
from shardwise.core.mesh import CONTEXT, EXPERTS, PIPELINE, TENSOR
from shardwise.core.model_spec import Operation
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import schedule_of
from shardwise.core.tally import TIER, Key, Tally
from shardwise.core.zero import Moment, RowMove
from shardwise.prediction.cluster import Cluster, cluster_of
from shardwise.prediction.flat_groups import Group
from shardwise.prediction.rank_shape import places
from shardwise.prediction.time.streams import Streams, TimedActs, UnitSeconds
from shardwise.prediction.unit_acts import UnitActs, by_unit, order_on
from shardwise.techniques.context.price import ring_operations
from shardwise.techniques.recompute.price import added_operations

if TYPE_CHECKING:
    from shardwise.prediction.prediction import Prediction

PHASES: Final = ("forward", "backward")
#: The axes of messages within layers.
INSIDE: Final = (TENSOR, CONTEXT, EXPERTS)


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step of a rank, and their parts.

    tokens       of a step, over all ranks; 0 if the model reads no text
    flops        of the rank in a step as torch counts them, recomputation apart
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

    def as_json(self) -> dict[str, Any]:
        parts = {"compute_s": self.compute_s, "exposed_s": dict(self.exposed_s)}
        parts |= {"bubble_s": self.bubble_s, "update_s": self.update_s}
        more = {"tokens_per_s": self.tokens_per_s, "mfu": self.mfu}
        return {"step_s": self.seconds, **parts, **more, "unmodelled": list(self.unmodelled)}


def step_time(found: "Prediction", cluster: Cluster | str | Path, ahead: int = 1) -> StepTime:
    """The time of a step after the first; `ahead` is the option `prefetch`.
    Raises InputError for a wrong cluster, or one without the peak of a precision.
    """
    from shardwise.prediction.time.staged import staged_streams

    cluster = cluster if isinstance(cluster, Cluster) else cluster_of(cluster)
    work = RankWork(found, cluster)
    if found.plan.pipeline is None:
        streams, bubble_s = unstaged_streams(work, ahead), 0.0
    else:
        streams, bubble_s = staged_streams(work, ahead)
    streams.exchange(work.after())
    streams.exchange({"tier": _copies_s(found, cluster)})
    kind, flops, run = _most_flops(work), sum(each.flops for each in work.recorded), found.spec.run
    inputs = [run.values[n] for n in run.calls[0].values] if run.calls else []
    texts = (x.shape for x in inputs if len(x.shape) == 2 and x.dtype.startswith("int"))
    rows, positions = next(texts, (0, 0))
    stages = found.plan.mesh.size_of(PIPELINE)
    return StepTime(
        compute_s=streams.compute_s,
        exposed_s={axis: s for axis, s in sorted(streams.exposed_s.items()) if s},
        bubble_s=bubble_s,
        update_s=update_s(found, cluster),
        tokens=rows * positions * found.plan.microbatches * found.plan.data_size,
        flops=flops * found.plan.microbatches / stages,
        peak_flops=cluster.device.peak_flops[kind] if kind else 1.0,
        unmodelled=unmodelled(found),
    )


def unmodelled(found: "Prediction") -> tuple[str, ...]:
    """The words of the plan, of any layer, that take time which `step_time` does not count."""
    schedule = schedule_of(found.plan)
    words = dict.fromkeys([found.plan.pipeline or ""] if schedule and schedule.update else [])
    for plan in found.plan.of_all_layers:
        on_disk = "@disk" in (plan.offload or "")
        words[f"offload:{plan.offload}" if on_disk else ""] = None
        words[f"activations:{plan.activations}" if plan.activations else ""] = None
        on_host = (plan.recompute or "").endswith("-host")
        words[f"recompute:{plan.recompute}" if on_host else ""] = None
    return tuple(filter(None, words))


class RankWork:
    """What a rank does in a step, in seconds: by unit, by stage, and at the end."""

    def __init__(self, found: "Prediction", cluster: Cluster) -> None:
        self.found, self.cluster = found, cluster
        self.network = Network(cluster, found.plan, found.rank)
        self.recorded = found.spec.run.tape.operations
        added = added_operations(found.spec.run.tape, found.spec.recomputed)
        merged = ring_operations(found.spec, found.plan, found.rank)
        self.operations: list[Operation] = [*self.recorded, *added, *merged]
        self.inline = self._inline()

    @cached_property
    def groups(self) -> list[list[Group]]:
        stored = {own[0].unit.name: own for own in by_unit(self.found.plan, self.found.model)}
        return [stored.get(unit.name, []) for unit in self.found.spec.shape.units]

    @property
    def compute_s(self) -> float:
        return sum(operation_s(each, self.cluster) for each in self.operations)

    def units(self) -> list[UnitSeconds]:
        """The seconds of each unit in one microbatch."""
        compute = seconds_by(self.operations, self.cluster, places(self.found.spec))
        whole = {phase: sum(compute[phase].values()) or 1.0 for phase in PHASES}
        return [
            UnitSeconds(
                {phase: compute[phase][n] for phase in PHASES},
                {
                    phase: {
                        axis: seconds * compute[phase][n] / whole[phase]
                        for axis, seconds in self.inline[phase].items()
                    }
                    for phase in PHASES
                },
                self.moves(n, lambda group: group.moves.at(Moment.USE)),
                self.sums(n),
            )
            for n in range(len(self.groups))
        ]

    def sums(self, unit: int) -> tuple[dict[str, float], dict[str, float]]:
        """The seconds of the first sum of a unit's gradient, and of the others."""
        first = self.moves(unit, lambda group: group.moves.sums[:1])
        later = self._carried(unit, lambda group: group.moves.sums[1:])
        place = self.found.plan.coordinate(self.found.rank)
        for group in (each for each in self.groups[unit] if each.trained):
            for axis, on in group.layout.axes:
                ranks = len(on.group(place.get(axis, 0)))
                move = price(P, R, group.flat.share, ranks)
                _count(later, axis, move, group.element_bytes)
        return first, self.network.seconds(later)

    def moves(self, unit: int, of: Callable[[Group], Iterable[RowMove]]) -> dict[str, float]:
        return self.network.seconds(self._carried(unit, of))

    def _carried(self, unit: int, of: Callable[[Group], Iterable[RowMove]]) -> dict[Key, Tally]:
        """What moves of a unit's groups between ranks send."""
        found, plan = dict[Key, Tally](), self.found.plan
        for group in self.groups[unit]:
            for move in (each for each in of(group) if not each.between_tiers):
                shard, replicate = group.layout.shard, group.layout.replicate
                axis = shard if move.axis == "shard" else replicate
                numel = group.flat.share if move.block else group.flat.padded
                step = price(move.src, move.dst, numel, plan.size_of(axis))
                _count(found, axis, step, group.element_bytes)
        return found

    def after(self) -> dict[str, float]:
        """The seconds of moves between steps: the consensus, buffers, and updated weights."""
        sent = self.found.dry_step.sent.items()
        between = {
            key: tally
            for key, tally in sent
            if (key.phase in ("check", "update") or key.kind == "broadcast")
            and key.axis not in (PIPELINE, TIER)
        }
        return self.network.seconds(between)

    def _inline(self) -> dict[str, dict[str, float]]:
        """The seconds of messages within layers in a microbatch, by phase and axis."""
        dry = self.found.dry_step
        inside = {
            key: tally
            for key, tally in dry.middle.items()
            if key.axis.partition(".")[0] in INSIDE or key.axis.startswith("rows")
        }
        found = dict[str, dict[str, float]]()
        for phase in PHASES:
            own = self.network.seconds({k: t for k, t in inside.items() if k.phase == phase})
            found[phase] = {axis: seconds / dry.number for axis, seconds in own.items()}
        return found


def _count(found: dict[Key, Tally], axis: str, move: Move, element_bytes: int) -> None:
    if sent := round(move.sent) * element_bytes:
        key = Key(axis, move.what, "")
        found[key] = found.get(key, Tally()) + Tally(calls=1, sent_bytes=sent)


def unstaged_streams(work: RankWork, ahead: int) -> Streams:
    """The streams of a step without a pipeline; the pass before it learns the order of units."""
    found = work.found
    every = by_unit(found.plan, found.model)
    acts = UnitActs(order_on(found.plan, every, found.spec.modules, found.rank, ahead))
    timed = TimedActs(acts, work.units(), work.cluster.device.overlap)
    for _ in range(2):
        timed.restart()
        for microbatch in range(found.plan.microbatches):
            acts.microbatch(found.spec, sync=microbatch == found.plan.microbatches - 1)
        for act in acts.order.arrivals():
            acts.do([act])
    return timed.streams


def _copies_s(found: "Prediction", cluster: Cluster) -> float:
    """The seconds of copies to and from host memory, taken not to overlap."""
    copied = sum(n for line, n in found.sent().items() if line.axis == TIER)
    link, derating = cluster.host_link, cluster.derating
    return copied / (link.bytes_per_s * derating.links if link else cluster.bytes_per_s / 2)


def update_s(found: "Prediction", cluster: Cluster) -> float:
    """The seconds in which norm and update read and write, and on a measured cluster `step_s`."""
    stored = found.memory
    reads = stored["gradients"] * (2 if found.norm else 1) + stored["optimizer"]
    written = stored["optimizer"] + stored["parameters"]
    return (reads + written) / cluster.bytes_per_s + cluster.device.step_s


def _most_flops(work: RankWork) -> str:
    found = Counter[str]()
    for each in work.recorded:
        found[precision(each)] += each.flops
    return max(found, key=lambda name: found[name], default="") if any(found.values()) else ""


# --- seconds of collectives -----------------------------------------------------------------------


class AxisHosts(NamedTuple):
    """The hosts that the ranks of an axis are on, and how many each has at least."""

    ranks: int
    hosts: int
    local: int


class Network:
    """The links between the ranks of a plan's axes through `rank`."""

    def __init__(self, cluster: Cluster, plan: Plan, rank: int) -> None:
        cluster.require_hosts(plan.size)
        self.cluster, self.plan, self.rank = cluster, plan, rank
        self.hosts = cache(self._hosts)

    def seconds(self, sent: Mapping[Key, Tally]) -> dict[str, float]:
        found: dict[str, float] = {}
        for (axis, _), seconds in self.seconds_by_kind(sent).items():
            found[axis] = found.get(axis, 0.0) + seconds
        return found

    def seconds_by_kind(self, sent: Mapping[Key, Tally]) -> dict[tuple[str, str], float]:
        """The seconds of messages of each axis and kind; none of copies between tiers."""
        found: dict[tuple[str, str], float] = {}
        for (axis, kind, _), tally in sent.items():
            if axis == TIER:
                continue
            relative = self.cluster.collective(kind)
            latency_s = tally.calls * relative.latency * self.latency_s(axis, kind)
            time_s = latency_s + tally.sent_bytes / (relative.rate * self.rate(axis, kind))
            found[axis, kind] = found.get((axis, kind), 0.0) + time_s
        return found

    def latency_s(self, axis: str, kind: str) -> float:
        """The time of a message without bytes."""
        on, inside, between = self.hosts(axis), self.cluster.inside, self.cluster.between
        if kind in ("all_to_all", "send"):
            return between.latency_s if on.hosts > 1 else inside.latency_s
        if kind == "all_reduce":
            levels = math.ceil(math.log2(on.hosts))
            return 2 * ((on.local - 1) * inside.latency_s + levels * between.latency_s)
        return (on.local - 1) * inside.latency_s + (on.hosts - 1) * between.latency_s

    def rate(self, axis: str, kind: str) -> float:
        """The bytes that a rank sends in a second."""
        on, part = self.hosts(axis), self.cluster.derating.links
        inside, between = self.cluster.inside.bytes_per_s, self.cluster.between.bytes_per_s
        if on.hosts == 1:
            rate = inside
        elif kind == "all_to_all":
            rate = between * (on.ranks - 1) / (on.ranks - on.local)
        elif kind == "send":
            rate = between
        else:
            rate = min(inside, on.local * between)
        return part * rate * (on.ranks - 1 if kind == "broadcast" else 1)

    def _hosts(self, axis: str) -> AxisHosts:
        name, _, number = axis.partition(".")
        plan = self.plan.of_layers(int(number)) if number else self.plan
        ranks = plan.size_of(name)
        mesh_axis = plan.inner_data_axis if name in ("ep", "edp") else name
        names = [each for each, _ in plan.mesh.axes]
        inner = names[names.index(mesh_axis) + 1 :] if mesh_axis in names else []
        stride = math.prod(map(plan.mesh.size_of, inner)) * (plan.ep if name == "edp" else 1)
        first = self.rank - stride * plan.coordinate(self.rank).get(name, 0)
        hosts = [(first + k * stride) // self.cluster.devices_per_host for k in range(ranks)]
        count = len(set(hosts))
        return AxisHosts(ranks, count, max(1, ranks // count))


# --- seconds of operations ------------------------------------------------------------------------

K = TypeVar("K")
#: The words of plans and clusters for torch's types; the others compute no products.
PRECISIONS: Final = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def operation_s(operation: Operation, cluster: Cluster) -> float:
    work_s, launch_s = operation.moved_bytes / cluster.bytes_per_s, cluster.device.launch_s
    if flops := operation.done_flops:
        work_s = max(work_s, flops / cluster.flops_per_s(precision(operation), flops))
    return max(work_s, launch_s) if cluster.device.asynchronous else work_s + launch_s


def precision(operation: Operation) -> str:
    return PRECISIONS.get(operation.dtype, operation.dtype)


def seconds_by(
    operations: Iterable[Operation], cluster: Cluster, key: Callable[[str], K]
) -> dict[str, defaultdict[K, float]]:
    """The seconds "forward" and "backward", by the `key` of each operation's module."""
    found = {phase: defaultdict[K, float](float) for phase in ("forward", "backward")}
    for each in operations:
        phase = "backward" if each.backward else "forward"
        found[phase][key(each.module)] += operation_s(each, cluster)
    return found
