"""Batches: counting rows, splitting into microbatches, and a stand-in for a rank without rows.

{"ids": [4, 5], "mask": [4, 5]}                4 rows: dim 0 of every tensor
{"images": ([3, 4, 6], [3, 5, 5]),             2 rows: the lists have 2 samples each, and the
 "targets": ({"boxes": [0, 4]},                tensors have no dim 0 in common
             {"boxes": [2, 4]})}
{"positions": [3, 4, 5], "ids": [4, 5]}        an error, which asks for `rows=` or `tokens=`
[([7], []), ([7], [])]                         an error: 2 rows (x, y), or fields of 7 rows?
[[4, 5], [4, 5]]                               4 rows in two fields, as torch's DataLoader
                                               returns them; not 2 rows, see `Rows`
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._pytree import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
)

from shardwise.comm.world import Axis, World
from shardwise.core.errors import InputError, bad
from shardwise.core.plan.plan import Plan

#: Rows of a stand-in: batch normalisation needs more than one.
STAND_IN_ROWS = 2
#: The number of tensors that an error names.
NAMED = 4
#: What a user's `rows=` is.
Count = Callable[[Any], int]

_INSTEAD = (
    "rows=lambda batch: len(batch[...]) with the tensor or the list that has one entry per row, or "
    "tokens= with the number of tokens"
)


def data_axes(world: World, plan: Plan) -> tuple[Axis, Axis]:
    """The axes among whose ranks the batch is split.

    States are sharded along the first one and replicated along the second; one may have one rank.
    """
    return world.axis(plan.shard_axis or "none"), world.axis(plan.replicate_axis or "none")


class Readings(NamedTuple):
    """The numbers of rows that a batch, or a part of it, may have; None: any number.

    plain    dim 0 of all tensors
    listed   the length of lists of samples, and dim 0 of the tensors beside them
    """

    plain: frozenset[int] | None
    listed: frozenset[int]


class RowCounter:
    """Counts the rows of batches; `count` is the user's `rows=`.

    A list of tensors with the same dim 0 is read as fields, as torch's DataLoader returns them.  A
    list of samples looks the same, but its length varies: between ranks in the first step
    (`Engine._total` compares `mark`), or between steps.  Then it is an error.
    """

    def __init__(self, count: Count | None = None) -> None:
        self.count = count
        self.lengths: tuple[int, ...] | None = None  # of the lists in the last batch of fields
        self.assumed = False  # whether these may have been lists of samples
        self.listed = False  # whether a batch consisted of lists of samples for certain

    def of(self, batch: Any) -> int:
        """The number of rows. Raises InputError if it is not certain."""
        if self.count is not None:
            return self.count(batch)
        if is_empty(batch):
            self.lengths = self.lengths or _lengths(batch)
            return 0
        found = readings(batch)
        plain, listed = found.plain or frozenset(), found.listed
        if not plain:
            if len(listed) != 1:
                raise _uncertain(batch)
            if self.assumed:
                raise _changed(batch)
            self.listed = True
            return min(listed)
        (rows,) = plain
        certain = listed <= plain  # or both readings give the same number
        if not certain and self.listed and len(listed) == 1:
            return min(listed)
        if not certain and (self.listed or not _is_of_tensors(batch)):
            raise _uncertain(batch, also=listed)
        lengths = _lengths(batch)
        if self.lengths not in (None, lengths) and (self.assumed or not certain):
            raise _changed(batch)
        self.lengths, self.assumed = lengths, self.assumed or not certain
        return rows

    @property
    def mark(self) -> tuple[int, int]:
        """A number that is equal on ranks whose lists are equally long; whether it matters."""
        if self.listed:
            return 1, 0
        return crc32(repr(self.lengths).encode()) % 2**20, int(self.assumed)


def require_counted(refused: Tensor, own: InputError | None) -> None:
    """Raise InputError if the batch of any rank was refused; `own` is this rank's error."""
    if not refused:
        return
    raise own or bad(
        f"a batch of {int(refused)} other data ranks that cannot be counted or split",
        "batches of one structure on all ranks, whose rows are certain",
        f"{_INSTEAD}; the error of that rank names its tensors",
    )


def require_equal_lists(batch: Any, marks: Tensor, ranks: int) -> None:
    """Raise InputError if lists that were read as fields are not equally long on all ranks.

    `marks` is the sum over the ranks of (mark, mark^2, whether it matters).
    """
    total, squares, matters = marks.tolist()
    if matters and ranks * squares != total**2:
        raise _changed(batch)


