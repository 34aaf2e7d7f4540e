"""Sabotages of context parallelism: positions, blocks of the ring, heads, and the loss."""

from typing import Any

import torch
from torch import Tensor

from shardwise.techniques.context import block, cut_batch, ulysses
from shardwise.techniques.context.apply import PositionShards
from shardwise.techniques.context.cut_batch import Sequences
from shardwise.techniques.context.ring import Ring
from tests.verify.mutations.mutation import Mutation, Patch, around


def the_first_positions(patch: Patch) -> None:
    """Every rank rotates as if it had the first positions."""

    def positions(of: Sequences, device: torch.device) -> Tensor:
        return torch.arange(of.numel, dtype=torch.int64, device=device)

    patch.setattr(Sequences, "positions", positions)


def a_block_left_out(patch: Patch) -> None:
    """Queries do not see the keys of the next rank."""

    def part(real: Any, ring: Ring, q: Tensor, mask: Any, source: int) -> Any:
        after = (ring.axis.rank + 1) % ring.axis.size
        return None if source == after else real(ring, q, mask, source)

    around(patch, Ring, "part", part)


def blocks_added_without_weights(patch: Patch) -> None:
    """The results of two blocks are added as if their sums of exponentials were equal."""

    def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
        first = lse.isneginf().all()
        out.copy_(more if first else (out + more) / 2)
        lse.copy_(torch.logaddexp(lse, more_lse))

    patch.setattr(block, "merge", merge)


def gradients_of_keys_dropped(patch: Patch) -> None:
    """What other ranks add to the gradients of keys and values does not arrive."""

    def backward(real: Any, *args: Any, **how: Any) -> Any:
        dq, dk, dv = real(*args, **how)
        return dq, dk * how["causal"], dv

    around(patch, block, "backward", backward)


def ranks_weigh_the_same(patch: Patch) -> None:
    """The mean of a rank's own labels weighs as much as that of a rank with more of them."""
    patch.setattr(PositionShards, "weight", lambda _, count, *__: count)


def another_rank_s_positions(patch: Patch) -> None:
    """Ranks have each other's positions of the batch, and not of the rotation."""

    def shard(real: Any, x: Tensor, cut: Any, rank: int, dim: int) -> Tensor:
        return real(x, cut, (rank + 1) % cut.ranks, dim)

    around(patch, cut_batch, "shard", shard)


def heads_in_another_order(patch: Patch) -> None:
    """The output's heads come back in another order."""
    around(
        patch,
        ulysses,
        "_to_positions",
        lambda real, *args: real(*args).flip(1),
    )


MUTATIONS = (
    Mutation("the first positions on every rank", "cp2", "parity", the_first_positions, "gpt"),
    Mutation("a block of the ring left out", "cp2", "parity", a_block_left_out, "gpt"),
    Mutation("blocks without weights", "cp2", "parity", blocks_added_without_weights, "gpt"),
    Mutation("gradients of keys dropped", "cp2", "parity", gradients_of_keys_dropped, "gpt"),
    Mutation(
        "ranks with more positions weigh the same", "cp2", "parity", ranks_weigh_the_same, "gpt"
    ),
    Mutation("another rank's positions", "cp2", "error", another_rank_s_positions, "gpt"),
    Mutation("heads in another order", "cp2:ulysses", "parity", heads_in_another_order, "gpt"),
)
