"""Intercepts the glue of a model: the operations between its layers, one by one.

`Glue` is a torch function mode: it sees each function that the user's forward calls outside of
layers, and passes operations on values to its player. Reading an attribute of a value is not glue:
an absent value has the shape and dtype of the real one, and reports the real one's device. An
operation that uses only the shape or the dtype of a value, as `mask.to(x)` or `angle.type_as(x)`,
is common (stage.py). Inside of a layer the mode is off the stack, and costs nothing.
"""

import os
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from shardwise.core.errors import bad

#: Where code is that is not the program's.
_LIBRARIES: Final = (
    f"{Path(__file__).resolve().parents[3]}{os.sep}",
    f"{Path(torch.__file__).parent}",
)
_PYTHON: Final = sysconfig.get_path("stdlib")


class Player(Protocol):
    """Executes the operations and calls of layers that `Glue` intercepts."""

    def without_values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any: ...
    def op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any: ...
    def layer(self, of: Any, args: Any, kwargs: dict[str, Any]) -> Any: ...


#: What differentiates in the middle of a forward.
_GRADIENTS: Final = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
#: Attributes that report the device of a value: `Glue` answers with the real value's device.
_ANSWERS: Final[dict[Any, Callable[[torch.device], Any]]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.get_device: lambda device: -1 if device.index is None else device.index,
    **{
        getattr(Tensor, f"is_{kind}").__get__: lambda device, kind=kind: device.type == kind
        for kind in ("cpu", "cuda", "mps", "xpu", "meta")
    },
}
#: The function by which nn.TransformerEncoder decides in evaluations.
_LOOKS_AT_PADDING: Final = vars(torch)["_nested_tensor_from_mask_left_aligned"]
#: Functions that use only the dtype or the shape of their second argument.
_LENT: Final[dict[Any, Callable[..., Tensor]]] = {
    Tensor.to: lambda x, like, *how, **named: x.to(like.dtype, *how, **named),
    Tensor.type_as: lambda x, like: x.to(like.dtype),
    Tensor.expand_as: lambda x, like: x.expand(like.shape),
    Tensor.view_as: lambda x, like: x.view(like.shape),
    Tensor.reshape_as: lambda x, like: x.reshape(like.shape),
}


class Seen:
    """Which tensors are values, and their numbers; tensors are not kept alive. `parameters` are
    values from the start, by id: their owners keep them alive.
    """

    def __init__(self, parameters: Mapping[int, int]) -> None:
        self.parameters = parameters
        self.table: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def put(self, x: Tensor, number: int) -> None:
        self.table[id(x)] = (weakref.ref(x), number)

    def number(self, x: Tensor) -> int | None:
        found = self.table.get(id(x))
        if found is not None and found[0]() is x:
            return found[1]
        return self.parameters.get(id(x))

    def any(self, values: Iterable[Any]) -> bool:
        """Whether a value is among these, or in lists among them."""
        for x in values:
            if isinstance(x, Tensor):
                if self.number(x) is not None:
                    return True
            elif isinstance(x, tuple | list):
                if self.any(x):
                    return True
            elif isinstance(x, dict) and self.any(x.values()):
                return True
        return False


