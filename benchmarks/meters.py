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
from typing import Any, Final, NamedTuple

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
    """Live bytes, and their peak, of storages created in the mode, unless `on_host` is true."""

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
        """Count their storages from now on."""
        for leaf in pytree.tree_leaves(tensors):
            for tensor in plain(leaf):
                if tensor.is_meta or self.on_host(tensor):
                    continue
                storage = tensor.untyped_storage()
                self.storages.setdefault(storage._cdata, StorageWeakRef(storage))

    def leave_out_host(self) -> None:
        """Forget storages in host memory that were seen before that was known."""
        for key, weak in list(self.storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is not None and self.on_host(_of(storage)):
                del self.storages[key]

    def bytes(self) -> int:
        return live_bytes(self.storages)


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


class CommunicationBytes(TorchDispatchMode):
    """Live bytes of the storages that communication created while the mode was on; their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, StorageWeakRef] = {}  # a weak reference keeps its address taken
        self.counted: dict[int, StorageWeakRef] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the subclass then calls operations on plain tensors
        self._track((args, kwargs), counts=False)
        made = func(*args, **(kwargs or {}))
        self._track(made, counts=True)
        self.peak_bytes = max(self.peak_bytes, self.bytes())
        return made

    def bytes(self) -> int:
        """The bytes of communication that are live now."""
        return live_bytes(self.counted)

    def _track(self, tensors: Any, *, counts: bool) -> None:
        """Record new storages; with `counts`, count them as created by communication."""
        for leaf in pytree.tree_leaves(tensors):
            for tensor in plain(leaf):
                storage = tensor.untyped_storage()
                if tensor.is_meta or storage._cdata in self.seen:
                    continue
                self.seen[storage._cdata] = StorageWeakRef(storage)
                if counts and _communicates():
                    self.counted[storage._cdata] = self.seen[storage._cdata]


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
SENT, PACKETS = 8, 9  # of a line's numbers: bytes transmitted, packets transmitted


class Sent(NamedTuple):
    """Bytes (headers included) and packets sent through an interface."""

    sent_bytes: int
    packets: int


def sent(interface: str) -> Sent:
    """The counters of `interface` since it was created, in this network namespace.

    Raises InputError if the interface does not exist, or the system is not Linux.
    """
    lines = COUNTERS.read_text().splitlines() if COUNTERS.exists() else []
    for line in lines:
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            found = numbers.split()
            return Sent(int(found[SENT]), int(found[PACKETS]))
    names = [line.partition(":")[0].strip() for line in lines if ":" in line]
    raise bad(
        f'the network interface "{interface}"',
        f"an interface with counters: {', '.join(names) or 'none, as this is not Linux'}",
        f"{names[0] if names else 'the same command on Linux'}",
    )


def sent_bytes(interface: str) -> int:
    """The bytes of `sent`."""
    return sent(interface).sent_bytes
