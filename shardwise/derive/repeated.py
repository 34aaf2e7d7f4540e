"""The recorded pass of a deep model, from passes of copies with few of its equal blocks.

    3 blocks    embed  0 1 2      norm head      head norm  2 1 0      embed
    4 blocks    embed  0 1 2 3    norm head      head norm  3 2 1 0    embed
    80 blocks   embed  0 .. 79    norm head      head norm  79 .. 0    embed

Every number of a record (of a value, a storage, a block, a count so far) grows by the same amount
from one block to the next, and from one depth to the next. So each part of a record is continued
along a line through two records. A third record, of 5 blocks, shows whether that is exact: it must
be what the first two give for that depth. If it is not, the model is recorded in full.
"""

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from shardwise.comm.parameter import parameter_like
from shardwise.core.model_spec import Blocks, ModelPass

#: The depths that are recorded: two for a line, one to check it.
DEPTHS: Final = (3, 4, 5)
#: Models with fewer blocks are recorded in full.
LEAST: Final = 8


class NotLinearError(Exception):
    """Records that do not continue along a line."""


def equal_blocks(model: nn.Module) -> Blocks | None:
    """The only list of at least LEAST blocks of a model, if all are equal; None otherwise."""
    lists = [
        Blocks(name, len(module))
        for name, module in model.named_modules()
        if name and isinstance(module, nn.ModuleList) and len(module) >= LEAST
    ]
    if len(lists) != 1:
        return None
    name, count = lists[0]
    first, *others = model.get_submodule(name).children()
    inside = [*model.named_parameters(remove_duplicate=False)]
    inside += [*model.named_modules(remove_duplicate=False)]
    times = Counter(id(each) for _, each in inside)
    shared = any(times[id(each)] > 1 for key, each in inside if key.startswith(f"{name}."))
    if shared or len(others) != count - 1:
        return None
    own = list(_described(first, f"{name}.0"))
    for k, block in enumerate(others, 1):
        for one, other in zip(own, _described(block, f"{name}.{k}"), strict=False):
            if one != other and (one[:2], one[2], other[2]) != (other[:2], 0, k):
                return None
    return lists[0]


def _described(block: nn.Module, name: str) -> Iterator[tuple[str, str, Any]]:
    """What a block's forward may depend on: classes, shapes, and plain attributes."""
    for key, module in block.named_modules():
        yield key, "class", type(module)
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for tensor, x in own:
            yield key, tensor, (x.shape, x.dtype, x.requires_grad)
        for attribute, value in vars(module).items():
            if isinstance(value, str):
                yield key, attribute, value.replace(name, "")
            elif value is None or isinstance(value, bool | int | float | tuple):
                yield key, attribute, value


def shortened(model: nn.Module, blocks: Blocks, depth: int) -> nn.Module:
    """A copy of a model on meta with its first `depth` blocks."""
    whole: Any = model.get_submodule(blocks.name)
    few = whole[:depth]
    dropped = {id(p) for block in whole[depth:] for p in block.parameters()}
    memo: dict[int, Any] = {
        id(p): parameter_like(p, torch.empty_like(p, device="meta"))
        for p in model.parameters()
        if id(p) not in dropped
    }
    memo[id(whole)] = copy.deepcopy(few, memo)
    return copy.deepcopy(model, memo)


def repeated(
    record: Callable[[int], Sequence[ModelPass]], blocks: Blocks, *, checked: bool = False
) -> list[ModelPass]:
    """The passes of the model, from those that `record` gives for each of DEPTHS. `checked`: passes
    of other numbers of rows continue along a line.  Raises NotLinearError otherwise.
    """
    first, second = (record(depth) for depth in DEPTHS[:2])
    split = re.compile(rf"^({re.escape(blocks.name)}\.)(\d+)(.*)$")
    pairs = list(zip(first, second, strict=True))
    if not checked and [_pass(a, b, 1, split) for a, b in pairs] != list(record(DEPTHS[2])):
        raise NotLinearError
    return [_pass(a, b, blocks.number - DEPTHS[1], split) for a, b in pairs]


