"""Mapping over nested containers without torch: lists, tuples, dicts and dataclasses."""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, cast

#: Types that are never containers, for speed.
_PLAIN = (type(None), bool, int, float, str, type)

#: A type, or several, as for isinstance.
Kind = type | tuple[type, ...]


def mapped(change: Callable[[Any], Any], x: Any, kind: Kind) -> Any:
    """Apply `change` to every `kind` in `x`, in order. Returns `x` itself if nothing changes.

    Descends into tuples, named tuples, lists, dicts, dataclasses and their subclasses. A container
    with a changed value is copied.
    """
    if isinstance(x, kind):
        return change(x)
    if isinstance(x, _PLAIN):
        return x
    if isinstance(x, tuple | list):
        return _sequence(change, cast("list[Any]", x), kind)
    if isinstance(x, dict):
        return _items(change, cast("dict[Any, Any]", x), kind)
    return _fields(change, x, kind) if is_dataclass(x) else x


def leaves(x: Any, kind: Kind) -> list[Any]:
    """Every `kind` in `x`, in the order of `mapped`."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    mapped(note, x, kind)
    return found


def _sequence(change: Callable[[Any], Any], x: Any, kind: Kind) -> Any:
    new = [mapped(change, old, kind) for old in x]
    if all(a is b for a, b in zip(new, x, strict=True)):
        return x
    make = cast("Callable[..., Any]", type(x))
    if hasattr(x, "_fields"):
        return make(*new)
    if make is not list and hasattr(x, "append"):
        made = _copy(x)
        made[:] = new
        return made
    return make(new)


def _items(change: Callable[[Any], Any], x: dict[Any, Any], kind: Kind) -> Any:
    new = {key: mapped(change, old, kind) for key, old in x.items()}
    if all(new[key] is old for key, old in x.items()):
        return x
    if type(x) is dict:
        return new
    made = _copy(x)
    for key, value in new.items():
        made[key] = value
    return made


def _copy(x: Any) -> Any:
    """A shallow copy; of a container whose constructor copy.copy cannot call, without a call."""
    try:
        return copy.copy(x)
    except TypeError:
        kind = cast("Any", type(x))
        made: Any = kind.__new__(kind)
        made.__dict__.update(vars(x))
        return made


def _fields(change: Callable[[Any], Any], x: Any, kind: Kind) -> Any:
    old = {field.name: getattr(x, field.name) for field in fields(x)}
    new = {name: mapped(change, value, kind) for name, value in old.items()}
    if all(new[name] is value for name, value in old.items()):
        return x
    made = copy.copy(x)
    for name, value in new.items():
        object.__setattr__(made, name, value)  # works for frozen dataclasses; the copy is new
    return made
