"""The tensors of a module's output, wherever they are in it."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def tensors_in(out: Any, deep: int = 2) -> Iterator[Tensor]:
    """The tensors of a module's output, in containers, dataclasses and plain objects.

    For logits that are computed later (kernels/logits.py) it is what they are computed from.
    """
    for leaf in tree_leaves(out):
        if isinstance(leaf, Tensor):
            yield leaf if type(leaf) is Tensor else getattr(leaf, "computed_from", leaf)
        elif deep and is_dataclass(leaf):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)], deep - 1)
        elif deep and not isinstance(leaf, nn.Module | type):
            yield from tensors_in(list(getattr(leaf, "__dict__", {}).values()), deep - 1)
