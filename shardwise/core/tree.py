"""this file is how values in containers are changed: in lists, tuples, dicts and dataclasses."""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, cast

#: What most values beside tensors are: never looked into.
_PLAIN = (type(None), bool, int, float, str, type)


def mapped(change: Callable[[Any], Any], x: Any, kind: type) -> Any:
    """`x` with `change` done to every `kind` in it, in order; `x` itself where nothing changes.

    Looked into are tuples (named ones too), lists, dicts and dataclasses, with what is made of
    them; a container in which something changes is copied.
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


def leaves(x: Any, kind: type) -> list[Any]:
    """Every `kind` in `x`, in the order of `mapped`."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    mapped(note, x, kind)
    return found


def _sequence(change: Callable[[Any], Any], x: Any, kind: type) -> Any:
    new = [mapped(change, old, kind) for old in x]
    if all(a is b for a, b in zip(new, x, strict=True)):
        return x
    return type(x)(*new) if hasattr(x, "_fields") else type(x)(new)


def _items(change: Callable[[Any], Any], x: dict[Any, Any], kind: type) -> Any:
    new = {key: mapped(change, old, kind) for key, old in x.items()}
    if all(new[key] is old for key, old in x.items()):
        return x
    if type(x) is dict:
        return new
    made = copy.copy(x)
    for key, value in new.items():
        made[key] = value
    return made


def _fields(change: Callable[[Any], Any], x: Any, kind: type) -> Any:
    old = {field.name: getattr(x, field.name) for field in fields(x)}
    new = {name: mapped(change, value, kind) for name, value in old.items()}
    if all(new[name] is value for name, value in old.items()):
        return x
    made = copy.copy(x)
    for name, value in new.items():
        object.__setattr__(made, name, value)  # frozen ones too: the copy is nobody else's yet
    return made
