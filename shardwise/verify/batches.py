"""The global batches of a proof, and how they are divided.

    rows of the global batch    0 1 2 | 3 4        5 rows on 2 data ranks
                                0 1 2 3 |          4 rows on 2 data ranks, of which one is idle

The first ranks have one row more if the rows are uneven; idle ranks, the last ones, have none.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.core.plan import Plan
from shardwise.engine.batch import rows, split
from shardwise.engine.engine import Engine
from shardwise.parallel.redistribute.exchange import Counts

SEED: Final = 20260
#: Rows of a microbatch; in 16 bits, where more rows are needed, of all microbatches of a rank.
ROWS, ROWS_16 = 2, 8
#: The step, of every four, in which the last data rank has no rows.
IDLE_STEP: Final = 1


@dataclass(frozen=True)
class Division:
    """The division of the batches of a step: among data ranks, of which `idle` have no rows."""

    ranks: int
    microbatches: int
    idle: int = 0

    @classmethod
    def of(cls, engine: Engine, step: int | None = None) -> "Division":
        """The division of an engine's batches; in one of the steps a rank is idle."""
        ranks = engine.data_ranks
        idle = step is not None and step % 4 == IDLE_STEP and may_idle(engine.plan, ranks)
        return cls(ranks, engine.microbatches, int(idle))

    def sizes(self, count: int) -> list[int]:
        """The rows of each data rank, of so many."""
        busy = torch.empty(count, device="meta").tensor_split(self.ranks - self.idle)
        return [*map(len, busy), *[0] * self.idle]

    def share(self, whole: Any, rank: int) -> Any:
        """The rows of a data rank of a global batch."""
        busy = self.ranks - self.idle
        if rank < busy:
            return split(whole, busy, f"{busy} data ranks")[rank]
        return pytree.tree_map_only(Tensor, lambda x: x[:0] if x.dim() else x, whole)

    def counts(self, whole: Any) -> list[Counts]:
        """The rows of each data rank in each microbatch of a global batch."""
        shares = [torch.empty(size, device="meta") for size in self.sizes(rows(whole))]
        by_rank = [[len(x) for x in share.tensor_split(self.microbatches)] for share in shares]
        return list(zip(*by_rank, strict=True))


def may_idle(plan: Plan, ranks: int) -> bool:
    """Whether a data rank may have no rows in a proof.

    Layers with a mesh of their own exchange rows between ranks: there all have some.
    """
    return ranks > 1 and not any(each.has_axes for each in plan.layers)


def rows_of_step(plan: Plan, division: Division, step: int) -> int:
    """The rows of the global batch of a step; in every second step they are uneven."""
    fewest = ROWS_16 if plan.precision in ("bf16", "fp16") else ROWS
    # a rank with one row would exchange which of its tensors have rows (redistribute/hooks.py)
    least = ROWS + any(each.has_axes for each in plan.layers)
    each = max(least, fewest // division.microbatches)
    return each * (division.ranks - division.idle) * division.microbatches - (step % 2 == 0)
