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
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor
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
        if hasattr(Tensor, f"is_{kind}")
    },
}
#: The function by which nn.TransformerEncoder decides in evaluations; newer torch may not have it.
_LOOKS_AT_PADDING: Final = vars(torch).get("_nested_tensor_from_mask_left_aligned")
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
        if func in _LENT and self._lends(args):
            return _LENT[func](*args, **kwargs)
        if func in _GRADIENTS:
            raise bad(
                "a gradient inside of the forward of a pipeline (a gradient penalty, say): its "
                "backward pass would run through the stages of other ranks",
                "losses without torch.autograd.grad or backward, or a plan without pp",
                "'dp2', or the same plan without pp, its schedule and zero3",
            )
        if func in _ANSWERS and args[0].is_meta:
            return _ANSWERS[func](self.device)
        if func is _LOOKS_AT_PADDING:
            return False  # nn.TransformerEncoder evaluates without nested tensors, as it trains
        return self.player.op(func, args, kwargs)

    def _lends(self, args: Any) -> bool:
        lent = len(args) > 1 and isinstance(args[1], Tensor)
        return lent and self.seen.number(args[0]) is None

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
