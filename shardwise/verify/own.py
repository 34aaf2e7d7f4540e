"""The proof of a model that is defined in Python: a function that builds it, batches and a loss."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.core.errors import bad
from shardwise.core.tools.arguments import short_repr
from shardwise.models import user
from shardwise.models.registry import find
from shardwise.models.trainable import Loss, Trainable


def model_of(
    build: Callable[[], Any] | str,
    batch: Any,
    loss: Loss | None,
    tokens: Callable[[Any], int] | None,
) -> Trainable | str:
    """The model that sw.verify was given. Raises InputError for arguments that give none."""
    made = batch if batch is None or callable(batch) else partial(_rows_of, batch)
    if isinstance(build, str):
        if batch is None and loss is None and tokens is None:
            return build
        found = find(build)
        changes = {"make_batch": made, "loss": loss, "tokens": tokens}
        return replace(found, **{name: x for name, x in changes.items() if x is not None})
    if isinstance(build, nn.Module) or not callable(build):
        raise bad(
            f"a {type(build).__name__} ({short_repr(build)}) as the model of sw.verify",
            "a function without arguments that returns the model, because the model is built "
            "several times; or a name, as in shardwise verify --model",
            "def build(): return Net(), then sw.verify(build, ...)",
        )
    name = getattr(build, "__qualname__", type(build).__name__)
    return replace(user.of_function(name, build, loss=loss, make_batch=made), tokens=tokens)


def _rows_of(batch: Any, count: int, seed: int) -> Any:
    """`count` rows of an example batch in a random order; each row as often as the others."""
    lengths = {len(x) for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.dim()}
    own = lengths.pop() if len(lengths) == 1 else 0
    if own == 0:
        raise bad(
            "batch=, an example batch whose tensors have no rows, or different numbers of rows",
            "tensors with one entry in dim 0 for each row; or a function of (rows, seed) that "
            "makes a batch",
            "batch={'inputs': x, 'targets': y}, or batch=make_batch",
        )
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(own, generator=generator) for _ in range(-(-count // own))]
    order = torch.cat(orders)[:count]
    return pytree.tree_map_only(Tensor, lambda x: x[order.to(x.device)] if x.dim() else x, batch)
