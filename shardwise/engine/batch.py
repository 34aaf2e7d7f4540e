"""Batches: counting rows, splitting into microbatches, and a stand-in for a rank without rows.

{"ids": [4, 5], "mask": [4, 5]}                4 rows: dim 0 of every tensor
[[4, 5], [4, 5]]                               4 rows in two fields
{"positions": [3, 4, 5], "ids": [4, 5]}        an error, which asks for `rows=` or `tokens=`
[([7], []), ([7], [])]                         the same; with `rows=len` 2 rows, the samples

Tensors are found wherever they are: in containers, and in attributes of objects (core/tools/tree).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.comm.move import all_gather_object
from shardwise.comm.world import Axis, World
from shardwise.core.errors import InputError, bad
from shardwise.core.plan.plan import Plan
from shardwise.core.tools.tree import leaves, mapped, paths
from shardwise.engine.precision import cast_inputs

#: Rows of a stand-in: batch normalisation needs more than one.
STAND_IN_ROWS = 2
#: The number of tensors that an error names.
NAMED = 4
#: What a user's `rows=` is, and `tokens=`.
Count = Callable[[Any], int]
Tokens = Callable[[Any], float]
Change = Callable[[Any], Any]

_INSTEAD = (
    "rows=lambda batch: len(batch[...]) with the tensor or the list that has one entry per row "
    "(rows=len for a list of samples), or tokens= with the number of tokens"
)


def data_axes(world: World, plan: Plan) -> tuple[Axis, Axis]:
    """The axes among whose ranks the batch is split; one may have one rank.
    States are sharded along the first one and replicated along the second.
    """
    return world.axis(plan.shard_axis or "none"), world.axis(plan.replicate_axis or "none")


class NoSamples(list[Any]):
    """The list of samples of a microbatch without any; `like` is one of another microbatch."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.like = like


def require_counted(refused: float, own: InputError | None) -> None:
    """Raise InputError if the batch of any rank was refused; `own` is this rank's error."""
    if not refused:
        return
    raise own or bad(
        f"a batch of {int(refused)} other data ranks that cannot be counted or split",
        "batches of one structure on all ranks, whose rows are certain",
        f"{_INSTEAD}; the error of that rank names its tensors",
    )


def dtype_numbers(batch: Any) -> tuple[int, int, int]:
    """1, a number of the dtypes of a batch's floats, and its square; zeros without floats."""
    number = crc32(_float_dtypes(batch).encode()) % 2**16
    return (1, number, number**2) if _float_dtypes(batch) else (0, 0, 0)


def _float_dtypes(batch: Any) -> str:
    floats = [x for x in leaves(batch, Tensor, objects=True) if x.is_floating_point()]
    return ", ".join(sorted({str(x.dtype).removeprefix("torch.") for x in floats}))


def require_equal_dtypes(batch: Any, numbers: Sequence[float]) -> None:
    """Raise InputError if the floats of ranks differ in dtype, by the sum of `dtype_numbers`."""
    ranks, total, squares = numbers
    if ranks * squares != total**2:
        raise bad(
            f"a batch whose floats are {_float_dtypes(batch) or 'none'} here, and of another dtype "
            "on other data ranks",
            "the same dtypes on all ranks",
            "x.float() in the dataset",
        )


def rows(batch: Any, count: Count | None = None) -> int:
    """The rows of a batch; `count` is the user's `rows=`. Raises InputError if uncertain."""
    if count is not None:
        return count(batch)
    if is_empty(batch):
        return 0
    found = {len(x) for x in _tensors(batch)}
    if len(found) != 1 or _is_of_samples(batch):
        raise _uncertain(batch)
    return found.pop()


def _is_of_samples(batch: Any) -> bool:
    """Whether a batch is a list of tuples or dicts, whose tensors have no dim for rows."""
    nested = tuple, list, dict
    return isinstance(batch, list) and bool(batch) and all(isinstance(x, nested) for x in batch)


def _tensors(batch: Any) -> list[Tensor]:
    return [x for x in leaves(batch, Tensor, objects=True) if x.dim()]


def is_empty(batch: Any, count: Count | None = None) -> bool:
    """Whether a batch has tensors, and all of its rows are missing."""
    if count is not None:
        return bool(leaves(batch, (Tensor, NoSamples), objects=True)) and count(batch) == 0
    tensors = _tensors(batch)
    return bool(tensors) and all(not x.numel() for x in tensors)


def on_device(batch: Any, device: torch.device, *, dry: bool = False) -> Any:
    """The batch with its tensors on `device`; those in pinned memory are copied asynchronously.
    Raises InputError for a tensor on the meta device, which has no values, except in a `dry` run.
    """
    if not dry and any(x.is_meta for x in leaves(batch, Tensor, objects=True)):
        instead = "the batch, made outside of the block of torch.device"
        raise bad("a batch with a tensor on the meta device", "tensors with values", instead)
    kinds = Tensor, PackedSequence  # whose sizes stay on the host
    return mapped(lambda x: x.to(device, non_blocking=True), batch, kinds, objects=True)


