"""The bytes that each rank sends in one training step, by axis, kind and phase.

For a flat parameter on the data axes: the moves of its row (core/zero.py) at their prices
(core/moves.py), those before use and after backward in each microbatch, the others once; then the
sums of its gradient over tensor and pipeline ranks. In addition:

    check      the consensus: loss, tokens, and for each trained parameter whether it had a
               gradient, as doubles that every rank gathers (many are all-reduced); one more
               double if the norm is computed, and always along the tensor axis; for a parameter
               of several stages, whether any of them had a gradient
    forward    all buffers, from the first rank of each axis

In the first step, the data ranks exchange their numbers of tokens beforehand, the ranks of other
axes exchange three doubles for their batch, and those of the tensor axis one for the loss and two
for each trained parameter that they replicate (engine/consistency.py). In later steps that compare,
they exchange the batch's again, and three doubles for the loss and all gradients.

An asynchronous schedule does the moves "once", and sums the consensus except the loss, with each of
its updates.
"""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import NamedTuple

from shardwise.core.layout import I, P, Placement, R, S
from shardwise.core.layouts import norm_axes
from shardwise.core.mesh import PIPELINE, TENSOR
from shardwise.core.model_spec import (
    ELEMENT_BYTES,
    CutLoss,
    ModelShape,
    ModelSpec,
    ParamShape,
)
from shardwise.core.moves import between, price, sums_by_gathering
from shardwise.core.param_layout import AxisLayout
from shardwise.core.plan import Plan
from shardwise.core.plan_schedule import schedule_of
from shardwise.core.schedule.action import Transfer
from shardwise.core.schedule.library import updates
from shardwise.core.zero import Moment, RowMove, Tier
from shardwise.prediction.group import Group, groups, layout_of
from shardwise.prediction.rank_shape import stage_of, stages_on
from shardwise.techniques.recompute.price import parts
from shardwise.techniques.tensor.price import Crossings, recomputing
from shardwise.techniques.tensor.price_loss import loss_bytes

CONSENSUS_BYTES = 8  # added as doubles: a count of tokens must not be rounded
#: Before the first step: tokens, errors, lengths of lists and a checksum (engine.py).
FIRST_NUMBERS = 7


class Line(NamedTuple):
    """The key of a count of bytes; the same three fields as in the ledger."""

    axis: str
    kind: str
    phase: str