def rows(batch: Any, count: Count | None = None) -> int:
    """The number of rows of one batch. Raises InputError if it is not certain."""
    return RowCounter(count).of(batch)


def readings(x: Any) -> Readings:
    """The numbers of rows that `x` may have."""
    if isinstance(x, Tensor):
        return Readings(frozenset({len(x)}) if x.dim() else None, frozenset())
    inside = [readings(child) for child in _children(x)]
    parts = [part for part in inside if part.plain is not None or part.listed]
    if not parts:
        return Readings(None, frozenset())
    plain = frozenset.intersection(*(part.plain or frozenset() for part in parts))
    either = frozenset.intersection(*((part.plain or frozenset()) | part.listed for part in parts))
    listed = frozenset(n for n in either if any(n in part.listed for part in parts))
    return Readings(plain, listed | {len(x)} if _are_samples(x) else listed)


def _children(x: Any) -> Iterable[Any]:
    if isinstance(x, dict):
        return x.values()
    return x if isinstance(x, list | tuple) else ()


def _are_samples(x: Any) -> bool:
    """Whether the entries of `x` have one structure, as the samples of a batch have."""
    if not isinstance(x, list | tuple) or hasattr(x, "_fields"):
        return False
    if any(tree_structure(a) != tree_structure(b) for a, b in pairwise(x)):
        return False
    kinds = [[_kind(leaf) for leaf in tree_leaves(sample)] for sample in x]
    return all(len(set(column) - {None}) <= 1 for column in zip(*kinds, strict=True))


def _kind(x: Any) -> Any:
    """The dtype and the number of dims; None for an empty tensor, which may have another."""
    if not isinstance(x, Tensor):
        return type(x)
    return (x.dtype, x.dim()) if x.numel() else None


def _is_of_tensors(batch: Any) -> bool:
    """Whether each list of the batch has tensors only, as fields that a DataLoader returns."""
    if _are_samples(batch):
        return all(isinstance(x, Tensor) for x in batch)
    return all(_is_of_tensors(x) for x in _children(batch))


def _lengths(batch: Any) -> tuple[int, ...]:
    own = (len(batch),) if isinstance(batch, list | tuple) else ()
    return (*own, *(n for x in _children(batch) for n in _lengths(x)))


