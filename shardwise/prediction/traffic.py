"""The bytes that each rank sends in one training step, by axis, kind and phase, and a technique's
price.

For a flat parameter on the data axes: the moves of its row (core/zero.py) at their prices
(core/layouts/layout.py), those before use and after backward in each microbatch, the others once;
then the sums of its gradient over tensor and pipeline ranks.  In addition:

    check      the tokens of each update and the microbatches that have any; the consensus: the
               loss, and for each trained parameter whether it had a gradient, as doubles that
               every rank gathers (many are all-reduced); one more double if the norm is computed,
               and always along the tensor axis; for a parameter of several stages, whether any of
               them had a gradient
    forward    all buffers, from the first rank of each axis
    update     of each parameter that an optimizer needs whole, the pieces of gradient and master
               go to its owner, which sends back the pieces of the updated master

An asynchronous schedule does the moves "once", and sums the consensus except the loss, with each of
its updates.  The first steps, and those of `check_every`, send a little more to compare ranks.

The folder of a technique has a file that makes its `Price`; prediction.py lists all.  The rows of
the states table, which every plan has, are priced here and in stored_bytes.py.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from shardwise.comm.ledger import Key
from shardwise.core.layouts.layout import P, Placement, R, S, between, price, sums_by_gathering
from shardwise.core.layouts.layouts import norm_axes
from shardwise.core.layouts.param_layout import AxisLayout
from shardwise.core.mesh import PIPELINE, TENSOR
from shardwise.core.model_spec import ModelShape, ModelSpec, Operation, ParamShape
from shardwise.core.plan.plan import Plan
from shardwise.core.schedule.library import updates
from shardwise.core.zero import Moment, RowMove, Tier
from shardwise.prediction.stored_bytes import (
    ADAM,
    Group,
    OptimizerShape,
    groups,
    layout_of,
    master_bytes,
    owners_of,
)

CONSENSUS_BYTES = 8  # added as doubles: a count of tokens must not be rounded


class Counted(dict[Key, int]):
    """Bytes by line, and the messages that they are in."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: Counter[Key] = Counter()

    def add(self, other: "Counted", times: int) -> None:
        for line, sent_bytes in other.items() if times else ():
            self[line] = self.get(line, 0) + times * sent_bytes
            self.messages[line] += times * other.messages[line]


