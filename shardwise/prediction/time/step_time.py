"""The seconds of a step: kernels on the roofline, collectives on links, and what of them overlaps.

    compute    kernels of the recorded pass, recomputation included (kernel_seconds.py)
    exposed    by axis, the time for which the compute stream waits for collectives (streams.py)
    bubble     in a pipeline, the time for which the rank waits for other stages (staged.py)
    update     gradients and states are read, states and weights written, at memory bandwidth

Collectives within layers (tensor, expert and context parallelism) are exposed: the sum of an input
gradient, which overlaps with weight gradients in a run, is not credited. Microbatches have the
shapes of the first, experts an even load.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardwise.core.mesh import PIPELINE
from shardwise.core.model_spec import ModelSpec
from shardwise.core.plan.plan_schedule import schedule_of
from shardwise.core.tools.tape import Operation
from shardwise.core.zero import Moment, RowMove
from shardwise.prediction.cluster import Cluster
from shardwise.prediction.cluster_file import cluster_of
from shardwise.prediction.group import Group
from shardwise.prediction.peak_memory import places
from shardwise.prediction.priced_techniques import PRICES
from shardwise.prediction.time.kernel_seconds import operation_s, precision, seconds_by
from shardwise.prediction.time.network import Network
from shardwise.prediction.time.streams import Streams, TimedActs, UnitSeconds
from shardwise.prediction.traffic import Counted, Tariff, step_bytes
from shardwise.prediction.unit_acts import UnitActs, by_unit, order_on

if TYPE_CHECKING:
    from shardwise.prediction.prediction import Prediction

PHASES: Final = ("forward", "backward")


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
        """The step's time, the sum of its parts."""
        return self.compute_s + sum(self.exposed_s.values()) + self.bubble_s + self.update_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, over all ranks."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: FLOPs over those that the peak allows (arXiv 2204.02311)."""
        return self.flops / (self.seconds * self.peak_flops)

    def as_json(self) -> dict[str, Any]:
        """The parts and what follows from them, as values of JSON."""
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
        self.share = found.share()
        self.recorded = found.spec.run.tape.operations
        added = (each.spends(self.share) for each in PRICES)
        self.operations: list[Operation] = [*self.recorded, *(op for ops in added for op in ops)]
        self.inline = self._inline()

    @cached_property
    def groups(self) -> list[list[Group]]:
        """The groups of each unit of the model; none of a unit that other ranks store."""
        stored = {own[0].unit.name: own for own in by_unit(self.found.plan, self.found.model)}
        return [stored.get(unit.name, []) for unit in self.found.spec.shape.units]

    @property
    def compute_s(self) -> float:
        """The seconds of the kernels of a microbatch, of all stages."""
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
        tariff = self._carried(unit, lambda group: group.moves.sums[1:])
        for group in (each for each in self.groups[unit] if each.trained):
            for axis, on in group.layout.axes:
                ranks = tariff.group(axis, on)
                tariff.sum_parts(axis, group.flat.share, ranks, group.element_bytes)
        return first, self.network.seconds(tariff.sent_bytes)

    def moves(self, unit: int, of: Callable[[Group], Iterable[RowMove]]) -> dict[str, float]:
        """The seconds of moves of a unit between ranks."""
        return self.network.seconds(self._carried(unit, of).sent_bytes)

    def _carried(self, unit: int, of: Callable[[Group], Iterable[RowMove]]) -> Tariff:
        tariff = Tariff(self.found.plan, self.found.rank)
        for group in self.groups[unit]:
            for move in (each for each in of(group) if not each.between_tiers):
                tariff.carry(group, move, "")
        return tariff

    def after(self) -> dict[str, float]:
        """The seconds of moves between steps: the consensus, buffers, and updated weights."""
        found = self.found
        sent = step_bytes(
            found.plan,
            found.model,
            found.rank,
            norm=found.norm,
            optimizer=found.optimizer,
            buffers=found.broadcast_buffers,
        )
        return self.network.seconds(_lines(sent, ("check", "update"), kind="broadcast"))

    def _inline(self) -> dict[str, dict[str, float]]:
        """The seconds of collectives within layers, of a microbatch, by phase."""
        found = {phase: defaultdict[str, float](float) for phase in PHASES}
        one = replace(self.share, spec=_first_microbatch(self.found.spec))
        for sent in [each.sends(one) for each in PRICES]:
            for phase in PHASES:
                for axis, seconds in self.network.seconds(_lines(sent, (phase,))).items():
                    found[phase][axis] += seconds
        return {phase: dict(seconds) for phase, seconds in found.items()}


def _first_microbatch(spec: ModelSpec) -> ModelSpec:
    """The spec as if a step had the first microbatch alone; with the transfers of all."""
    passes = {"row_gathers": spec.row_gathers[:1], "expert_moves": spec.expert_moves[:1]}
    tensors = spec.tensors and replace(spec.tensors, runs=spec.tensors.runs[:1])
    layers = {n: replace(own, runs=own.runs[:1]) for n, own in spec.layers.items()}
    return replace(spec, tensors=tensors, layers=layers, tapes=spec.tapes[:1], **passes)


def _lines(sent: Counted, phases: tuple[str, ...], kind: str = "") -> Counted:
    """The lines of these phases, and those of the `kind`, between ranks of one stage."""
    found = Counted()
    for line, sent_bytes in sent.items():
        chosen = line.phase in phases or line.kind == kind
        if chosen and line.axis not in (PIPELINE, "tier"):
            found[line], found.messages[line] = sent_bytes, sent.messages[line]
    return found


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
    """The seconds of copies to and from host memory, which are taken not to overlap.

    Between a processor and its own memory a copy reads and writes.
    """
    copied = sum(n for line, n in found.sent().items() if line.axis == "tier")
    link, derating = cluster.host_link, cluster.derating
    return copied / (link.bytes_per_s * derating.links if link else cluster.bytes_per_s / 2)


def update_s(found: "Prediction", cluster: Cluster) -> float:
    """The seconds in which the update, and before it the norm of gradients, read and write.

    On a measured cluster also those of the program itself in a step.
    """
    stored = found.memory
    reads = stored["gradients"] * (2 if found.norm else 1) + stored["optimizer"]
    written = stored["optimizer"] + stored["parameters"]
    return (reads + written) / cluster.bytes_per_s + cluster.device.step_s


def _most_flops(work: RankWork) -> str:
    """The precision of most FLOPs; "" if there are none."""
    found = Counter[str]()
    for each in work.recorded:
        found[precision(each)] += each.flops
    return max(found, key=lambda name: found[name], default="") if any(found.values()) else ""