class Counted(dict[Line, int]):
    """Bytes by line, and the messages that they are in."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: Counter[Line] = Counter()


class Tariff:
    """The data axes of a plan, seen from one rank, and the bytes sent along them so far."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.sent_bytes = plan, Counted()
        self.shard, self.replicate = plan.shard_axis or "none", plan.replicate_axis or "none"
        self.coordinates = plan.coordinate(rank)

    def size(self, axis: str) -> int:
        """The number of ranks of the axis."""
        return self.plan.size_of(axis)

    def move(
        self, axis: str, src: Placement, dst: Placement, numel: int, element_bytes: int, phase: str
    ) -> None:
        """One move of a tensor that has `numel` elements in full."""
        step = price(src, dst, numel, self.size(axis))
        self.add(Line(axis, step.what, phase), round(step.sent) * element_bytes)

    def carry(self, group: Group, move: RowMove, phase: str) -> None:
        """One move of a group: between ranks, or between the tiers of this one."""
        axis = group.layout.shard if move.axis == "shard" else group.layout.replicate
        numel = group.flat.share if move.block else group.flat.padded
        if move.between_tiers:
            self.copy(move.src_tier, move.dst_tier, numel * group.element_bytes, phase)
        else:
            self.move(axis, move.src, move.dst, numel, group.element_bytes, phase)

    def group(self, axis: str, on: AxisLayout) -> int:
        """The number of ranks of the axis over which a gradient of this rank is summed."""
        return len(on.group(self.coordinates.get(axis, 0)))

    def sum_parts(self, axis: str, numel: int, ranks: int, element_bytes: int) -> None:
        """The sum of gradients over `ranks` ranks of the axis."""
        step = price(P, R, numel, ranks)
        self.add(Line(axis, step.what, "backward"), round(step.sent) * element_bytes)

    def ask(self, axis: str, ranks: int) -> None:
        """One number from each of `ranks` ranks of the axis, gathered by all of them."""
        step = price(S(0), R, ranks, ranks)
        self.add(Line(axis, step.what, "check"), round(step.sent) * CONSENSUS_BYTES)

    def send(self, element_bytes: int, numel: int, phase: str) -> None:
        """A tensor that goes from one stage to another."""
        self.add(Line(PIPELINE, "send", phase), numel * element_bytes)

    def loss(self, axis: str, one: CutLoss) -> None:
        """A cross-entropy over a sharded vocabulary."""
        positions, smoothing, size = one
        ranks = self.size(axis)
        sent_bytes = loss_bytes(positions, ranks, smoothing=smoothing, element_bytes=size)
        line = Line(axis, "all_reduce", "forward")
        self.add(line, sent_bytes)
        self.sent_bytes.messages[line] += bool(sent_bytes)  # the maxima, then the sums

    def broadcast(self, stored_bytes: int, phase: str) -> None:
        """The first rank of each data axis sends `stored_bytes` bytes to each of the others."""
        for axis in (self.shard, self.replicate):
            others = self.size(axis) - 1 if self.coordinates.get(axis, 0) == 0 else 0
            self.add(Line(axis, "broadcast", phase), stored_bytes * others)

    def agree(self, numbers: int, number_bytes: int) -> None:
        """Every rank sums a few numbers with all others, one axis after another."""
        for axis in (self.shard, self.replicate):
            ranks = self.size(axis)
            if sums_by_gathering(ranks, numbers * number_bytes):
                self.move(axis, S(0), R, numbers * ranks, number_bytes, "check")
            else:
                self.move(axis, P, R, numbers, number_bytes, "check")

    def copy(self, src: Tier, dst: Tier, stored_bytes: int, phase: str) -> None:
        """A copy between tiers of the rank."""
        self.add(Line("tier", between(src, dst), phase), stored_bytes)

    def add(self, line: Line, sent_bytes: int) -> None:
        """Count bytes; a line without any is left out."""
        if sent_bytes:
            self.sent_bytes[line] = self.sent_bytes.get(line, 0) + sent_bytes
            self.sent_bytes.messages[line] += 1


def step_bytes(
    plan: Plan,
    model: ModelShape,
    rank: int = 0,
    *,
    norm: bool = False,
    first: bool = False,
    meets: bool = False,
    compares: str = "",
) -> dict[Line, int]:
    """The bytes `rank` sends in one step, activations apart; lines without any are left out.

    `norm`: gradients are clipped (fp16 always computes their norm). `first`: the first step of a
    run, which exchanges its number of tokens beforehand. `meets`: ranks compare batches;
    `compares`: they also compare the loss and the gradients, "each" or by their "sums".
    """
    tariff = Tariff(plan, rank)
    own = updates(plan.pipeline, plan.mesh.size_of(PIPELINE))
    for group in groups(plan, model):
        carry_row(tariff, group, max(1, own))
    for param in [p for p in model.params if p.trainable]:
        _shared(tariff, param)
    for _ in range(own):  # tokens, and which parameters had a gradient
        tariff.agree(1 + sum(param.trainable for param in model.params), CONSENSUS_BYTES)
    buffers = sum(buffer.stored_bytes for buffer in model.buffers)
    tariff.broadcast(buffers * plan.accumulate, "forward")
    tariff.agree(3 + sum(param.trainable for param in model.params), CONSENSUS_BYTES)
    if norm or plan.precision == "fp16":
        for axis in (*chain.from_iterable(norm_axes(plan)), PIPELINE):
            numbers = 2 if axis == TENSOR else 1  # the second says whether options are the same
            tariff.move(axis, S(0), R, numbers * tariff.size(axis), CONSENSUS_BYTES, "check")
    else:  # are all of their gradients finite, have they the same options?
        tariff.move(TENSOR, S(0), R, tariff.size(TENSOR), CONSENSUS_BYTES, "check")
    # the loss, and whether stages have the same options
    tariff.move(PIPELINE, S(0), R, 2 * tariff.size(PIPELINE), CONSENSUS_BYTES, "check")
    for param in [*model.params] * (1 + own):
        holders = tariff.group(PIPELINE, layout_of(plan, param).on(PIPELINE))
        tariff.ask(PIPELINE, holders if param.trainable else 1)  # was it used by any?
    if first:
        tariff.agree(FIRST_NUMBERS, CONSENSUS_BYTES)
    trained = [p for p in model.params if p.trainable]
    trained = [p for p in trained if not p.layout or dict(p.layout.axes).get(TENSOR)]
    whole = [p for p in trained if layout_of(plan, p).on(TENSOR).cut is None]
    told = {"": 0, "sums": 3, "each": 1 + 2 * len(whole)}[compares]  # the loss, gradients
    tariff.move(TENSOR, S(0), R, told * tariff.size(TENSOR), CONSENSUS_BYTES, "check")
    for axis in (TENSOR, PIPELINE):  # the batch
        tariff.move(axis, S(0), R, 3 * tariff.size(axis) * meets, CONSENSUS_BYTES, "check")
    return tariff.sent_bytes


