"""Live memory: every storage made while an engine is built and steps is followed and found again.

    live = Live()
    with live.of(model): engine = parallelize(model, ...)
    with live: engine.step(batch)
    live.unaccounted(engine)           what is alive and belongs to no category: nothing

No list of tensors decides what is counted.  Inside the `with`, the storages of each operation's
results are followed, weakly, wherever they are kept later: in an attribute, a list, a closure, a
graph of autograd; and so are the weights that the model came with.  What an operation takes and was
not followed before was made elsewhere (a batch, another rank's tensor, a mailbox) and is left out.
A dispatch mode belongs to its thread, so in a world of threads each rank finds its own.

Not seen: memory that is no storage of torch, and storages that no operation of torch made.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.engine import memory


@dataclass(frozen=True)
class Stray:
    """A storage that is alive and in no category: its bytes, and the operation that made it."""

    stored_bytes: int
    made_by: str


class Live(TorchDispatchMode):
    """Follows what is made while it is entered, by one thread; it may be entered again."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, str]] = {}
        self.elsewhere: dict[int, StorageWeakRef] = {}  # an address is not used again meanwhile

    def of(self, model: nn.Module) -> Self:
        """Follow the parameters that `model` has now: laid out, they live elsewhere."""
        for p in model.parameters():
            if not p.is_meta:
                self._follow(p, "the model before parallelize")
        return self

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions stay compiled under this mode."""
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
            self._follow(tensor, str(func))
        return made

    def _follow(self, tensor: Tensor, made_by: str) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.made and storage._cdata not in self.elsewhere:
            self.made[storage._cdata] = StorageWeakRef(storage), made_by

    def unaccounted(self, engine: Any) -> list[Stray]:
        """Storages that are alive and in no category of `engine`, the largest first.

        Storages without bytes do not count: units shrink theirs to nothing.
        """
        self.elsewhere = {k: weak for k, weak in self.elsewhere.items() if not weak.expired()}
        kept = {tensor.untyped_storage()._cdata for _, tensor in memory.owned(engine)}
        found: list[Stray] = []
        for key, (weak, made_by) in list(self.made.items()):
            storage = UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                del self.made[key]
            elif storage.nbytes() and key not in kept:
                found.append(Stray(storage.nbytes(), made_by))
        return sorted(found, key=lambda stray: -stray.stored_bytes)


def _tensors(tree: Any) -> Iterable[Tensor]:
    leaves = pytree.tree_leaves(tree)
    return (
        leaf
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.device.type != "meta"
    )