def is_empty(batch: Any, count: Count | None = None) -> bool:
    """Whether a batch has tensors, and all of its rows are missing."""
    tensors = [x for x in tree_leaves(batch) if _has_rows(x)]
    if count is not None:
        return bool(tensors) and count(batch) == 0
    return bool(tensors) and all(not x.numel() for x in tensors)


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`; those in pinned memory are copied asynchronously."""
    return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), batch)


def split(batch: Any, parts: int, word: str = "", count: Count | None = None) -> list[Any]:
    """Split `batch` along dim 0 into `parts` microbatches; the first ones are larger if uneven.

    With fewer rows than microbatches the last ones are empty.  0-d tensors and other values go to
    every part.  `word` is the plan word that asked for the split, for the error.

    Raises:
        InputError: tensors with different numbers of rows, or no tensor with rows.
    """
    if parts == 1:
        return [batch]
    word = word or f"accumulate:{parts}"
    _require_rows_in_dim_0(batch, word, count)
    cut = [torch.tensor_split(x, parts) for x in tree_leaves(batch) if _has_rows(x)]
    out = []
    for k in range(parts):
        pieces = iter([c[k] for c in cut])
        out.append(tree_map(lambda x, it=pieces: next(it) if _has_rows(x) else x, batch))
    return out


def _require_rows_in_dim_0(batch: Any, word: str, count: Count | None) -> None:
    leaves = tree_leaves(batch)
    tensors = [x for x in leaves if _has_rows(x)]
    opaque = next((x for x in leaves if _hides_tensors(x)), None)
    if not tensors or opaque is not None:
        given = _what(batch) if opaque is None else type(opaque).__name__
        without = (
            "without a tensor that has rows" if opaque is None else "with tensors in an object"
        )
        raise bad(
            f"a batch {without} ({given}) under {word}",
            "tensors in nested tuples, lists and dicts, to split along dim 0",
            "dict(batch) for a dict-like object, vars(batch) for a dataclass, or "
            "torch.as_tensor(batch) for an array, with one row per sample",
        )
    found, asked = {len(x) for x in tensors}, None if count is None else count(batch)
    sampled = asked is None and not readings(batch).listed <= found and not _is_of_tensors(batch)
    if len(found) != 1 or asked not in (None, *found) or sampled:
        raise bad(
            f"a batch with {_named(batch)} under {word}",
            "tensors that all have the same number of rows in dim 0, to split along it",
            "one row per sample in every tensor (for positions [3, rows, T] the transposed ones), "
            "or a plan without this word",
        )


def enough(batch: Any, microbatches: int) -> None:
    """Raise InputError if a rank's batch has rows, but fewer than the schedule has microbatches."""
    found = max((len(x) for x in tree_leaves(batch) if _has_rows(x)), default=0)
    if 0 < found < microbatches:
        raise bad(
            f"a share of {found} rows for {microbatches} microbatches",
            "at least one row per microbatch on every data rank, or no rows",
            f"a batch of {microbatches} rows for each data rank, or fewer microbatches",
        )


def computed_parts(batch: Any, parts: int, word: str, count: Count | None) -> list[Any]:
    """The microbatches as a rank computes them: those without rows are filled."""
    return [filled(part, count) for part in split(batch, parts, word, count)]


def filled(batch: Any, count: Count | None = None) -> Any:
    """`batch`, or zeros in its place if it has no rows; they count with weight zero.

    A rank without data must still join every collective of the step.
    """
    if not is_empty(batch, count):
        return batch

    def stand_in(x: Any) -> Any:
        if not _has_rows(x) or x.numel():
            return x
        return x.new_zeros([size or STAND_IN_ROWS for size in x.shape])

    return tree_map(stand_in, batch)


def widened(batch: Any, dtype: torch.dtype | None) -> Any:
    """Convert the batch's floating-point tensors to `dtype` where it is wider; none is rounded.

    Layers in a narrower dtype convert their inputs themselves (precision.py).
    """
    if dtype is None:
        return batch

    def wide(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == dtype:
            return x
        return x.to(dtype) if torch.promote_types(x.dtype, dtype) == dtype else x

    return tree_map(wide, batch)


# --- errors ----------------------------------------------------------------------------------


def _uncertain(batch: Any, also: Iterable[int] = ()) -> InputError:
    if not any(_has_rows(x) for x in tree_leaves(batch)):
        return bad(
            f"a batch without a tensor that has rows ({type(batch).__name__})",
            "tensors in nested tuples, lists and dicts, whose dim 0 are the rows",
            "dict(batch) for a dict-like object, vars(batch) for a dataclass, "
            "torch.as_tensor(batch) for an array, or rows=, a function that counts the rows of a "
            "batch",
        )
    counts = "".join(f", or a list of {n} samples" for n in sorted(also))
    return bad(
        f"a batch whose number of rows is not certain: {_named(batch)}{counts}",
        "tensors that all have the rows in dim 0, or lists with one sample per row",
        _INSTEAD,
    )


def _changed(batch: Any) -> InputError:
    return bad(
        f"a batch with {_named(batch)} in lists whose lengths differ between steps or ranks: "
        "fields, or one sample per row?",
        "lists of fields, which are equally long on all ranks and in all steps",
        _INSTEAD,
    )


def _named(batch: Any) -> str:
    """The tensors of a batch by their paths, the first ones with each size of dim 0."""
    pairs, _ = tree_flatten_with_path(batch)
    tensors = [(keystr(path), x) for path, x in pairs if _has_rows(x)]
    first = {len(x): n for n, (_, x) in reversed(list(enumerate(tensors)))}
    order = sorted(range(len(tensors)), key=lambda n: (n not in first.values(), n))[:NAMED]
    shown = [f"batch{tensors[n][0]} of shape {list(tensors[n][1].shape)}" for n in sorted(order)]
    return ", ".join(shown) + (", ..." if len(tensors) > NAMED else "")


def _hides_tensors(x: Any) -> bool:
    """Whether a leaf of a batch is an object with tensors inside, which would not be split."""
    if isinstance(x, Tensor) or not (isinstance(x, Mapping) or hasattr(x, "__dict__")):
        return False
    inside = [x[key] for key in x] if isinstance(x, Mapping) else [*vars(x).values()]
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(inside))


def _what(batch: Any) -> str:
    shape = f" of shape {list(batch.shape)}" if isinstance(batch, Tensor) else ""
    return f"{type(batch).__name__}{shape}"


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0