def _pass(first: ModelPass, second: ModelPass, times: int, split: re.Pattern[str]) -> ModelPass:
    """The pass with `times` blocks more than the second, which has one more than the first."""
    lists = {
        name: _continued(getattr(first, name), getattr(second, name), times, split)
        for name in ("calls", "rows", "moves", "reads")
    }
    values = _inserted(first.values, second.values, times)
    steps = [[b - a for a, b in pairwise((0, *each.saves))] for each in (first, second)]
    tape = second.tape._replace(
        storage_bytes=_inserted(first.tape.storage_bytes, second.tape.storage_bytes, times),
        **{
            name: _continued(getattr(first.tape, name), getattr(second.tape, name), times, split)
            for name in ("saved", "taken", "returned", "products", "last_save", "operations")
        },
    )
    if (first.losses, first.joins, first.note) != (second.losses, second.joins, second.note):
        raise NotLinearError
    more, most = steps
    saves = tuple(accumulate(_inserted(more, most, times)))
    return second._replace(values=values, tape=tape, saves=saves, **lists)


def _continued(
    first: Sequence[Any], second: Sequence[Any], times: int, split: re.Pattern[str]
) -> tuple[Any, ...]:
    """A sequence of elements with names, continued: before, at and after the last block."""
    parts = [_parts([_numbered(x, split) for x in each]) for each in (first, second)]
    (before, last, after), (more_before, more_last, more_after) = parts
    p, q = len(more_before) - len(before), len(more_after) - len(after)
    if more_before[: len(before)] != before or more_after[q:] != after or min(p, q) < 0:
        raise NotLinearError
    front = (_line(more_before[-2 * p : -p], more_before[-p:], t) for t in range(1, times + 1))
    back = (_line(more_after[q : 2 * q], more_after[:q], t) for t in range(times, 0, -1))
    whole = [
        *more_before,
        *(x for each in front if p for x in each),
        *_line(last, more_last, times),
        *(x for each in back if q for x in each),
        *more_after,
    ]
    return tuple(map(_named, whole))


def _parts(elements: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The elements before the last block's, from there on, and from the block before it, after.
    The third part is empty where the order is that of the forward pass alone.
    """
    at = [_block(element) for element in elements]
    last = max((block for block in at if block is not None), default=None)
    if last is None:
        return [], elements, []
    begin = at.index(last)
    end = next((i for i in range(begin, len(at)) if at[i] == last - 1), len(at))
    return elements[:begin], elements[begin:end], elements[end:]


class _BlockName(NamedTuple):
    """A module's name, with the number of its block."""

    before: str
    block: int
    after: str


def _block(element: Any) -> int | None:
    found = (x.block for x in element if isinstance(x, _BlockName))
    return next(found, None)


def _numbered(value: Any, split: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        found = split.match(value)
        return value if found is None else _BlockName(found[1], int(found[2]), found[3])
    if isinstance(value, tuple):
        return _like(value, [_numbered(x, split) for x in value])
    return value


def _named(value: Any) -> Any:
    if isinstance(value, _BlockName):
        return f"{value.before}{value.block}{value.after}"
    return _like(value, [_named(x) for x in value]) if isinstance(value, tuple) else value


def _like(value: Any, parts: list[Any]) -> Any:
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _line(first: Any, second: Any, times: int) -> Any:
    """`second`, with `times` more steps of the difference to `first` in each number."""
    if isinstance(second, int) and not isinstance(second, bool):
        return second + times * (second - first)
    if isinstance(second, tuple | list) and len(first) == len(second):
        parts = [_line(a, b, times) for a, b in zip(first, second, strict=True)]
        return _like(second, parts) if isinstance(second, tuple) else parts
    if first != second:
        raise NotLinearError
    return second


def _inserted(first: Sequence[Any], second: Sequence[Any], times: int) -> tuple[Any, ...]:
    """A sequence without names: what the second has more than the first, `times` more times."""
    more = len(second) - len(first)
    at = next(
        (k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first)
    )
    if more < 0 or (*second[:at], *second[at + more :]) != tuple(first):
        raise NotLinearError
    return (*second[: at + more], *(tuple(second[at : at + more]) * times), *second[at + more :])
