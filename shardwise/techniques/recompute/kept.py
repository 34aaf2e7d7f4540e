"""What recomputation keeps: outputs of products, states of random numbers and of modules, inputs or
parts of them.

Selective recomputation keeps the outputs in brackets:

    norm   [q k v]   rotate   [attention]   [out]   add   norm   [gate up]   silu *   [down]

The operations between them cost a pass over memory. Attention that is not fused multiplies
activations: its scores [.., T, S] are larger than both operands and are computed again, with
softmax and dropout; their product with the values is kept. Those of torch
(create_selective_checkpoint_contexts) fail if the second forward alone gathers a unit.

Partitioned recomputation splits inputs over the n tensor ranks (P_a of ZeRO, arXiv 1910.02054,
section 6.1; P_a+cpu if the pieces rest in host memory):

    forward     x [B, T, D], the same on all n ranks ---> rank r keeps elements r N/n to (r+1) N/n
    backward    all-gather of the pieces ---> x ---> the module's forward again

If x is already a shard (sequence parallelism), it is kept unchanged and nothing is sent.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.comm.move import move
from shardwise.comm.world import Axis
from shardwise.core.layouts.layout import I, S
from shardwise.core.tools.tree import mapped
from shardwise.techniques.recompute.host_activations import HostActivations, Kept, same, storage_of

_ATEN: Final = torch.ops.aten

#: Products of an activation and a weight.
_WITH_WEIGHTS: Final = frozenset(
    (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.convolution.default, _ATEN._scaled_mm.default)
)
#: Products of two activations, and which of their arguments these are.
_OF_ACTIVATIONS: Final = {_ATEN.bmm.default: (0, 1), _ATEN.baddbmm.default: (1, 2)}
#: Fused attention, and which of its arguments is the rate of dropout.
_ATTENTION: Final = {
    _ATEN._scaled_dot_product_flash_attention.default: 3,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _ATEN._scaled_dot_product_efficient_attention.default: 5,
    _ATEN._scaled_dot_product_cudnn_attention.default: 5,
}
#: Fused attention on the meta device (observe/work.py).
_ON_META: Final = "shardwise::attention"
_PRODUCTS: Final = frozenset((*_WITH_WEIGHTS, *_OF_ACTIVATIONS, *_ATTENTION))


class KeptProducts:
    """The outputs of the products in one forward pass of a module, in order; None: not kept. One
    that is written to in place is dropped: recomputation would write to it a second time.
    """

    def __init__(self) -> None:
        self.outputs: dict[Any, list[Any]] = defaultdict(list)
        self.places: dict[int, tuple[Any, int]] = {}  # by storage

    def add(self, func: Any, out: Any, keep: bool) -> None:
        kept = self.outputs[func]
        if keep:
            for x in _tensors(out):
                self.places[storage_of(x)] = func, len(kept)
        kept.append(tree_map_only(Tensor, _alias, out) if keep else None)

    def drop(self, changed: Any) -> None:
        """Drop outputs that share memory with tensors among `changed`."""
        for x in _tensors(changed):
            func, index = self.places.get(storage_of(x), (None, 0))
            if func is not None:
                self.outputs[func][index] = None

    def replace(self, keep: Callable[[Tensor], Any]) -> None:
        for kept in self.outputs.values():
            kept[:] = [tree_map_only(Tensor, keep, out) for out in kept]

    def keeping(self) -> TorchDispatchMode:
        return _Keeping(self)

    def replaying(self) -> TorchDispatchMode:
        return _Replaying(self.outputs)


class _Keeping(TorchDispatchMode):
    def __init__(self, products: KeptProducts) -> None:
        super().__init__()
        self.products = products

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _PRODUCTS or func._schema.name == _ON_META:
            self.products.add(func, out, _is_kept(func, args, kwargs, out))
        elif func._schema.is_mutable and self.products.places:
            by_name = {
                x.name: value for x, value in zip(func._schema.arguments, args, strict=False)
            }
            by_name |= kwargs  # a collective reads its input, and writes to its output
            self.products.drop([by_name.get(x.name) for x in func._schema.arguments if x.is_write])
        return out


class _Replaying(TorchDispatchMode):
    def __init__(self, outputs: dict[Any, list[Any]]) -> None:
        super().__init__()
        self.outputs = {func: iter(kept) for func, kept in outputs.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kept = next(self.outputs.get(func, iter(())), None)
        if kept is None:
            return func(*args, **(kwargs or {}))
        kept = tree_map_only(Kept, HostActivations.read, kept)
        return tree_map_only(Tensor, _alias, kept)


def _is_kept(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> bool:
    if func in _OF_ACTIVATIONS:
        a, b = (args[place] for place in _OF_ACTIVATIONS[func])
        return out.numel() <= a.numel() + b.numel()
    if func in _ATTENTION or func._schema.name == _ON_META:
        place = _ATTENTION.get(func, 7)
        rate = args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)
        return rate == 0  # otherwise its draws would be missing from the recomputation
    return True


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _alias(x: Tensor) -> Tensor:
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


# --- States of random numbers ---------------------------------------------------------------------


class Generators:
    """The generators from which modules draw: torch's, and counts that determine the numbers."""

    def __init__(self, generators: Sequence[Any]) -> None:
        self.generators = generators

    def states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self.generators]

    @contextmanager
    def replay(self, states: list[Tensor]) -> Iterator[None]:
        """Draw from `states` inside; afterwards restore the states from before."""
        before = self.states()
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)
        try:
            yield
        finally:
            for generator, state in zip(self.generators, before, strict=True):
                generator.set_state(state)


