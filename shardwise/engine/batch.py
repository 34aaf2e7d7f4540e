"""this file is how a batch is split into microbatches, and what a rank without rows does."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.core.errors import bad

#: Rows of a stand-in: normalisation over a batch asks for more than one.
STAND_IN_ROWS = 2


def rows(batch: Any) -> int:
    """How many rows a batch has: dim 0 of its tensors.

    Raises:
        InputError: no tensor in it has rows, so that a step would train on nothing.
    """
    found = next((len(x) for x in tree_leaves(batch) if _has_rows(x)), None)
    if found is None:
        raise bad(
            f"a batch without a tensor that has rows ({type(batch).__name__})",
            "tensors in tuples, lists and dicts, in any nesting, whose dim 0 are the rows",
            "dict(batch) of what only looks like a dict, torch.as_tensor(batch) of an array, or "
            "tokens=, a function that counts what is in a batch",
        )
    return found


def split(batch: Any, parts: int, word: str = "") -> list[Any]:
    """`batch` in `parts` microbatches along dim 0, the first ones larger where it is uneven.

    With fewer rows than microbatches the last ones have none.  Numbers (0-d) go to every part.
    `word` is what the user asked for so many with, to be named in an error.

    Raises:
        InputError: tensors that disagree on the number of rows; none that has any.
    """
    if parts == 1:
        return [batch]
    tensors = [x for x in tree_leaves(batch) if _has_rows(x)]
    found = sorted({len(x) for x in tensors})
    word = word or f"accumulate:{parts}"
    if not found:
        raise bad(
            f"a batch without a tensor that has rows ({_what(batch)}) under {word}",
            "tensors in tuples, lists and dicts, in any nesting, to be cut along dim 0",
            "torch.as_tensor(batch) of an array, with one row a sample",
        )
    if len(found) != 1:
        raise bad(
            f"a batch with tensors of {found} rows under {word}",
            "tensors that all have the same number of rows",
            "one row a sample in every tensor",
        )
    cut = [torch.tensor_split(x, parts) for x in tensors]
    out = []
    for k in range(parts):
        pieces = iter([c[k] for c in cut])
        out.append(tree_map(lambda x, it=pieces: next(it) if _has_rows(x) else x, batch))
    return out


def enough(batch: Any, microbatches: int) -> None:
    """Raise InputError where a share has rows, and fewer than the schedule has microbatches."""
    found = max((len(x) for x in tree_leaves(batch) if _has_rows(x)), default=0)
    if 0 < found < microbatches:
        raise bad(
            f"a share of {found} rows for {microbatches} microbatches",
            "a row for each microbatch on every data rank, or no row at all",
            f"a batch of {microbatches} rows for each data rank, or a schedule of {found}, as in "
            f"1f1b:{found}",
        )


def filled(batch: Any) -> Any:
    """`batch`, or where it has no rows a stand-in of zeros, to be counted with weight zero.

    A rank that runs out of data takes part in every collective of the step all the same.
    """
    if not any(_has_rows(x) for x in tree_leaves(batch)) or rows(batch):
        return batch
    return tree_map(
        lambda x: x.new_zeros((STAND_IN_ROWS, *x.shape[1:])) if _has_rows(x) else x, batch
    )


def cast(batch: Any, dtype: torch.dtype | None) -> Any:
    """Floating-point tensors of the batch in the precision the model computes in."""
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
