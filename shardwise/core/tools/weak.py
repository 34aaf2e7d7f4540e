"""Weak methods: functions that call a method without keeping its object alive.

Hooks on a parameter are invisible to Python's garbage collector. A hook with a strong reference to
the object that owns the parameter would keep both alive forever, process groups included.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A function that calls the bound `method`, and does nothing once its object is gone."""
    known = WeakMethod(method)

    def call(*args: Any) -> None:
        own = known()
        if own is not None:
            own(*args)

    call.weakly_of = known  # type: ignore[attr-defined]
    return call


def owner(function: Any) -> Any:
    """The object of the method behind a function made by `weakly`; None for other functions."""
    method: Any = getattr(function, "weakly_of", lambda: None)()
    return getattr(method, "__self__", None)
