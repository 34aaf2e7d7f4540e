"""States on a disk (`offload:optim@disk`): the bytes held there, and those moved in a step.

Of each group with B elements in this rank's block, the file has a gradient in the precision of the
weight, a master, and the states of the optimizer in the precision of the master. Each begins a new
block of the file, and is moved in whole blocks of it: A(x) is x bytes rounded up.

    held        gradient B, master B, each state B; on the host the buffers, whatever the model
    written     gradient A(B), in backward; master and each state A(B), in the update
    read        the same, in the update

The moves are those of the row (core/zero.py).
"""

from collections.abc import Iterator

from shardwise.core.chunks import aligned, reserved_bytes
from shardwise.core.model_spec import ModelShape
from shardwise.core.plan import Plan
from shardwise.core.zero import RowMove
from shardwise.prediction.group import Group, groups
from shardwise.prediction.memory import HALF, MASTER_BYTES, OptimizerShape
from shardwise.prediction.traffic import Line, Tariff


def disk_bytes(plan: Plan, model: ModelShape, optimizer: OptimizerShape) -> dict[str, int]:
    """The bytes of a rank's file by category, without the padding of its blocks."""
    found = list(_on_disk(plan, model))
    return {
        "parameters": 0,
        "gradients": sum(group.flat.share * group.element_bytes for group in found),
        "optimizer": sum((1 + optimizer.states) * _master_bytes(group) for group in found),
        "buffers": 0,
    }


def buffer_bytes(plan: Plan, model: ModelShape, optimizer: OptimizerShape) -> int:
    """The host memory through which a rank's file is streamed."""
    widest = max((_element_bytes(group) for group in _on_disk(plan, model)), default=0)
    return reserved_bytes(optimizer.states, widest) if widest else 0


def moved_bytes(
    plan: Plan, model: ModelShape, optimizer: OptimizerShape, rank: int
) -> dict[Line, int]:
    """The bytes that `rank` reads and writes in a step."""
    tariff = Tariff(plan, rank)
    for group in _on_disk(plan, model):
        for move in group.row.moves():
            if "disk" in (move.src_tier, move.dst_tier):
                moved = _moved(move, group, optimizer)
                tariff.copy(move.src_tier, move.dst_tier, moved, _phase(move))
    return tariff.sent_bytes


def stored_bytes(plan: Plan, model: ModelShape, rank: int) -> dict[Line, int]:
    """The bytes that `rank` writes before the first step: the masters."""
    tariff = Tariff(plan, rank)
    for group in _on_disk(plan, model):
        tariff.copy("host", "disk", aligned(_master_bytes(group)), "start")
    return tariff.sent_bytes


def _on_disk(plan: Plan, model: ModelShape) -> Iterator[Group]:
    return (g for g in groups(plan, model) if g.trained and g.row.optim_tier == "disk")


def _phase(move: RowMove) -> str:
    """A gradient is written while the backward pass runs; the rest belongs to the update."""
    return "backward" if (move.state, move.dst_tier) == ("grad", "disk") else "update"


def _moved(move: RowMove, group: Group, optimizer: OptimizerShape) -> int:
    if move.state == "grad":
        return aligned(group.flat.share * group.element_bytes)
    return (1 + optimizer.states) * aligned(_master_bytes(group))


def _element_bytes(group: Group) -> int:
    return MASTER_BYTES if group.params[0].dtype in HALF else group.element_bytes


def _master_bytes(group: Group) -> int:
    return group.flat.share * _element_bytes(group)
