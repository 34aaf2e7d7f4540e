"""Flat parameters as numbers.

A unit has one group for each pair of element type and trainability.  A group that is neither
trained nor sharded never changes, so it is not split into blocks.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from shardwise.core.layouts.flatten import Flattening, flatten
from shardwise.core.layouts.param_layout import Layout
from shardwise.core.model_spec import ModelShape, ParamShape, UnitShape
from shardwise.core.plan.plan import Plan
from shardwise.core.zero import Row, RowMoves


@dataclass(frozen=True)
class Group:
    """Parameters of one element type and layout, all trained or all frozen.
    `moves` are the row's in a step; over `shard` ranks the parameters are split.
    """

    unit: UnitShape
    params: tuple[ParamShape, ...]
    layout: Layout
    moves: RowMoves
    shard: int

    @property
    def row(self) -> Row:
        return self.layout.row

    @property
    def trained(self) -> bool:
        return self.params[0].trainable

    @property
    def element_bytes(self) -> int:
        return self.params[0].element_bytes

    @cached_property
    def flat(self) -> Flattening:
        return flatten([param.numel for param in self.params], self.element_bytes, self.shard)


def groups(plan: Plan, model: ModelShape) -> list[Group]:
    """The groups of every unit, in order."""
    found: list[Group] = []
    for unit in model.units:
        by_layout: dict[Hashable, list[ParamShape]] = {}
        for param in unit.params:
            layout = layout_of(plan, param)
            alone = param.name if layout.tied else ""
            key = param.dtype, param.trainable, layout.kind, alone
            by_layout.setdefault(key, []).append(param)
        for params in by_layout.values():
            layout = layout_of(plan, params[0])
            shard, replicate = plan.size_of(layout.shard), plan.size_of(layout.replicate)
            moves = layout.row.moves(shard, replicate, trained=params[0].trainable)
            found.append(Group(unit, tuple(params), layout, moves, shard if moves.split else 1))
    return found


def layout_of(plan: Plan, param: ParamShape) -> Layout:
    """The parameter's own layout, or that of the plan's row."""
    axes = plan.shard_axis or "none", plan.replicate_axis or "none"
    return param.layout or Layout(plan.states, *axes)
