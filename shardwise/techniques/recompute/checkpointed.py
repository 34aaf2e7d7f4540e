"""Recomputes the activations of modules in the backward pass instead of keeping them.

    full         forward keeps the module's inputs          backward runs its forward again
    selective    and the outputs of products (kept.py)      the same, without these products
    partitioned  a part of its inputs (kept.py)             gathers them, then as full

All use torch.utils.checkpoint without reentrant autograd, around the module's own `forward`, so
hooks on the module run once. The second forward ends at the last tensor that autograd needs. It
computes the same as the first:

    random numbers        are drawn from the same states of the generators
    function modes        around the forward pass (torch.overrides) are entered again
    attributes, buffers   are those that the first found, and what the second writes is dropped
    objects as arguments  are copies of what the first was given (a cache of transformers)
    parameters            are gathered: the backward pass of the module has gathered them
    collectives           inside of the module are sent again, by all ranks
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.checkpoint import checkpoint

from shardwise.comm.world import Axis
from shardwise.core.tools.structure import graph_break
from shardwise.core.tools.tree import leaves, mapped
from shardwise.techniques.recompute.host_activations import HostActivations, same
from shardwise.techniques.recompute.kept import (
    Generators,
    Inputs,
    KeptInput,
    KeptProducts,
    ModuleState,
)

Keep = Callable[[Tensor], Tensor]
FULL, SELECTIVE, PARTITIONED, NONE = "full", "selective", "partitioned", "none"
#: Other arguments may change in the first forward, as a cache of keys and values does.
_VALUES: Final = {Tensor, nn.Parameter, type(None), bool, int, float, str, tuple, list, dict}
_AGAIN: Final = ContextVar("again", default=False)


def computes_again() -> bool:
    return _AGAIN.get()


def _copy(x: Any) -> Any:
    try:
        return copy.deepcopy(x, {id(t): t for t in leaves(x, Tensor, objects=True)})
    except (TypeError, ValueError, RuntimeError):
        return x


class Recomputed:
    """Replaces the forward of a module by one with recomputation; `kind` may change later. `axis`
    has the ranks over which PARTITIONED splits inputs that are the same on all of them. With `host`
    what is kept rests there. `keep` copies inputs that a gradient reaches to an arena.
    """

    def __init__(
        self,
        module: nn.Module,
        kind: str,
        generators: Generators,
        axis: Axis | None = None,
        host: HostActivations | None = None,
        keep: Keep | None = None,
    ) -> None:
        self.forward, self.kind, self.generators = module.forward, kind, generators
        self.axis, self.host, self.keep = axis, host, keep
        self.alive: WeakSet[_First] = WeakSet()
        self.parts = list(module.modules())  # itself is the first
        self.run = graph_break(self._run)
        self.__wrapped__ = module.forward  # for inspect.signature
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.kind == NONE or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        products = KeptProducts() if self.kind == SELECTIVE else None
        every: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        objects = {k: x for k, x in every.items() if type(x) not in _VALUES and not callable(x)}
        changing = {key: _copy(x) for key, x in objects.items()}
        forward = partial(self._forward, changing) if changing else self.forward
        run, given, inputs = partial(forward, **kwargs), args, None
        axis = self.axis if self.kind == PARTITIONED else None
        if axis is not None or self.host is not None or self.keep is not None:
            inputs = Inputs(axis, (args, kwargs), self.host, self.keep)
            run, given = partial(self._with_inputs, forward, inputs), ()
        first = _First(self, products, inputs or mapped(Tensor.detach, (args, kwargs), Tensor))
        self.alive.add(first)
        out = checkpoint(
            run,
            *given,
            use_reentrant=False,
            preserve_rng_state=False,  # the engine's generators are replayed here
            # a dry run has tensors on two devices
            determinism_check="none" if self._on_meta(args) else "default",
            context_fn=lambda: (first, _Again(first)),
        )
        if products is not None:
            products.drop(out)  # its reader may write to it
            if self.host is not None:
                products.replace(self.host.keep)
        return out

    def _on_meta(self, args: Any) -> bool:
        params = (p for m in self.parts for p in dict.values(m._parameters) if p is not None)
        return any(x.is_meta for x in (*leaves(args, Tensor), *params))

    def release(self) -> None:
        """Give the module its own forward back, so that no reference cycle keeps it."""
        vars(self.parts[0]).pop("forward", None)
        del self.forward, self.__wrapped__, self.parts

    def kept_tensors(self) -> Iterator[Tensor]:
        """The kept inputs and outputs of products, for passes whose backward has not run yet."""
        for first in list(self.alive):
            inputs = first.inputs.kept if isinstance(first.inputs, Inputs) else first.inputs
            outputs = first.products.outputs if first.products is not None else {}
            yield from leaves((inputs, dict(outputs)), Tensor)

    def slots(self) -> Counter[int]:
        """The sizes of kept inputs on the device that a gradient reaches: slots of an arena."""
        kept = (first.inputs.kept for first in list(self.alive) if isinstance(first.inputs, Inputs))
        every = (x.held for x in leaves([*kept], KeptInput, objects=True) if x.trained)
        return Counter(x.nbytes for x in every if isinstance(x, Tensor))

    def _with_inputs(self, forward: Callable[..., Any], inputs: Inputs) -> Any:
        own, named = inputs.take()
        return forward(*own, **named)

    def _forward(self, found: Mapping[Any, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute with arguments, by place or name, as the first forward has `found` them."""
        again = {key: _copy(x) for key, x in found.items()} if computes_again() else {}
        own = [again.pop(place, x) for place, x in enumerate(args)]
        return self.forward(*own, **kwargs | again)

    def __reduce__(self) -> Any:
        """A copy of the module keeps its activations."""
        return same, (self.forward,)


class _First:
    """Around the forward pass: records the state that it finds, and keeps outputs of products."""

    def __init__(self, of: Recomputed, products: KeptProducts | None, inputs: Any) -> None:
        self.generators, self.products, self.inputs = of.generators, products, inputs
        self.found = ModuleState(of.parts)
        self.states: list[Tensor] | None = None
        self.modes = list[TorchFunctionMode]()
        self.entered = ExitStack()

    def __enter__(self) -> Self:
        self.states = self.generators.states()
        self.modes = _get_current_function_mode_stack()
        if self.products is not None:
            self.entered.enter_context(self.products.keeping())
        return self

    def __exit__(self, *_: object) -> None:
        self.entered.close()
        self.found.end()
        if all(map(torch.equal, self.states or (), self.generators.states())):
            self.states = None  # nothing was drawn


class _Again:
    """Around the recomputation, one in each backward pass through the module."""

    def __init__(self, first: _First) -> None:
        self.first = first

    def __enter__(self) -> Self:
        first, self.entered = self.first, ExitStack()
        self.entered.callback(_AGAIN.reset, _AGAIN.set(True))
        active = _get_current_function_mode_stack()
        for mode in [mode for mode in first.modes if mode not in active]:
            _push_mode(mode)  # `with mode` may change more: torch.device sets its own state
            self.entered.callback(_pop_mode)
        self.entered.enter_context(first.found.again())
        if first.states is not None:
            self.entered.enter_context(first.generators.replay(first.states))
        if first.products is not None:
            self.entered.enter_context(first.products.replaying())
        return self

    def __exit__(self, *_: object) -> None:
        self.entered.close()
