"""States on a disk (`offload:optim@disk`, `offload:param@disk`): bytes held, and moved.

Of each group with B elements in this rank's block, the file has a gradient in the precision of the
weight, a master, and the states of the optimizer in the precision of the master. Each begins a new
block of the file, and is moved in whole blocks of it: A(x) is x bytes rounded up.

    held        gradient B, master B, each state B; on the host the buffers, whatever the model
    written     gradient A(B), in backward; master and each state A(B), in the update
    read        the same, in the update

Parameters that rest there are held in the precision of the weight, and read as A(B) before each
use. In 32 bits and more they are the masters; in 16 the update writes A(B) more.

The moves are those of the row (core/zero.py).
"""

from collections.abc import Iterator

from shardwise.core.chunks import aligned, chunk_numel, reserved_bytes
from shardwise.core.model_spec import ModelShape
from shardwise.core.plan import Plan
from shardwise.core.zero import Moment, RowMove
from shardwise.prediction.group import Group, groups
from shardwise.prediction.memory import HALF, MASTER_BYTES, OptimizerShape
from shardwise.prediction.traffic import Line, Tariff, phases


def disk_bytes(plan: Plan, model: ModelShape, optimizer: OptimizerShape) -> dict[str, int]:
    """The bytes of a rank's file by category, without the padding of its blocks."""
    found = list(_on_disk(plan, model))
    return {
        "parameters": sum(
            group.flat.share * group.element_bytes for group in _resting(plan, model)
        ),
        "gradients": sum(group.flat.share * group.element_bytes for group in found),
        "optimizer": sum(
            (_has_master(group) + optimizer.states) * _master_bytes(group) for group in found
        ),
        "buffers": 0,
    }


def buffer_bytes(
    plan: Plan, model: ModelShape, optimizer: OptimizerShape, whole: ModelShape
) -> int:
    """The host memory through which a rank's file is streamed; `whole` is the full model."""
    found = [*_on_disk(plan, model), *_resting(plan, model)]
    widest = max(map(_element_bytes, found), default=0)
    chunk = chunk_numel(max((param.numel for param in whole.params), default=0))
    return reserved_bytes(optimizer.states, widest, chunk) if widest else 0


def moved_bytes(
    plan: Plan, model: ModelShape, optimizer: OptimizerShape, rank: int
) -> dict[Line, int]:
    """The bytes that `rank` reads and writes in a step."""
    tariff = Tariff(plan, rank)
    for group in groups(plan, model):
        for move in filter(lambda move: move.of_disk, group.moves):
            for phase, times in phases(plan, group, move.moment).items():
                moved = times * _moved(move, group, optimizer)
                tariff.copy(move.src_tier, move.dst_tier, moved, phase)
    return tariff.sent_bytes


def stored_bytes(plan: Plan, model: ModelShape, rank: int) -> dict[Line, int]:
    """The bytes that `rank` writes and reads before the first step: masters and weights."""
    tariff = Tariff(plan, rank)
    for group in _resting(plan, model):
        tariff.copy("host", "disk", _weight_bytes(group), "start")
        if group.trained and _has_master(group):  # made of the weight
            tariff.copy("disk", "host", _weight_bytes(group), "start")
    for group in _on_disk(plan, model):
        if _has_master(group):
            tariff.copy("host", "disk", aligned(_master_bytes(group)), "start")
    return tariff.sent_bytes


def _on_disk(plan: Plan, model: ModelShape) -> Iterator[Group]:
    return (group for group in groups(plan, model) if group.moves.offload == "disk")


def _resting(plan: Plan, model: ModelShape) -> Iterator[Group]:
    return (group for group in groups(plan, model) if group.moves.fetch == "disk")


def _has_master(group: Group) -> bool:
    """Whether its masters are apart from its weights."""
    return group.moves.fetch != "disk" or group.params[0].dtype in HALF


def _moved(move: RowMove, group: Group, optimizer: OptimizerShape) -> int:
    if move.state == "param" and move.moment is not Moment.USE and not _has_master(group):
        return 0  # the weight is the master, which is written with the states
    if move.state != "optim":
        return _weight_bytes(group)
    return (1 + optimizer.states) * aligned(_master_bytes(group))


def _weight_bytes(group: Group) -> int:
    return aligned(group.flat.share * group.element_bytes)


def _element_bytes(group: Group) -> int:
    return MASTER_BYTES if group.params[0].dtype in HALF else group.element_bytes


def _master_bytes(group: Group) -> int:
    return group.flat.share * _element_bytes(group)
