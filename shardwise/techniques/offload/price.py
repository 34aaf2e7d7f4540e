"""States on the host and on a disk: bytes held, and moved.

With `offload:optim` host memory has a gradient of each group that is updated there, its masters and
the states of the optimizer; with `offload:param` all parameters too, and with
`offload:optim-delayed` two gradients.

On a disk a group with B elements in this rank's block has a gradient in the precision of the
weight, a master, and the states of the optimizer in the precision of the master. Each begins a new
block of the file, and is moved in whole blocks: A(x) is x bytes rounded up.

    held        gradient B, master B, each state B; on the host the buffers, whatever the model
    written     gradient A(B), in backward; master and each state A(B), in the update
    read        the same, in the update

Parameters that rest there are held in the precision of the weight, and read as A(B) before each
use. In 32 bits and more they are the masters; in 16 the update writes A(B) more.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from shardwise.core.chunks import aligned, chunk_numel, reserved_bytes
from shardwise.core.model_spec import ModelShape
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import Moment, RowMove, Tier
from shardwise.prediction.stored_bytes import (
    HALF,
    NOBODY,
    Group,
    OptimizerShape,
    block_bytes,
    groups,
    master_bytes,
    optimizer_bytes,
)
from shardwise.prediction.traffic import Counted, Price, Share, Tariff, phases


def host_bytes(share: Share) -> dict[str, int]:
    """The bytes of host memory that a rank holds between steps."""
    plan, optimizer = share.plan, share.optimizer
    here = plan.coordinate(share.rank)
    every = groups(plan, share.model)
    on_disk = [group for group in every if group.moves.offload == "disk"]
    found = [group for group in every if group.moves.offload == "host"]
    resting = [group for group in every if group.moves.fetch == "host"]
    delayed = plan.offloaded is not None and plan.offloaded.undelayed is not None
    idle = dict.fromkeys(share.spec.run.unused, NOBODY)
    gradients = 1 + delayed  # an update reads one while those of the next step arrive in another
    return {
        "parameters": sum(
            block_bytes(group, sharded=group.row.param.kind == "S") for group in resting
        ),
        "gradients": gradients
        * sum(block_bytes(group, sharded=group.row.sharded) for group in found),
        "optimizer": sum(
            optimizer_bytes(group, optimizer, here.get(group.layout.shard, 0), idle)
            for group in found
        )
        + sum(optimizer.scalar_bytes * len(group.params) for group in on_disk),
        "buffers": _buffer_bytes(share),
    }


def _disk_bytes(share: Share) -> dict[str, int]:
    plan, model, optimizer = share.plan, share.model, share.optimizer
    found = list(_on_disk(plan, model))
    return {
        "parameters": sum(
            group.flat.share * group.element_bytes for group in _resting(plan, model)
        ),
        "gradients": sum(group.flat.share * group.element_bytes for group in found),
        "optimizer": sum(
            (_has_master(group) + optimizer.states) * _master_bytes(group) for group in found
        ),
    }


def _buffer_bytes(share: Share) -> int:
    """The host memory through which a rank's file is streamed."""
    plan, model = share.plan, share.model
    found = [*_on_disk(plan, model), *_resting(plan, model)]
    widest = max(map(master_bytes, found), default=0)
    chunk = chunk_numel(max((param.numel for param in share.spec.shape.params), default=0))
    return reserved_bytes(share.optimizer.states, widest, chunk) if widest else 0


def _sends(share: Share) -> Counted:
    plan, tariff = share.plan, Tariff(share.plan, share.rank)
    for group in groups(plan, share.model):
        for move in filter(lambda move: move.of_disk, group.moves):
            for phase, times in phases(plan, group, move.moment).items():
                moved = times * _moved(move, group, share.optimizer)
                tariff.copy(move.src_tier, move.dst_tier, moved, phase)
    return tariff.sent_bytes


def _stores(share: Share, tier: Tier) -> Mapping[str, int]:
    stored = {"host": host_bytes, "disk": _disk_bytes}.get(tier)
    return {} if stored is None else stored(share)


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
        return aligned(group.flat.share * group.element_bytes)
    return (1 + optimizer.states) * aligned(_master_bytes(group))


def _master_bytes(group: Group) -> int:
    return group.flat.share * master_bytes(group)


OFFLOAD: Final = Price(_sends, _stores)
