"""A meter of the memory of communication, in our code and in PyTorch's.

A dispatch mode sees every operation that creates a storage. The storage belongs to communication
if, when it is created, one of these is running:

    ours    a function of the files of shardwise/comm that send, or the broadcast of buffers
    DDP     _ddp_init_helper and _pre_forward, which make the buckets
    FSDP2   a function of _fsdp_collectives.py: flat tensors for all-gather and reduce-scatter
    FSDP1   _reduce_grad and what prepares it; what it gathers are parameters, as ours

A storage that no operation created (memory shared with another process) is not counted, nor are
internal allocations of gloo or NCCL.
"""

import sys
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from benchmarks.meters.live_bytes import live_bytes, plain

#: The end of a file's name, and its functions that communicate; none means all functions.
COMMUNICATING: dict[str, tuple[str, ...]] = {
    **{
        f"shardwise/comm/{name}.py": ()
        for name in ("gloo/gloo", "gloo/mailbox", "move", "gloo/pool", "gloo/shared", "transport")
    },
    "shardwise/techniques/data/buffers.py": (),
    "torch/nn/parallel/distributed.py": ("_ddp_init_helper", "_pre_forward"),
    "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py": (),
    "torch/distributed/fsdp/_runtime_utils.py": ("_reduce_grad",),
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
