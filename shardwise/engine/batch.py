"""Batches: counting rows, splitting into microbatches, and a stand-in for a rank without rows."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.core.errors import bad

#: Rows of a stand-in: batch normalisation needs more than one.
STAND_IN_ROWS = 2


def rows(batch: Any) -> int:
    """The number of rows of a batch: dim 0 of its tensors.

    Raises:
        InputError: no tensor in it has rows.
    """
    found = next((len(x) for x in tree_leaves(batch) if _has_rows(x)), None)
    if found is None:
        raise bad(
            f"a batch without a tensor that has rows ({type(batch).__name__})",
            "tensors in nested tuples, lists and dicts, whose dim 0 are the rows",
            "dict(batch) for a dict-like object, torch.as_tensor(batch) for an array, or "
            "tokens=, a function that counts the tokens of a batch",
        )
    return found


def split(batch: Any, parts: int, word: str = "") -> list[Any]:
    """Split `batch` along dim 0 into `parts` microbatches; the first ones are larger if uneven.

    With fewer rows than microbatches the last ones are empty.  0-d tensors and other values go to
    every part.  `word` is the plan word that asked for the split, for the error.

    Raises:
        InputError: tensors with different numbers of rows, or no tensor with rows.
    """
    if parts == 1:
        return [batch]
    tensors = [x for x in tree_leaves(batch) if _has_rows(x)]
    found = sorted({len(x) for x in tensors})
    word = word or f"accumulate:{parts}"
    if not found:
        raise bad(
            f"a batch without a tensor that has rows ({_what(batch)}) under {word}",
            "tensors in nested tuples, lists and dicts, to split along dim 0",
            "torch.as_tensor(batch) for an array, with one row per sample",
        )
    if len(found) != 1:
        raise bad(
            f"a batch with tensors of {found} rows under {word}",
            "tensors that all have the same number of rows",
            "one row per sample in every tensor",
        )
    cut = [torch.tensor_split(x, parts) for x in tensors]
    out = []
    for k in range(parts):
        pieces = iter([c[k] for c in cut])
        out.append(tree_map(lambda x, it=pieces: next(it) if _has_rows(x) else x, batch))
    return out


def enough(batch: Any, microbatches: int) -> None:
    """Raise InputError if a rank's batch has rows, but fewer than the schedule has microbatches."""
    found = max((len(x) for x in tree_leaves(batch) if _has_rows(x)), default=0)
    if 0 < found < microbatches:
        raise bad(
            f"a share of {found} rows for {microbatches} microbatches",
            "at least one row per microbatch on every data rank, or no rows",
            f"a batch of {microbatches} rows for each data rank, or fewer microbatches: "
            f"1f1b:{found}",
        )


def filled(batch: Any) -> Any:
    """`batch`, or zeros in its place if it has no rows; they count with weight zero.

    A rank without data must still join every collective of the step.
    """
    if not any(_has_rows(x) for x in tree_leaves(batch)) or rows(batch):
        return batch
    return tree_map(
        lambda x: x.new_zeros((STAND_IN_ROWS, *x.shape[1:])) if _has_rows(x) else x, batch
    )


def cast(batch: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors of the batch to the precision of the model."""
    if dtype is None:
        return batch
    return tree_map(
        lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, batch
    )


def _what(batch: Any) -> str:
    shape = f" of shape {list(batch.shape)}" if isinstance(batch, Tensor) else ""
    return f"{type(batch).__name__}{shape}"


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0
