"""The list of equal blocks of a deep model, and copies of it with few of them."""

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from shardwise.comm.parameter import parameter_like
from shardwise.core.model_spec import Blocks

#: Models with fewer blocks are recorded in full.
LEAST: Final = 8


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
