"""This file is the schedule: for every rank, the ordered list of what that rank does.

    1F1B, 3 ranks, 4 microbatches                           home = (0, 1, 2)
    rank 0   F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3        stage 0 is at home on rank 0
    rank 1   F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3
    rank 2   F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3

A schedule says the order and nothing else: when things happen follows from what the actions need
of one another (relation.py). Written out for a machine it also holds its transfers (lower.py).

Weights. A synchronous schedule (`update` 0) leaves the update to whoever runs it, after the last
action. An asynchronous one updates every `update` microbatches, with U; microbatch i then uses on
stage s, forward and backward, the weights after max(0, i // update - lag[s]) updates. PipeDream's
stashing, its vertical sync and the two buffers of 2BW are three values of `lag`
(weight_stashing.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shardwise.core.schedule.action import COMPUTE_OPS, Action, Step


@dataclass(frozen=True)
class Schedule:
    """`rows[rank]` is the order of that rank; `home[stage]` is the rank that owns a stage."""

    rows: tuple[tuple[Step, ...], ...]
    home: tuple[int, ...]
    microbatches: int
    update: int = 0
    lag: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """How many ranks have a row."""
        return len(self.rows)

    @property
    def last_stage(self) -> int:
        """The stage that computes the loss."""
        return len(self.home) - 1

    @cached_property
    def gathers(self) -> bool:
        """Parameters are gathered and freed around their use (zero3)."""
        return any(step.op == "GATHER" for row in self.rows for step in row)

    @cached_property
    def lowered(self) -> bool:
        """The rows hold what a machine needs besides computing: transfers, reductions, gathers."""
        known = (*COMPUTE_OPS, "U")
        return any(step.op not in known for row in self.rows for step in row)

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages a rank owns, along the model."""
        return tuple(stage for stage, owner in enumerate(self.home) if owner == rank)

    def version(self, stage: int, microbatch: int) -> int:
        """How many updates the weights have seen that this microbatch uses on this stage."""
        return max(0, microbatch // self.update - self.lag[stage]) if self.update else 0

    def actions(self, rank: int) -> Iterator[Action]:
        """What a rank does, its transfers left out."""
        return (step for step in self.rows[rank] if isinstance(step, Action))
