"""This file is a method that can be called without keeping its owner alive.

Torch hides the hooks on a parameter from the collector. A hook that held whoever owns the parameter
would keep both for ever, with all that hangs on them: process groups and their threads.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """`method`, a bound one, as a function that does nothing once its owner is gone."""
    known = WeakMethod(method)

    def call(*args: Any) -> None:
        own = known()
        if own is not None:
            own(*args)

    call.weakly_of = known  # type: ignore[attr-defined]
    return call


def owner(function: Any) -> Any:
    """The owner of the method that `weakly` made `function` of; None for any other function."""
    method: Any = getattr(function, "weakly_of", lambda: None)()
    return getattr(method, "__self__", None)