def row_bytes(plan: Plan, model: ModelSpec, rank: int) -> dict[Line, int]:
    """The bytes `rank` sends to gather rows for layers with a mesh of their own.

    Before the step, all ranks exchange the rows of each microbatch, as 8-byte integers.
    """
    tariff, here = Tariff(plan, rank), stages_on(plan, rank)
    for gather in (one for each in model.row_gathers for one in each):
        if stage_of(model, gather.layer) in here:
            few, many = gather.degrees
            step = price(S(0), I, gather.numel, many // few)
            size = round(step.sent) * ELEMENT_BYTES[gather.dtype]
            tariff.add(Line(f"rows{few}-{many}", step.what, gather.phase), size)
    if len(plan.tensor_degrees) > 1:
        step = price(S(0), R, plan.microbatches * plan.size, plan.size)
        tariff.add(Line("world", step.what, "check"), round(step.sent) * CONSENSUS_BYTES)
    return tariff.sent_bytes


def tensor_bytes(plan: Plan, model: ModelSpec, rank: int) -> dict[Line, int]:
    """The bytes `rank` sends along tensor axes for the activations of a step, by its styles."""
    found = Counted()
    for number, tensors in {0: model.tensors, **model.layers}.items():
        if tensors is not None:
            axis = f"{TENSOR}.{number}" if number else TENSOR
            own = _tensor_bytes(plan, replace(model, tensors=tensors), rank, axis)
            found.update(own)
            found.messages.update(own.messages)
    return found


def _tensor_bytes(plan: Plan, model: ModelSpec, rank: int, axis: str) -> Counted:
    tariff, schedule = Tariff(plan, rank), schedule_of(plan)
    assert model.tensors is not None
    spec, size, mine = model.tensors, tariff.size(axis), set[int]()
    if schedule is not None:
        mine = {*schedule.stages(tariff.coordinates.get(PIPELINE, 0))}

    def here(module: str) -> bool:
        return model.stages is None or bool(mine & {*model.stages.of(module)})

    heads = [name for name, style in spec.styles.items() if style.name == "vocabulary"]
    last = any(here(name) for name in heads if spec.modules[name].kind == "linear")
    for run in (recomputing(run, model.recomputed) for run in spec.runs):
        Crossings(spec, size, run, partial(tariff.move, axis)).count(here)
        for loss in run.losses if last else ():
            tariff.loss(axis, loss)
        for x in run.joins if last else ():
            phase = "backward" if x.trained else "forward"
            tariff.move(axis, S(0), I, math.prod(x.shape), ELEMENT_BYTES[x.dtype], phase)
    return tariff.sent_bytes


def part_bytes(plan: Plan, model: ModelSpec, rank: int) -> dict[Line, int]:
    """The bytes `rank` sends to gather inputs of recomputed modules (recompute.py)."""
    tariff, here = Tariff(plan, rank), stages_on(plan, rank)
    ranks = tariff.size(TENSOR)
    for run in model.tensors.runs if model.tensors else ():
        for part in parts(run.tape, model.recomputed):
            padded = -(-part.numel // ranks) * ranks
            if stage_of(model, part.module) in here:
                tariff.move(TENSOR, S(0), I, padded, part.element_bytes, "backward")
    return tariff.sent_bytes


def stage_bytes(plan: Plan, model: ModelSpec, rank: int) -> dict[Line, int]:
    """The bytes `rank` sends to other stages in a step, by the schedule's transfers.

    Values cross boundaries forward, and the gradients of trained ones cross backward.
    """
    bundles = model.stages.bundles if model.stages else ()
    tariff, schedule = Tariff(plan, rank), schedule_of(plan)
    steps = () if schedule is None else schedule.rows[tariff.coordinates.get(PIPELINE, 0)]
    sends = [step.token for step in steps if isinstance(step, Transfer) and step.op == "SEND"]
    runs = range(0, len(bundles), 1 if schedule is None else schedule.microbatches)
    for first, (kind, stage, microbatch) in product(runs, sends):
        forward = kind == "act"
        for x in bundles[first + microbatch][stage if forward else stage - 1]:
            times = int(forward or x.trained)
            tariff.send(x.element_bytes, times * x.numel, "forward" if forward else "backward")
    return tariff.sent_bytes


def start_bytes(plan: Plan, model: ModelShape, rank: int = 0) -> dict[Line, int]:
    """The bytes `rank` sends before the first step, on the data axes and between tiers.

    Rank 0 sends its weights. Weights that rest, or are updated, on another tier are copied there.

    A model on the meta device sends only its buffers: its weights follow from the seed.
    """
    tariff = Tariff(plan, rank)
    for group in groups(plan, model):
        tariff.broadcast(group.flat.padded * group.element_bytes, "start")
        if group.moves.offload or group.moves.fetch:  # to a disk through the host (disk.py)
            tariff.copy("device", "host", group.flat.share * group.element_bytes, "start")
    tariff.broadcast(sum(buffer.stored_bytes for buffer in model.buffers), "start")
    return tariff.sent_bytes


def by_kind(sent_bytes: dict[Line, int]) -> dict[str, int]:
    """The bytes by axis and kind, such as "dp all_gather", summed over phases, without zeros."""
    total: dict[str, int] = {}
    for line, count in ((line, count) for line, count in sent_bytes.items() if count):
        name = f"{line.axis} {line.kind}"
        total[name] = total.get(name, 0) + count
    return dict(sorted(total.items()))


def phases(plan: Plan, group: Group, moment: Moment, updates: int = 1) -> dict[str, int]:
    """How often a group makes the moves of a moment in each phase of a step."""
    uses, again = plan.accumulate * group.unit.uses, plan.accumulate * group.unit.again
    match moment:
        case Moment.USE:
            return {"forward": uses, "backward": again}
        case Moment.BACKWARD:
            return {"backward": updates * (1 if plan.pipeline else plan.accumulate)}
        case Moment.BEFORE_UPDATE:
            return {"backward": updates}
        case Moment.UPDATE | Moment.AFTER_UPDATE:
            return {"update": updates}


def carry_row(tariff: Tariff, group: Group, updates: int = 1) -> None:
    """The row's moves in a step with `updates` updates, and the sums on other axes.

    Those of a disk are in techniques/offload/price_disk.py, with the optimizer's states.
    """
    for move in group.moves:
        times = {} if move.of_disk else phases(tariff.plan, group, move.moment, updates)
        for phase, count in times.items():
            for _ in range(count):
                tariff.carry(group, move, phase)
    for axis, on in group.layout.axes if group.trained else ():
        for _ in range(updates):
            ranks = tariff.group(axis, on)
            tariff.sum_parts(axis, group.flat.share, ranks, group.element_bytes)


def _shared(tariff: Tariff, param: ParamShape) -> None:
    """The sums of gradients of shared parts, one in each backward pass."""
    layout = layout_of(tariff.plan, param)
    for axis, on in layout.axes:
        shared = on.shared(tariff.coordinates.get(axis, 0))
        numel = layout.shared_numel(axis, tariff.coordinates, param.shape)
        for _ in range(tariff.plan.microbatches if shared else 0):
            tariff.sum_parts(axis, numel, len(shared.ranks) if shared else 1, param.element_bytes)