def split(batch: Any, parts: int, word: str = "", count: Count | None = None) -> list[Any]:
    """Split `batch` along its rows into `parts` microbatches; the first ones are larger if uneven.
    Rows are dim 0 of all tensors, or the entries of lists if `count` counts those; arrays and lists
    of texts with an entry for each row are split too.  With fewer rows
    than microbatches the last ones are empty.  0-d tensors and other values go to every part.
    `word` is the plan word that asked for the split.  Raises InputError for tensors or lists with
    different numbers of rows, or none with rows.
    """
    if parts == 1 or is_empty(batch, count):
        return [batch] * parts
    samples = None if count is None else _samples(batch, count)
    found: list[int] = []
    _over_rows(lambda x: found.append(len(x)) or x, batch, samples)
    asked = found[0] if found and count is None else count(batch) if count is not None else 0
    if count is None and (number := _rowlike_numbers(batch, asked)):
        given = f"a batch with a list of {asked} numbers at batch{number}, beside {asked} rows"
        allowed = "tensors, arrays and lists of texts with an entry for each row, to split them"
        instead = f"torch.tensor(batch{number}), or a tuple if they are not of rows"
        raise bad(f"{given} under {word or f'accumulate:{parts}'}", allowed, instead)
    if any(x.layout is not torch.strided for x in _tensors(batch)):
        given = f"a batch with a sparse or nested tensor under {word or f'accumulate:{parts}'}"
        instead = "x.to_dense(), or a plan without this word"
        raise bad(given, "dense tensors, to split them", instead)
    if not found or set(found) != {asked} or (count is None and _is_of_samples(batch)):
        raise _not_cut(batch, word or f"accumulate:{parts}", found)
    own = [partial(_part, k=k, parts=parts) for k in range(parts)]
    return [_over_rows(part, batch, samples, asked) for part in own]


def few_rows(batch: Any, count: Count | None, microbatches: int) -> int:
    """The rows of a batch that has some, but fewer than there are microbatches; else 0."""
    found = rows(batch, count) if microbatches > 1 else 0
    return found if found < microbatches else 0


def _part(x: Any, *, k: int, parts: int) -> Any:
    if isinstance(x, Tensor):
        return x.tensor_split(parts)[k]
    own = torch.arange(len(x), dtype=torch.int64, device="cpu").tensor_split(parts)[k].tolist()
    if isinstance(x, np.ndarray):
        return x[own]
    return type(x)(x[place] for place in own) or NoSamples(x[0])


def _samples(batch: Any, count: Count) -> int | None:
    """How many samples the lists of a batch have, if the user's `rows=` counts them; else None.
    It does if it counts one less when each list of that length has one entry less.
    """
    asked = count(batch)
    fewer = _over_rows(lambda x: x if isinstance(x, Tensor) else x[1:], batch, asked)
    try:
        return asked if asked and count(fewer) == asked - 1 else None
    except Exception:  # noqa: BLE001 -- lists are fields, and one is missing now
        return None


def _over_rows(change: Change, batch: Any, samples: int | None, count: int = 0) -> Any:
    """Apply `change` to tensors with rows, to each list of so many samples, and to arrays and lists
    of `count` texts, as default_collate makes them.
    """
    kinds = Tensor, list, tuple, np.ndarray

    def each(x: Any) -> Any:
        """A tensor, or a list or tuple: as a whole if it has samples, else entry by entry."""
        if isinstance(x, Tensor):
            return change(x) if x.dim() else x
        if isinstance(x, np.ndarray) or (x and all(isinstance(y, str) for y in x)):
            return change(x) if count and x.__len__() == count else x
        named = hasattr(x, "_fields")
        if len(x) == samples and not named:
            return change(x)
        new = [mapped(each, y, kinds, objects=True) for y in x]
        return type(x)(*new) if named else type(x)(new)

    return mapped(each, batch, kinds, objects=True)


def _rowlike_numbers(batch: Any, count: int) -> str:
    """The path of a list of as many numbers as there are rows, or ""."""
    lists = [(path, x) for path, x in paths(batch, list) if len(x) == count]
    return next((path for path, x in lists if all(type(y) in (int, float) for y in x)), "")


def _not_cut(batch: Any, word: str, found: list[int]) -> InputError:
    if not found:
        return _uncertain(batch, f" under {word}")
    return bad(
        f"a batch with {_named(batch)} under {word}",
        "tensors that all have the same number of rows in dim 0, to split along it, or lists of "
        "samples that rows= counts",
        "one row per sample in every tensor (for positions [3, rows, T] the transposed ones), "
        "rows=len for a list of samples, or a plan without this word",
    )


