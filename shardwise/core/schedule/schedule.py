"""A schedule: for every rank, the ordered list of its actions.

    1F1B, 3 ranks, 4 microbatches                           home = (0, 1, 2)
    rank 0   F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3        rank 0 owns stage 0
    rank 1   F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3
    rank 2   F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3

A schedule is only an order; times follow from the dependencies of actions (relation.py). A lowered
schedule also contains transfers (lower.py).

Weights. In a synchronous schedule (`update` 0) the runtime updates after the last action. An
asynchronous one updates every `update` microbatches, with U; on stage s, microbatch i then uses,
forward and backward, the weights after max(0, i // update - lag[s]) updates. PipeDream's weight
stashing, its vertical sync and 2BW's two buffers are three values of `lag` (asynchronous.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shardwise.core.schedule.action import COMPUTE_OPS, Action, Step


@dataclass(frozen=True)
class Schedule:
    """`rows[rank]` are the actions of a rank in order; `home[stage]` is the owner of a stage."""

    rows: tuple[tuple[Step, ...], ...]
    home: tuple[int, ...]
    microbatches: int
    update: int = 0
    lag: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def last_stage(self) -> int:
        """The stage that computes the loss."""
        return len(self.home) - 1

    @cached_property
    def gathers(self) -> bool:
        """Whether parameters are gathered and freed around their use (zero3)."""
        return any(step.op == "GATHER" for row in self.rows for step in row)

    @cached_property
    def lowered(self) -> bool:
        """Whether the rows contain transfers, reductions or gathers."""
        known = (*COMPUTE_OPS, "U")
        return any(step.op not in known for row in self.rows for step in row)

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank owns, in order."""
        return tuple(stage for stage, owner in enumerate(self.home) if owner == rank)

    def version(self, stage: int, microbatch: int) -> int:
        """The version (number of updates) of the weights that a microbatch uses on a stage."""
        return max(0, microbatch // self.update - self.lag[stage]) if self.update else 0

    def actions(self, rank: int) -> Iterator[Action]:
        """The actions of a rank, without transfers."""
        return (step for step in self.rows[rank] if isinstance(step, Action))