class Tariff:
    """The data axes of a plan, seen from one rank, and the bytes sent along them so far."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.sent_bytes = plan, rank, Counted()
        self.shard, self.replicate = plan.shard_axis or "none", plan.replicate_axis or "none"
        self.coordinates = plan.coordinate(rank)

    def size(self, axis: str) -> int:
        return self.plan.size_of(axis)

    def move(
        self, axis: str, src: Placement, dst: Placement, numel: int, element_bytes: int, phase: str
    ) -> None:
        step = price(src, dst, numel, self.size(axis))
        self.add(Key(axis, step.what, phase), round(step.sent) * element_bytes)

    def carry(self, group: Group, move: RowMove, phase: str, times: int = 1) -> None:
        """Moves of a group: between ranks, or between the tiers of this one."""
        one = Tariff(self.plan, self.rank) if times != 1 else self
        one._carry(group, move, phase)
        if one is not self:
            self.sent_bytes.add(one.sent_bytes, times)

    def _carry(self, group: Group, move: RowMove, phase: str) -> None:
        axis = group.layout.shard if move.axis == "shard" else group.layout.replicate
        numel = group.flat.share if move.block else group.flat.padded
        if move.between_tiers:
            self.copy(move.src_tier, move.dst_tier, numel * group.element_bytes, phase)
        else:
            self.move(axis, move.src, move.dst, numel, group.element_bytes, phase)

    def group(self, axis: str, on: AxisLayout) -> int:
        return len(on.group(self.coordinates.get(axis, 0)))

    def sum_parts(self, axis: str, numel: int, ranks: int, element_bytes: int) -> None:
        step = price(P, R, numel, ranks)
        self.add(Key(axis, step.what, "backward"), round(step.sent) * element_bytes)

    def ask(self, axis: str, ranks: int) -> None:
        """One number from each of `ranks` ranks of the axis, gathered by all of them."""
        step = price(S(0), R, ranks, ranks)
        self.add(Key(axis, step.what, "check"), round(step.sent) * CONSENSUS_BYTES)

    def send(self, element_bytes: int, numel: int, phase: str) -> None:
        self.add(Key(PIPELINE, "send", phase), numel * element_bytes)

    def broadcast(self, stored_bytes: int, phase: str) -> None:
        """The first rank of each data axis sends `stored_bytes` bytes to each of the others."""
        for axis in (self.shard, self.replicate):
            others = self.size(axis) - 1 if self.coordinates.get(axis, 0) == 0 else 0
            self.add(Key(axis, "broadcast", phase), stored_bytes * others)

    def agree(self, numbers: int, number_bytes: int) -> None:
        """Every rank sums a few numbers with all others, one axis after another."""
        for axis in (self.shard, self.replicate):
            ranks = self.size(axis)
            if sums_by_gathering(ranks, numbers * number_bytes):
                self.move(axis, S(0), R, numbers * ranks, number_bytes, "check")
            else:
                self.move(axis, P, R, numbers, number_bytes, "check")

    def copy(self, src: Tier, dst: Tier, stored_bytes: int, phase: str) -> None:
        self.add(Key("tier", between(src, dst), phase), stored_bytes)

    def add(self, line: Key, sent_bytes: int) -> None:
        if sent_bytes:
            self.sent_bytes[line] = self.sent_bytes.get(line, 0) + sent_bytes
            self.sent_bytes.messages[line] += 1


def step_bytes(
    plan: Plan,
    model: ModelShape,
    rank: int = 0,
    *,
    norm: bool = False,
    buffers: bool = True,
    optimizer: OptimizerShape = ADAM,
) -> Counted:
    """The bytes `rank` sends in one step, activations apart; lines without any are left out.
    `norm`: gradients are clipped (fp16 always computes their norm); `buffers`: it begins with rank
    0's buffers.
    """
    tariff = Tariff(plan, rank)
    own = updates(plan.pipeline, plan.mesh.size_of(PIPELINE))
    found = groups(plan, model)
    for group in found:
        carry_row(tariff, group, max(1, own))
    tariff.sent_bytes.add(owner_bytes(plan, found, optimizer, rank), max(1, own))
    for param in [p for p in model.params if p.trainable]:
        _shared(tariff, param)
    tariff.agree(2 * max(1, own), CONSENSUS_BYTES)  # tokens, and microbatches with tokens
    for _ in range(own):  # whether all is finite, and which parameters had a gradient
        tariff.agree(1 + sum(param.trainable for param in model.params), CONSENSUS_BYTES)
        tariff.move(TENSOR, S(0), R, tariff.size(TENSOR), CONSENSUS_BYTES, "check")
    _buffers(tariff, model, "forward", sent=buffers)
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
    return tariff.sent_bytes


def owner_bytes(
    plan: Plan, found: Sequence[Group], optimizer: OptimizerShape, rank: int
) -> Counted:
    """What `rank` sends in an update of parameters with owners: a message per element type."""
    tariff, owned = Tariff(plan, rank), owners_of(found, optimizer)
    sizes: dict[tuple[str, str], list[int]] = {}
    for group in found:
        for index, param in enumerate(group.params):
            if param.name not in owned:
                continue
            here = tariff.coordinates.get(group.layout.shard, 0)
            start, stop = group.flat.piece(index, here)
            sent = sizes.setdefault((group.layout.shard, param.dtype), [0, 0, 0])
            if owned[param.name] == here:
                sent[2] += (param.numel - (stop - start)) * master_bytes(group)
            else:
                sent[0] += (stop - start) * param.element_bytes
                sent[1] += (stop - start) * master_bytes(group)
    for (axis, _), each in sizes.items():
        for sent_bytes in each:
            tariff.add(Key(axis, "all_to_all", "update"), sent_bytes)
    return tariff.sent_bytes


def _buffers(tariff: Tariff, model: ModelShape, phase: str, *, sent: bool = True) -> None:
    tariff.broadcast(sum(buffer.stored_bytes for buffer in model.buffers) * sent, phase)


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
    """The row's moves in a step except a disk's (offload/price.py), and sums on other axes."""
    for move in group.moves:
        times = {} if move.of_disk else phases(tariff.plan, group, move.moment, updates)
        for phase, count in times.items():
            tariff.carry(group, move, phase, count)
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


# --- the price of a technique ---------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What one rank carries out of a plan in a step."""

    plan: Plan
    spec: ModelSpec
    model: ModelShape
    rank: int
    optimizer: OptimizerShape


@dataclass(frozen=True)
class Price:
    """The costs of a technique for a rank; a plan without the technique costs nothing.

    sends    bytes in a step
    stores   bytes on a tier between steps, by category
    spends   the operations of one pass of the model beside those of the plain one
    """

    sends: Callable[[Share], Counted]
    stores: Callable[[Share, Tier], Mapping[str, int]] = lambda _share, _tier: {}
    spends: Callable[[Share], Iterable[Operation]] = lambda _: ()
