"""This file is a meter of live tensor bytes that works for anyone's code.

Every operation that makes a tensor is seen by a dispatch mode, which remembers the tensor's
storage weakly. What is live is the sum over the storages that still exist, at the size they have
at that moment, for sharding code shrinks storages to nothing and grows them back.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import Parameter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)

PLAIN = (Tensor, Parameter)


def plain(value: Any) -> Iterator[Tensor]:
    """The tensors with storage in a value: itself, or what a DTensor and its like are made of."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from plain(getattr(value, name))
    elif type(value) in PLAIN and value.layout == torch.strided:
        yield value


class Live(TorchDispatchMode):
    """Storages made while the mode was on, in one or several stretches; `peak_bytes` of them."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # it does its work on plain tensors first, and those are seen
        made = func(*args, **(kwargs or {}))
        self.watch(made)
        self.peak_bytes = max(self.peak_bytes, self.bytes())
        return made

    def watch(self, tensors: Any) -> None:
        """Counts the storages of all tensors in a pytree from now on."""
        for leaf in pytree.tree_leaves(tensors):
            for tensor in plain(leaf):
                if tensor.is_meta:  # it has a size, and takes no memory
                    continue
                storage = tensor.untyped_storage()
                self.storages.setdefault(storage._cdata, StorageWeakRef(storage))

    def bytes(self) -> int:
        """What is live now."""
        total = 0
        for key, weak in list(self.storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                del self.storages[key]
            else:
                total += storage.nbytes()
        return total
