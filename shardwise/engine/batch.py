"""this file is how a batch is split into microbatches, and what a rank without rows does."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.core.errors import bad


def rows(batch: Any) -> int:
    """How many rows a batch has: dim 0 of its tensors, 0 for a stand-in."""
    return next((len(x) for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim()), 0)


def split(batch: Any, parts: int) -> list[Any]:
    """`batch` in `parts` microbatches along dim 0, the first ones larger where it is uneven.

    Raises:
        InputError: tensors that disagree on the number of rows, or fewer rows than microbatches.
    """
    if parts == 1:
        return [batch]
    tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    found = {len(x) if x.dim() else 0 for x in tensors}
    if len(found) != 1 or min(found) < parts:
        raise bad(
            f"a batch of {sorted(found)} rows on this rank under accumulate:{parts}",
            "tensors with the same number of rows, at least one a microbatch",
            f"accumulate:{max(1, min(found, default=1))}",
        )
    cut = [torch.tensor_split(x, parts) for x in tensors]
    out = []
    for k in range(parts):
        pieces = iter([c[k] for c in cut])
        out.append(tree_map(lambda x, it=pieces: next(it) if isinstance(x, Tensor) else x, batch))
    return out


def cast(batch: Any, dtype: torch.dtype | None) -> Any:
    """Floating-point tensors of the batch in the precision the model computes in."""
    if dtype is None:
        return batch
    return tree_map(
        lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, batch
    )
