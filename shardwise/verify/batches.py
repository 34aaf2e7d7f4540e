"""The global batches of a proof, and how they are divided.

    rows of the global batch    0 1 2 | 3 4        5 rows on 2 data ranks
                                0 1 2 3 |          4 rows on 2 data ranks, of which one is idle

The first ranks have one row more if the rows are uneven; idle ranks, the last ones, have none.

Batches of tokens are ragged: a quarter of the targets does not count, so that rows have different
numbers of tokens, and with every other seed they are a position shorter.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.core.plan import Plan
from shardwise.engine.batch import rows, split
from shardwise.engine.engine import Engine
from shardwise.models.trainable import Trainable
from shardwise.parallel.redistribute.exchange import Counts

SEED: Final = 20260
#: Rows of a microbatch; in 16 bits, where more rows are needed, of all microbatches of a rank.
ROWS, ROWS_16 = 2, 8
#: The step, of every four, in which the last data rank has no rows.
IDLE_STEP: Final = 1
#: A target that losses of tokens ignore, and the fewest positions of a row of tokens.
IGNORED, SHORTEST = -100, 4


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
    """The rows of the global batch of a step; in every second step they are uneven.

    In the step in which a rank may be idle the others have a row too few for their microbatches.
    """
    short = plan.precision in ("bf16", "fp16")
    fewest = ROWS_16 if short else ROWS
    apart = plan.pipeline is None and not short and not any(each.has_axes for each in plan.layers)
    if step % 4 == IDLE_STEP and apart and division.microbatches > 1:
        return (division.ranks - division.idle) * (division.microbatches - 1)
    # a rank with one row would exchange which of its tensors have rows (redistribute/hooks.py)
    least = ROWS + any(each.has_axes for each in plan.layers)
    each = max(least, fewest // division.microbatches)
    return each * (division.ranks - division.idle) * division.microbatches - (step % 2 == 0)


def ragged(trainable: Trainable) -> Trainable:
    """The same model with ragged batches, if they are of tokens, some of which may be ignored."""
    few = trainable.make_batch(ROWS, SEED)
    targets = [k for k, x in enumerate(pytree.tree_leaves(few)) if _counts(trainable, few, k, x)]
    if not targets:
        return trainable
    shapes = {x.shape for x in pytree.tree_leaves(few) if isinstance(x, Tensor)}

    def make_batch(rows: int, seed: int) -> Any:
        leaves, spec = pytree.tree_flatten(trainable.make_batch(rows, seed))
        for k in targets:
            leaves[k] = _with_ignored(leaves[k], seed)
        if len(shapes) == 1 and seed % 2:
            leaves = [x[:, :-1].contiguous() if isinstance(x, Tensor) else x for x in leaves]
        return pytree.tree_unflatten(leaves, spec)

    return replace(trainable, make_batch=make_batch)


def _counts(trainable: Trainable, batch: Any, place: int, x: Any) -> bool:
    """Whether the leaf at `place` has the targets: without any of them no token is left."""
    if (
        trainable.tokens is None
        or not isinstance(x, Tensor)
        or x.dim() != 2
        or len(x[0]) < SHORTEST
    ):
        return False
    if x.is_floating_point() or x.dtype == torch.bool:
        return False
    leaves, spec = pytree.tree_flatten(batch)
    leaves[place] = torch.full_like(x, IGNORED)
    return trainable.tokens(pytree.tree_unflatten(leaves, spec)) == 0 < trainable.tokens(batch)


def _with_ignored(targets_BT: Tensor, seed: int) -> Tensor:
    """Targets of which a quarter is ignored; the first and the last one of each row are not."""
    own = torch.Generator().manual_seed(seed)
    ignored = torch.rand(targets_BT.shape, generator=own) < 1 / 4
    ignored[:, 0] = ignored[:, -2:] = False
    return targets_BT.masked_fill(ignored, IGNORED)
