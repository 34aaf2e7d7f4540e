"""A meter of live tensor bytes that works with any library's code.

A dispatch mode sees every operation that creates a tensor, and keeps a weak reference to the
tensor's storage. Live bytes are the sum over the storages that still exist, at their current size,
since sharding code resizes storages to zero and back.
"""

from collections.abc import Callable, Iterator
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
    """The tensors with storage in a value: itself, or the inner tensors of a DTensor."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from plain(getattr(value, name))
    elif type(value) in PLAIN and value.layout == torch.strided:
        yield value


def _of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def live_bytes(storages: dict[int, StorageWeakRef]) -> int:
    """The bytes of the storages that still exist; the others are removed from the dictionary."""
    total = 0
    for key, weak in list(storages.items()):
        storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        if storage is None:
            del storages[key]
        else:
            total += storage.nbytes()
    return total


class LiveBytes(TorchDispatchMode):
    """Live bytes of the storages created while the mode was on, and their peak.

    Without tensors of which `on_host` is true.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_host: Callable[[Tensor], bool] = lambda _: False
        self.storages: dict[int, StorageWeakRef] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the subclass then calls operations on plain tensors
        made = func(*args, **(kwargs or {}))
        self.watch(made)
        self.peak_bytes = max(self.peak_bytes, self.bytes())
        return made

    def watch(self, tensors: Any) -> None:
        """Count the storages of all tensors in a pytree from now on."""
        for leaf in pytree.tree_leaves(tensors):
            for tensor in plain(leaf):
                if tensor.is_meta or self.on_host(tensor):
                    continue
                storage = tensor.untyped_storage()
                self.storages.setdefault(storage._cdata, StorageWeakRef(storage))

    def leave_out_host(self) -> None:
        """Forget the storages that are in host memory, which were seen before that was known."""
        for key, weak in list(self.storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is not None and self.on_host(_of(storage)):
                del self.storages[key]

    def bytes(self) -> int:
        """The bytes that are live now."""
        return live_bytes(self.storages)
