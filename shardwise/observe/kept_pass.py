"""A pass of the plain model on meta, which records the bytes that autograd keeps at each mark.

Weak references track saved storages: each mark (prediction/memory_timeline.py) adds up the bytes of
those that are alive, and of all others that the pass made. No values are computed.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.unchanged import kept_values
from shardwise.core.tools.tree import leaves
from shardwise.observe.kernels import Kernels
from shardwise.observe.meta_pass import as_on_processor
from shardwise.observe.work import call_tensors
from shardwise.prediction.memory_timeline import Mark
from shardwise.techniques.data.outputs import tensors_in


class _Inputs:
    """The inputs of one call of a recomputed module."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors


class SavedStorages:
    """The storages that autograd has saved, each counted once while it is alive.

    `ignored` are tensors that are counted elsewhere: parameters, buffers, the batch.
    """

    def __init__(self, ignored: list[Any]) -> None:
        self.ignored = {_key(x) for x in ignored if isinstance(x, Tensor)}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.again: dict[int, StorageWeakRef] = {}  # made again in backward
        self.inputs: WeakSet[_Inputs] = WeakSet()

    def save(self, x: Tensor) -> Tensor:
        """The hook that autograd calls with each saved tensor.

        Returns it without its node: a node that saves its own output would never be freed.
        """
        storage = x.untyped_storage()
        if storage._cdata not in self.ignored:
            self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return x.detach() if x.grad_fn is not None else x

    def keys(self) -> set[int]:
        """The addresses of the saved storages that are alive now."""
        self.alive = {k: found for k, found in self.alive.items() if not found[0].expired()}
        return set(self.alive)

    @property
    def stored_bytes(self) -> int:
        """The bytes of the saved storages, and of inputs of recomputed modules, alive now."""
        found = {key: self.alive[key][1] for key in self.keys()}
        for x in (x for inputs in self.inputs for x in inputs.tensors):
            if _key(x) not in self.ignored:
                found[_key(x)] = x.untyped_storage().nbytes()
        return sum(found.values())

    def recompute(self, module: nn.Module) -> None:
        """Count the inputs of `module`, and nothing that autograd saves inside of it.

        Inputs are kept until autograd has released the last tensor saved inside.
        """
        forward = module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            """The forward of the module."""
            inputs = _Inputs([x.detach() for x in tensors_in((args, kwargs))])
            self.inputs.add(inputs)

            def save(x: Tensor) -> Any:
                self.again.setdefault(_key(x), StorageWeakRef(x.untyped_storage()))
                return x.detach(), inputs

            with saved_tensors_hooks(save, lambda kept: kept[0]):
                return forward(*args, **kwargs)

        module.forward = call


class Made(TorchDispatchMode):
    """The storages that operations make, each counted once while it is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in call_tensors(made):
            storage = x.untyped_storage()
            self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return made

    def bytes_beside(self, saved: SavedStorages) -> int:
        """The bytes that are alive now, without those that autograd keeps or will make again."""
        self.alive = {k: found for k, found in self.alive.items() if not found[0].expired()}
        saved.again = {k: weak for k, weak in saved.again.items() if not weak.expired()}
        inputs = {_key(x) for inputs in saved.inputs for x in inputs.tensors}
        counted = saved.keys() | saved.again.keys() | inputs | saved.ignored
        return sum(n for key, (_, n) in self.alive.items() if key not in counted)


def marks_of(
    twin: nn.Module,
    call: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    recomputed: Iterable[str] = (),
    kernels: Kernels = "cpu",
) -> tuple[Mark, ...]:
    """The marks of `call(twin, batch)`, a loss, and of its backward pass; `twin` is on meta.

    For the modules named in `recomputed` only the inputs are kept. `kernels` are those of a device.

    Raises torch's error if the model does not run on meta.
    """
    saved, made = (
        SavedStorages([*twin.parameters(), *twin.buffers(), *leaves(batch, Tensor, objects=True)]),
        Made(),
    )
    found: list[Mark] = []
    handles: list[Any] = []

    def mark(kind: Any, name: str, graded: bool = True, returned: int = -1) -> None:
        others = made.bytes_beside(saved)
        found.append(Mark(kind, name, saved.stored_bytes, graded, returned, others))

    def begins(name: str, *_: Any) -> None:
        mark("call", name)

    def ends(name: str, _: nn.Module, __: Any, out: Any) -> None:
        outs = [x for x in tensors_in(out) if x.requires_grad]
        mark("return", name, bool(outs))
        returned = len(found) - 1
        for x in outs:
            x.register_hook(lambda _: mark("gradient", name, returned=returned))

    def completed(name: str, _: Tensor) -> None:
        mark("complete", name)

    for name, module in twin.named_modules():
        handles.append(module.register_forward_pre_hook(partial(begins, name), prepend=True))
        handles.append(module.register_forward_hook(partial(ends, name)))
    for name, p in twin.named_parameters():
        if p.requires_grad:
            handles.append(p.register_post_accumulate_grad_hook(partial(completed, name)))
    with ExitStack() as stack:
        for module in map(twin.get_submodule, recomputed):
            stack.callback(setattr, module, "forward", module.forward)
            saved.recompute(module)
        for handle in handles:
            stack.callback(handle.remove)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(kept_values(batch))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(saved_tensors_hooks(saved.save, lambda x: x))
        stack.enter_context(as_on_processor(kernels=kernels))
        stack.enter_context(made)
        loss = call(twin, batch)
        mark("loss", "")
        loss.sum().backward()
    return tuple(found)


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata
