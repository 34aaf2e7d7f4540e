"""The data-parallel family as a table: how ranks keep what they train.

    row      param  grad  optim     a step sends (N parameters)       bytes a parameter, 2 + 2 + 12
    ddp        R      P     R       2 N (n-1)/n                       16
    zero1      R      P     S       2 N (n-1)/n                       4 + 12/n
    zero2      R      S     S       2 N (n-1)/n                       2 + 14/n
    zero3      S      S     S       3 N (n-1)/n                       16/n

The right half is not written anywhere: it is derived from the left by the prices in `moves`.
Between uses a parameter rests in its column; to be used it must be R; a backward pass makes a
gradient in P; the update needs gradient and parameter where the optimizer's state is.

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, figure 1 and section 7.
"""

from dataclasses import dataclass
from typing import Final

from shardwise.core.layout import P, Placement, R, S
from shardwise.core.moves import Move, price


@dataclass(frozen=True)
class Row:
    """Where data-parallel ranks keep a parameter, its growing gradient, its optimizer state."""

    param: Placement
    grad: Placement
    optim: Placement


ROWS: dict[str, Row] = {
    "ddp": Row(param=R, grad=P, optim=R),
    "zero1": Row(param=R, grad=P, optim=S(0)),
    "zero2": Row(param=R, grad=S(0), optim=S(0)),
    "zero3": Row(param=S(0), grad=S(0), optim=S(0)),
}

#: Other names people know the rows by.
ALIASES: dict[str, str] = {"fsdp": "zero3"}


def step_moves(row: Row, numel: int, n: int, microbatches: int = 1) -> list[Move]:
    """Every move that one step makes for one parameter of `numel` elements on an axis of n ranks.

    In the order of the step, for `microbatches` backward passes; a `keep` is no move and is left
    out, so a list of one rank is empty.
    """
    use = price(row.param, R, numel, n)  # before the forward pass, and again before the backward
    collect = price(P, row.grad, numel, n)  # each backward pass makes a partial sum
    settle = price(row.grad, row.optim, numel, n)  # before the update
    publish = price(row.optim, row.param, numel, n)  # after it
    per_microbatch = [use, use, collect] * microbatches
    return [m for m in [*per_microbatch, settle, publish] if m.what != "keep"]


def hybrid_moves(
    row: Row, numel: int, shard: int, replicate: int, microbatches: int = 1
) -> tuple[list[Move], list[Move]]:
    """The moves of one step where `replicate` groups of `shard` ranks each keep a whole copy.

    Hybrid sharding is a row for each axis: `row` inside the group, and `ddp` between the groups
    for the block that each rank holds. The first list is of the shard axis, the second of the
    replicate axis. `shard=1` is plain replication, `replicate=1` plain sharding; `numel` must be
    a multiple of `shard` (padding included). FSDP (arXiv 2304.11277), section 3.2.2.
    """
    inside = step_moves(row, numel, shard, microbatches)
    return inside, step_moves(ROWS["ddp"], numel // shard, replicate)


#: By precision, the bytes of a parameter, of its gradient and of what AdamW keeps for it.
STATE_BYTES: Final = {"fp64": (8, 8, 16), "fp32": (4, 4, 8), "bf16": (2, 2, 12), "fp16": (2, 2, 12)}


def bytes_per_parameter(
    row: Row, n: int, param_bytes: float = 2, grad_bytes: float = 2, optim_bytes: float = 12
) -> float:
    """Bytes that each of n ranks stores for one parameter, padding apart.

    The defaults are mixed-precision Adam: 16-bit weight and gradient; fp32 master weight, mean
    and variance. (ZeRO, section 3.1.)
    """
    param = param_bytes * row.param.share(n)
    grad = grad_bytes * row.grad.share(n)
    return param + grad + optim_bytes * row.optim.share(n)
