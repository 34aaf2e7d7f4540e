"""The outputs of a model for a few rows, in one process as on a data rank.

Every data rank gets the same rows. Layers of experts count the tokens of all of them, rank 0's
first, so a capacity drops other choices of each copy. One process computes the copies too, and a
rank compares its own:

    rows          0 1                     rank 0      rank 1
    one process   0 1 0 1    compared:    0 1 . .     . . 0 1
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.techniques.expert.apply import experts_in
from shardwise.verify.oracles.async_oracle import AsyncOracle
from shardwise.verify.oracles.oracle import Oracle


def expected_outputs(oracle: Oracle | AsyncOracle, batch: Any, ranks: int, rank: int) -> Tensor:
    """The oracle's outputs for the copy of `batch` of data rank `rank`."""
    if not experts_in(oracle.model):
        return oracle.evaluate(lambda model: returned(oracle, model, batch))

    def copied(x: Tensor) -> Tensor:
        return torch.cat([x] * ranks) if x.dim() else x

    every = pytree.tree_map_only(Tensor, copied, batch)
    found = oracle.evaluate(lambda model: returned(oracle, model, every))
    return found.tensor_split(ranks)[rank].clone() if found.dim() else found


def returned(oracle: Oracle | AsyncOracle, model: nn.Module, batch: Any) -> Tensor:
    """The first tensor that `model` returns in its loss; the loss itself if there is none."""
    seen: list[Tensor] = []

    def note(_module: nn.Module, _args: Any, found: Any) -> None:
        found = getattr(found, "logits", found)
        leaves = pytree.tree_leaves(found)
        seen.extend(x for x in leaves if isinstance(x, Tensor) and x.is_floating_point())

    handle = model.register_forward_hook(note)
    try:
        loss = oracle.task.loss_of(model, batch, oracle.dtype)
    finally:
        handle.remove()
    return seen[0] if seen else loss
