"""The proof of `experts:independent`: each expert as its own model, on the samples of its share.

    row of the global batch    0  1  2  3  4  5       expert of each sample, a given assignment
    expert                     0  1  0  1  0  1

Each expert's ranks compare it with one process that trains this expert alone. Gradients of another
expert's samples would show as a difference, and no byte may leave the ranks of an expert.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.comm.world import World
from shardwise.core.plan import Plan
from shardwise.models.trainable import Trainable
from shardwise.verify.finding import Finding


def share_of_expert(trainable: Trainable, plan: Plan, world: World) -> Trainable:
    """The model with the batches of the expert of `world`; unchanged without independent experts.

    A batch of `rows` rows is the share of a batch of all experts, `rows` for each.
    """
    expert = world.expert
    if expert is None:
        return trainable

    def make_batch(rows: int, seed: int) -> Any:
        whole = trainable.make_batch(rows * plan.ep, seed)
        return pytree.tree_map_only(Tensor, lambda x: x[expert :: plan.ep].contiguous(), whole)

    return replace(trainable, make_batch=make_batch)


def with_bytes_between(found: Finding, world: World) -> Finding:
    """The results of a rank of all of `world`, with the bytes that its ledger counted.

    The axes of an expert count in a ledger of their own, and reach its own ranks alone.
    """
    sent, line = world.ledger.sent_bytes(), "ep, between experts"
    costs = replace(
        found.costs,
        theory=found.costs.theory | {line: 0},
        counted=found.costs.counted | {line: sent},
        hold=found.costs.hold and sent == 0,
    )
    return replace(found, rank=world.rank, costs=costs)
