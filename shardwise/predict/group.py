"""This file is the flat group as numbers: how a plan keeps the parameters that are laid end to end.

A unit holds one group for each pair of element type and trainability. What is neither trained nor
kept sharded is the same on every rank for good, so it is not split.
"""

from dataclasses import dataclass

from shardwise.core.flatten import Flattening, flatten
from shardwise.core.model_spec import ModelShape, ParamShape, UnitShape
from shardwise.core.plan import Plan
from shardwise.core.zero import Row, row_of


@dataclass(frozen=True)
class Group:
    """Parameters of one element type, all trained or all frozen, under a row of the table.

    Tensor ranks hold all of them in one way, too.

    `shard` is the number of ranks over which they are split: 1 where they are not.
    """

    unit: UnitShape
    params: tuple[ParamShape, ...]
    row: Row
    shard: int

    @property
    def trained(self) -> bool:
        """Whether there are gradients for it."""
        return self.params[0].trainable

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return self.params[0].element_bytes

    @property
    def flat(self) -> Flattening:
        """Where each parameter lies, padding included."""
        return flatten([param.numel for param in self.params], self.element_bytes, self.shard)


def groups(plan: Plan, model: ModelShape) -> list[Group]:
    """The groups of every unit, in order."""
    row, ranks = row_of(plan.row), plan.mesh.size_of(plan.shard_axis or "none")
    found: list[Group] = []
    for unit in model.units:
        alike: dict[tuple[str, bool, str], list[ParamShape]] = {}
        for param in unit.params:
            alike.setdefault((param.dtype, param.trainable, param.kept), []).append(param)
        for (_, trained, _), params in alike.items():
            split = trained or row.param.kind == "S"
            found.append(Group(unit, tuple(params), row, ranks if split else 1))
    return found