def enough(
    batch: Any, microbatches: int, count: Count | None = None, *, empty: bool = True
) -> None:
    """Raise InputError for fewer rows than microbatches; a batch may be `empty`."""
    found = count(batch) if count else max(map(len, _tensors(batch)), default=0)
    if found < microbatches and (found or not empty):
        raise bad(
            f"a share of {found or 'no'} rows for {microbatches} microbatches",
            f"at least one row per microbatch on every data rank{', or no rows' * empty}",
            f"a batch of {microbatches} rows for each data rank, or fewer microbatches",
        )


def filled(batch: Any, count: Count | None = None) -> Any:
    """`batch`, or zeros of weight zero: a rank without rows joins every collective too."""
    if not is_empty(batch, count):
        return batch

    def stand_in(x: Any) -> Any:
        if isinstance(x, NoSamples):
            return [mapped(torch.zeros_like, x.like, Tensor, objects=True)] * STAND_IN_ROWS
        if not x.dim() or x.numel():
            return x
        return x.new_zeros([size or STAND_IN_ROWS for size in x.shape])

    return mapped(stand_in, batch, (Tensor, NoSamples), objects=True)


def widened(batch: Any, dtype: torch.dtype | None, model: nn.Module) -> Any:
    """Convert the batch's floating-point tensors to `dtype` where it is wider; none is rounded.
    Layers of `model` in a narrower dtype cast their inputs themselves (precision.py).
    """
    if dtype is None:
        return batch

    def wide(x: Tensor) -> Tensor:
        narrower = x.is_floating_point() and torch.promote_types(x.dtype, dtype) == dtype
        if x.is_floating_point() and not narrower:
            cast_inputs(model, dtype)
        return x.to(dtype) if narrower else x

    return mapped(wide, batch, Tensor, objects=True)


def _uncertain(batch: Any, under: str = "") -> InputError:
    if not _tensors(batch):
        shape = f" of shape {list(batch.shape)}" if isinstance(batch, Tensor) else ""
        return bad(
            f"a batch without a tensor that has rows ({type(batch).__name__}{shape}){under}",
            "tensors in containers, whose dim 0 are the rows",
            "torch.as_tensor(batch) for an array, or rows=, a function that counts the rows of a "
            "batch",
        )
    return bad(
        f"a batch whose number of rows is not certain: {_named(batch)}",
        "tensors that all have the rows in dim 0",
        _INSTEAD,
    )


def _named(batch: Any) -> str:
    tensors = [(path, x) for path, x in paths(batch, Tensor) if x.dim()]
    first = {len(x): n for n, (_, x) in reversed(list(enumerate(tensors)))}
    order = sorted(range(len(tensors)), key=lambda n: (n not in first.values(), n))[:NAMED]
    shown = [f"batch{tensors[n][0]} of shape {list(tensors[n][1].shape)}" for n in sorted(order)]
    return ", ".join(shown) + (", ..." if len(tensors) > NAMED else "")


def copied(part: Any) -> Any:
    """The part of a batch with tensors of its own, to which a forward may write."""
    return mapped(lambda x: x if x.requires_grad else x.clone(), part, Tensor, objects=True)


def is_written(copy: Any) -> bool:
    return any(x._version for x in leaves(copy, Tensor, objects=True) if not x.is_inference())


def gather(engine: Any, values: Any) -> Any:
    """The `values` of all data ranks on every rank, for metrics: tensors with a row for each row of
    a rank's batch, nested as in a batch, joined along dim 0 in the order of the data ranks, which
    may have different numbers of rows. Called by all ranks; the values are copied over the host.
    Raises InputError for other values than tensors and numbers, each of which counts as a row, and
    for rows that differ in shape or dtype.
    """

    def joined(*parts: Tensor) -> Tensor:
        """The rows of all data ranks, those of ranks with none left out."""
        filled = [x for x in parts if len(x)] or [parts[0]]
        found = sorted({f"{list(x.shape[1:])} in {x.dtype}" for x in filled})
        if len(found) > 1:
            given = f"rows of shape {' and '.join(found)} on several data ranks in engine.gather"
            raise bad(given, "rows of one shape and dtype", "functional.pad(x, ...) to one length")
        return torch.cat(filled)

    for x in tree_leaves(values):
        if not isinstance(x, Tensor | int | float):
            raise bad(
                f"a {type(x).__name__} in engine.gather, which joins rows",
                "tensors with a row for each row of the batch, and numbers",
                "engine.gather((predictions, labels))",
            )
    own = tree_map(lambda x: torch.atleast_1d(torch.as_tensor(x).detach().cpu()), values)
    with engine.ledger.phase("check"):
        every = dict(all_gather_object((engine.data_rank, own), engine.world))
    parts = [every[rank] for rank in range(engine.data_ranks)]
    return on_device(tree_map(joined, *parts), engine.world.device)
