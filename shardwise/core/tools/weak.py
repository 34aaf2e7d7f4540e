"""Weak methods: functions that call a method without keeping its object alive.

Hooks on a parameter are invisible to Python's garbage collector. A hook with a strong reference to
the object that owns the parameter would keep both alive forever, process groups included.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import ref


def weakly(method: Callable[..., None], *more: Any) -> Callable[..., None]:
    """A function that calls the bound `method`, and does nothing once its object is gone.

    `more` are further arguments, after those of the call.
    """
    assert isinstance(method, MethodType)
    known, act = ref(method.__self__), method.__func__

    def call(*args: Any) -> None:
        own = known()
        if own is not None:
            act(own, *args, *more)

    call.weakly_of = known  # type: ignore[attr-defined]
    return call


def owner(function: Any) -> Any:
    """The object of the method behind a function made by `weakly`; None for other functions."""
    return getattr(function, "weakly_of", lambda: None)()
