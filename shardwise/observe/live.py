"""Live memory: tracks every storage created while an engine is built and steps.

    live = Live()
    with live.of(model): engine = parallelize(model, ...)
    with live: engine.step(batch)
    live.unaccounted(engine)           live storages of no category; must be empty

Inside the `with`, the result of every operation is tracked by a weak reference, wherever it is kept
(an attribute, a list, a closure, the autograd graph); so are the model's original weights.  A
tensor that an operation takes and that is not tracked was created elsewhere (a batch, another
rank's tensor, a mailbox) and is ignored.  A dispatch mode belongs to its thread, so in a world of
threads each rank tracks its own.

Not tracked: memory outside torch, and storages that no torch operation created.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.engine import memory
from shardwise.engine.engine import Engine
from shardwise.observe.work import call_tensors


@dataclass(frozen=True)
class Stray:
    """A live storage of no category: its bytes, and the operation that created it."""

    stored_bytes: int
    made_by: str


class Live(TorchDispatchMode):
    """Tracks what one thread creates while it is entered; it can be entered repeatedly."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, str]] = {}
        self.elsewhere: dict[int, StorageWeakRef] = {}  # the weak reference keeps the address taken

    def of(self, model: nn.Module) -> Self:
        """Track the model's current parameters, which sharding replaces."""
        for p in model.parameters():
            if not p.is_meta:
                self._track(p, "the model before parallelize")
        return self

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled regions compiled under this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.made and storage._cdata not in self.elsewhere:
                self.elsewhere[storage._cdata] = StorageWeakRef(storage)
        with torch._C.DisableTorchFunction():  # function modes (rng.py) have seen this call
            made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            self._track(tensor, str(func))
        return made

    def _track(self, tensor: Tensor, made_by: str) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.made and storage._cdata not in self.elsewhere:
            self.made[storage._cdata] = StorageWeakRef(storage), made_by

    def unaccounted(self, engine: Engine) -> list[Stray]:
        """Live storages in no category of `engine`, largest first.

        Empty storages do not count: a unit frees its storage by resizing it to zero.
        """
        self.elsewhere = {k: weak for k, weak in self.elsewhere.items() if not weak.expired()}
        accounted = {tensor.untyped_storage()._cdata for _, _, tensor in memory.owned(engine)}
        found: list[Stray] = []
        for key, (weak, made_by) in list(self.made.items()):
            storage = UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                del self.made[key]
            elif storage.nbytes() and key not in accounted:
                found.append(Stray(storage.nbytes(), made_by))
        return sorted(found, key=lambda stray: -stray.stored_bytes)


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (x for x in call_tensors(tree) if x.layout == torch.strided and not x.is_meta)