# --- States of modules ----------------------------------------------------------------------------

#: Attributes of every module that no forward pass changes.
_FIXED: Final = vars(nn.Module()).keys() - {"training"} | {"forward"}


class ModuleState:
    """Attributes (flags, counters), buffers, and tensors in place of parameters (functional_call),
    as a forward pass finds them.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        own = [(vars(m), vars(m).keys() - _FIXED) for m in modules]
        self.attributes = [(table, {key: table[key] for key in keys}) for table, keys in own]
        # their tables gather what a program reads (engine/checks/reads.py)
        params = [(m._parameters, key, p) for m in modules for key, p in dict.items(m._parameters)]
        given = (x for x in params if x[2] is not None and not isinstance(x[2], nn.Parameter))
        self.attributes += [(table, {key: p}) for table, key, p in given]
        buffers = [(m._buffers, key, b) for m in modules for key, b in m._buffers.items()]
        self.buffers = [(*x, x[2]._version, x[2].clone()) for x in buffers if x[2] is not None]

    def end(self) -> None:
        """After the pass: forget the copies of buffers that it has not written."""
        now = [(x, x[0].get(x[1])) for x in self.buffers]
        self.buffers = [x for x, b in now if b is not x[2] or b._version != x[3]]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside is what the pass has found, and afterwards what was there before."""
        tables = [*(table for table, _ in self.attributes), *(x[0] for x in self.buffers)]
        now = [(table, dict(table)) for table in tables]
        for table, found in self.attributes:
            table.update(found)
        for table, key, *_, before in self.buffers:
            table[key] = before.clone()
        try:
            yield
        finally:
            for table, old in now:
                table.clear()
                table.update(old)


# --- Inputs ---------------------------------------------------------------------------------------


class KeptInput(NamedTuple):
    """A kept tensor, maybe `held` as a `Kept`; with a `shape`, this rank's piece of it."""

    held: Any
    trained: bool
    shape: torch.Size | None = None


class Inputs:
    """The arguments of a module: `take` returns them as given once, then put together again.

    With an `axis` tensors that a gradient reaches are kept in pieces, and others whole, since
    several modules may share them. With `host` the pieces rest there, or all tensors without an
    axis. With `keep` tensors that a gradient reaches are copied by it.
    """

    def __init__(
        self,
        axis: Axis | None,
        given: Any,
        host: HostActivations | None = None,
        keep: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.axis, self.host, self.keep = axis, host, keep
        self.given: Any = given
        self.kept: Any = None

    def take(self) -> Any:
        given, self.given = self.given, None
        if given is None:
            return mapped(self._whole, self.kept, KeptInput, objects=True)
        self.kept = mapped(self._keep, given, Tensor, objects=True)
        return given

    def _keep(self, x: Tensor) -> KeptInput:
        rests = self.host.keep if self.host is not None else self.keep or same
        if not x.requires_grad and (self.axis is not None or self.keep is not None):
            return KeptInput(x, False)
        if self.axis is None:
            return KeptInput(rests(x.detach()), x.requires_grad)
        flat = x.detach().reshape(-1)
        padded = functional.pad(flat, (0, -len(flat) % self.axis.size))
        return KeptInput(rests(move(padded, self.axis, I, S(0))), True, x.shape)

    def _whole(self, kept: KeptInput) -> Tensor:
        x = HostActivations.read(kept.held)
        if kept.shape is not None and self.axis is not None:
            x = move(x, self.axis, S(0), I)[: kept.shape.numel()].view(kept.shape)
        return x.detach().requires_grad_() if kept.trained else x
