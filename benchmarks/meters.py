"""Meters of bytes that work with any library's code: live tensors, communication, an interface.

Dispatch modes see every operation that creates a tensor, and keep a weak reference to its storage.
Live bytes are the sum over the storages that still exist, at their current size, since sharding
code resizes storages to zero and back. A storage belongs to communication if, when it is created,
one of these is running:

    ours    a function of the files of shardwise/comm that send, or the broadcast of buffers
    DDP     _ddp_init_helper and _pre_forward, which make the buckets
    FSDP2   a function of _fsdp_collectives.py: flat tensors for all-gather and reduce-scatter

A storage that no operation created (memory shared with another process) is not counted, nor are
internal allocations of gloo or NCCL. The counters of an interface (/proc/net/dev) have packet
headers too, and the traffic of every program in the network namespace.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

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

from shardwise.core.errors import bad

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
    """Live bytes, and their peak, of storages that operations made in the mode, unless `on_host` is
    true; with `counts` of those alone that were made while it was true.
    """

    def __init__(self, counts: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self.counts = counts
        self.on_host: Callable[[Tensor], bool] = lambda _: False
        self.storages: dict[int, StorageWeakRef] = {}
        self.seen: dict[int, StorageWeakRef] = {}  # a weak reference keeps its address taken
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the subclass then calls operations on plain tensors
        self._see((args, kwargs))
        made = func(*args, **(kwargs or {}))
        self.watch(made)
        self.peak_bytes = max(self.peak_bytes, self.bytes())
        return made

    def _see(self, tensors: Any) -> None:
        for storage in _storages(tensors) if self.counts else ():
            self.seen.setdefault(storage._cdata, StorageWeakRef(storage))

    def watch(self, tensors: Any) -> None:
        """Count their storages from now on."""
        new = [storage for storage in _storages(tensors) if storage._cdata not in self.seen]
        self._see(new and tensors)
        for storage in new if self.counts is None or (new and self.counts()) else ():
            if not self.on_host(_of(storage)):
                self.storages.setdefault(storage._cdata, StorageWeakRef(storage))

    def leave_out_host(self) -> None:
        """Forget storages in host memory that were seen before that was known."""
        for key, weak in list(self.storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is not None and self.on_host(_of(storage)):
                del self.storages[key]

    def bytes(self) -> int:
        return live_bytes(self.storages)


def _storages(tensors: Any) -> Iterator[torch.UntypedStorage]:
    leaves = (tensor for leaf in pytree.tree_leaves(tensors) for tensor in plain(leaf))
    yield from (tensor.untyped_storage() for tensor in leaves if not tensor.is_meta)


#: The end of a file's name, and its functions that communicate; none means all functions.
COMMUNICATING: dict[str, tuple[str, ...]] = {
    **{
        f"shardwise/comm/{name}.py": ()
        for name in ("gloo/gloo", "gloo/mailbox", "move", "gloo/pool", "gloo/shared", "transport")
    },
    "shardwise/techniques/data/buffers.py": (),
    "torch/nn/parallel/distributed.py": ("_ddp_init_helper", "_pre_forward"),
    "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py": (),
}


def communication_bytes() -> LiveBytes:
    """Of the storages that communication makes."""
    return LiveBytes(_communicates)


def _communicates() -> bool:
    """Whether one of COMMUNICATING is running."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        for end, functions in COMMUNICATING.items():
            if name.endswith(end) and (not functions or frame.f_code.co_name in functions):
                return True
        frame = frame.f_back
    return False


COUNTERS: Final = Path("/proc/net/dev")
LOOPBACK: Final = "lo"
SENT: Final = 8  # of a line's numbers: bytes transmitted


def sent_bytes(interface: str) -> int:
    """The bytes, headers included, that `interface` has sent in this network namespace.

    Raises InputError if the interface does not exist, or the system is not Linux.
    """
    lines = COUNTERS.read_text().splitlines() if COUNTERS.exists() else []
    counters = {
        name.strip(): numbers.split()
        for name, colon, numbers in (line.partition(":") for line in lines)
        if colon
    }
    if interface in counters:
        return int(counters[interface][SENT])
    raise bad(
        f'the network interface "{interface}"',
        f"an interface with counters: {', '.join(counters) or 'none, as this is not Linux'}",
        next(iter(counters), "the same command on Linux"),
    )