class Glue(TorchFunctionMode):
    """Passes a forward's glue to `player`. `device` is the device of the real values."""

    def __init__(self, player: Player, seen: Seen, device: torch.device) -> None:
        super().__init__()
        self.player, self.seen, self.device = player, seen, device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (self.seen.any(args) or (kwargs and self.seen.any(kwargs.values()))):
            return self.player.without_values(func, args, kwargs)
        lent = func in _LENT and len(args) > 1 and isinstance(args[1], Tensor)
        if lent and self.seen.number(args[0]) is None:
            return _LENT[func](*args, **kwargs)
        if func in _GRADIENTS:
            raise bad(
                "a gradient inside of the forward of a pipeline, through stages of other ranks",
                "losses without torch.autograd.grad or backward",
                "'dp2', or the same plan without pp, its schedule and zero3",
            )
        if func in _ANSWERS and args[0].is_meta:
            return _ANSWERS[func](self.device)
        if func is _LOOKS_AT_PADDING:
            return False  # nn.TransformerEncoder evaluates without nested tensors, as it trains
        return self.player.op(func, args, kwargs)

    def layer(self, of: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a layer, with this mode off the stack and the user's modes on it."""
        if _get_current_function_mode() is self:  # the usual case
            _pop_mode()
            try:
                return self.player.layer(of, args, kwargs)
            finally:
                _push_mode(self)
        stack = _get_current_function_mode_stack()
        depth = next((i for i, mode in enumerate(stack) if mode is self), len(stack))
        above = stack[depth + 1 :]
        _take(len(stack) - depth)
        _give(above)
        try:
            return self.player.layer(of, args, kwargs)
        finally:
            _take(len(above))
            _give(stack[depth:])


def _take(count: int) -> None:
    for _ in range(count):
        _pop_mode()


def _give(modes: Iterable[TorchFunctionMode]) -> None:
    for mode in modes:
        _push_mode(mode)


def name_of(what: Any) -> str:
    """A layer's name, or the name by which a program calls torch's function."""
    if isinstance(what, str):
        return what
    name = getattr(what, "__name__", str(what))
    return getattr(what.__self__, "__name__", name) if name in ("__get__", "__set__") else name


def line() -> str:
    """The line of the program that runs, such as "model.py:12", innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        python = path.startswith(_PYTHON) and "site-packages" not in path
        if Path(path).is_absolute() and not path.startswith(_LIBRARIES) and not python:
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "the forward"


# --- in place of a layer ----------------------------------------------------------------------


@dataclass
class Of:
    """The layer behind a stand-in: the twin's, and on the ranks that own it the real one."""

    name: str
    stages: tuple[int, ...]
    twin: nn.Module
    real: nn.Module | None
    player: Glue | None = None
    following: bool = False

    @property
    def answers(self) -> Any:
        return self.twin if self.real is None or self.following else self.real


class StandIn(nn.Module):
    """Takes the place of a layer; outside of a stage it has no parameters and no state."""

    @staticmethod
    def of_kind(of: Of) -> "StandIn":
        """A stand-in whose class has the name of the layer's class, which a forward may read."""
        kind = type(of.twin)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        return type(kind.__name__, (StandIn,), names)(of)

    def __reduce_ex__(self, _: Any) -> Any:
        """As a plain StandIn: pickle cannot import the class that `of_kind` made."""
        return StandIn, (vars(self)["_of"],)

    def __init__(self, of: Of) -> None:
        super().__init__()
        vars(self)["_of"] = of
        del vars(self)["training"]  # the layer's

    @property
    def __class__(self) -> type:
        """The layer's in a stage, where a forward may choose by `isinstance(layer, Attention)`."""
        return type(self if vars(self)["_of"].player is None else vars(self)["_of"].twin)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hooks that a loss or a forward registers here run between the layers, as glue."""
        if self._backward_hooks or self._backward_pre_hooks:
            raise bad(
                f"a backward hook put on {vars(self)['_of'].name} while a pipeline runs",
                "backward hooks on layers before the step; forward hooks at any time",
                "the hook where the model is built, or a plan without pp",
            )
        return (super().__call__ if any(hooks_of(self)) else self.forward)(*args, **kwargs)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Pass the call to the player; outside of a stage, call the layer (in a recomputation)."""
        of: Of = vars(self)["_of"]
        if of.player is not None:
            return of.player.layer(of, args, kwargs)
        if of.real is None or any(isinstance(x, Tensor) and x.is_meta for x in args):
            whose = "which is on another rank" if of.real is None else "of another rank's tensor"
            raise bad(
                f"a call of {of.name}, {whose}, outside of its stage",
                "recomputation (torch.utils.checkpoint) within one layer, or around one",
                f"checkpoint({of.name}, x, use_reentrant=False)",
            )
        return of.real(*args, **kwargs)

    def _load_from_state_dict(self, *_: Any) -> None:
        """The state of the layer is for its own rank."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["_of"].answers, name)

    def __len__(self) -> int:
        return len(vars(self)["_of"].answers)

    def __bool__(self) -> bool:
        return bool(vars(self)["_of"].answers)

    def __getitem__(self, key: Any) -> Any:
        return vars(self)["_of"].answers[key]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set it on the layer, so that a forward or a loss that sets it computes with it."""
        of: Of = vars(self)["_of"]
        if isinstance(value, Tensor | nn.Module):
            raise bad(
                f"{of.name}.{name} set to a {type(value).__name__} while a pipeline runs",
                "tensors as arguments of a layer: only those reach the rank that has it",
                f"self.{of.name}(x, {name}), or a plan without pp",
            )
        setattr(of.answers, name, value)

    def train(self, mode: bool = True) -> "StandIn":
        vars(self)["_of"].answers.train(mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> "StandIn":
        if requires_grad:  # what is frozen later still has the gradients of its stage
            vars(self)["_of"].twin.requires_grad_()
        return self

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """During a stage, the layer's own, so that a loss may read it."""
        of: Of = vars(self)["_of"]
        found = super().state_dict if of.player is None else of.answers.state_dict
        return found(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Any:
        """During a stage, the layer's own: a model may ask for its first parameter."""
        of: Of = vars(self)["_of"]
        whose = super() if of.player is None else of.answers
        return whose.named_modules(memo, prefix, remove_duplicate)


def hooks_of(stand_in: StandIn) -> tuple[dict[int, Any], ...]:
    forward = stand_in._forward_pre_hooks, stand_in._forward_hooks
    return *forward, stand_in._backward_pre_hooks, stand_in._backward_hooks
