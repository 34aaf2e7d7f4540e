"""Mapping over nested containers without torch: all that a program passes values in.

    list, tuple, deque, set, named tuple   their items
    dict and its subclasses, UserDict      their values (BatchEncoding, ModelOutput)
    dataclass, SimpleNamespace             their attributes
    any other object                       its attributes, where `objects` asks for them: a batch,
                                           an output; a cache that layers write to stays itself

Never taken apart: functions and other callables (modules), classes, generators.
"""

import copy
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MappingProxyType, SimpleNamespace
from types import MemberDescriptorType as Slot
from typing import Any, cast

#: Types that are never containers, for speed.
PLAIN = (type(None), bool, int, float, complex, str, bytes, type, range, Enum, BuiltinFunctionType)

#: A type, or several, as for isinstance.
Kind = type | tuple[type, ...]
Change = Callable[[Any], Any]


def mapped(change: Change, x: Any, kind: Kind, *, objects: bool = False) -> Any:
    """Apply `change` to every `kind` in `x`, in order. Returns `x` itself if nothing changes.
    A container with a changed value is copied. `objects`: also in attributes of other objects.
    """
    return _Walk(change, kind, objects)(x)


def leaves(x: Any, kind: Kind, *, objects: bool = False) -> list[Any]:
    """Every `kind` in `x`, in the order of `mapped`."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    mapped(note, x, kind, objects=objects)
    return found


def paths(x: Any, kind: Kind, around: tuple[int, ...] = ()) -> list[tuple[str, Any]]:
    """Every `kind` in `x` with its path ("['ids']", ".starts"); `around`: ids of what `x` is in."""
    if isinstance(x, kind):
        return [("", x)]
    if isinstance(x, PLAIN) or callable(x) or id(x) in around:
        return []
    named = hasattr(x, "_fields")
    if isinstance(x, dict | UserDict):
        inside = [(f"[{key!r}]", value) for key, value in cast("dict[Any, Any]", x).items()]
    elif isinstance(x, tuple | list | deque) and not named:
        inside = [(f"[{n}]", value) for n, value in enumerate(cast("list[Any]", x))]
    else:
        values = cast("dict[str, Any]", cast("Any", x)._asdict() if named else attributes(x))
        inside = [(f".{name}", value) for name, value in values.items()]
    around = (*around, id(cast("Any", x)))
    return [(before + path, leaf) for before, y in inside for path, leaf in paths(y, kind, around)]


def attributes(x: Any) -> dict[str, Any]:
    kinds = [kind for kind in type(x).__mro__ if "__slots__" in vars(kind)]
    slots = [m for kind in kinds for m in vars(kind).values() if isinstance(m, Slot)]
    held = {m.__name__: getattr(x, m.__name__) for m in slots if hasattr(x, m.__name__)}
    return held | getattr(x, "__dict__", {})


def dotted(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested dictionaries, by names with dots."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from dotted(cast(Mapping[str, Any], value), f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def parts(x: Any) -> Iterable[Any] | None:
    """What is in a container or any object; None if that cannot be told."""
    if isinstance(x, FunctionType):
        return None if x.__closure__ else ()
    more = attributes(x)
    if isinstance(x, dict):
        items = cast("dict[Any, Any]", x)
        known = set(map(id, items.values()))  # attributes of a ModelOutput are its items too
        return [*items.values(), *(value for value in more.values() if id(value) not in known)]
    if isinstance(x, list | tuple | set | frozenset | deque):
        return [*cast("list[Any]", x), *more.values()]
    slotted = any("__slots__" in vars(kind) for kind in type(x).__mro__)
    return [*more.values()] if slotted or hasattr(x, "__dict__") else None


class _Walk:
    """One pass over a tree; `done` are objects and what they became: themselves, in a cycle."""

    def __init__(self, change: Change, kind: Kind, objects: bool) -> None:
        self.change, self.kind, self.objects = change, kind, objects
        self.done: dict[int, tuple[Any, Any]] = {}

    def __call__(self, x: Any) -> Any:
        if isinstance(x, self.kind):
            return self.change(x)
        if isinstance(x, PLAIN):
            return x
        if isinstance(x, tuple | list | deque | set | frozenset):
            return self._sequence(cast("list[Any]", x))
        if isinstance(x, dict | UserDict | MappingProxyType):
            return self._items(cast("dict[Any, Any]", x))
        if callable(x) or not (self.objects or is_dataclass(x) or isinstance(x, SimpleNamespace)):
            return x
        if id(x) not in self.done:
            self.done[id(x)] = x, x
            self.done[id(x)] = x, self._attributes(x)
        return self.done[id(x)][1]

    def _sequence(self, x: Any) -> Any:
        new = [self(old) for old in x]
        if all(a is b for a, b in zip(new, x, strict=True)):
            return x
        make = cast("Callable[..., Any]", type(x))
        if hasattr(x, "_fields"):
            return make(*new)
        if make is not list and hasattr(x, "append"):
            made = _copy(x)
            made.clear()
            made.extend(new)
            return made
        return make(new)

    def _items(self, x: Mapping[Any, Any]) -> Any:
        new = {key: self(old) for key, old in x.items()}
        if all(new[key] is old for key, old in x.items()):
            return x
        if type(x) is dict:
            return new
        if isinstance(x, MappingProxyType):
            return MappingProxyType(new)
        made = _copy(x)
        for key, value in new.items():
            made[key] = value
        return made

    def _attributes(self, x: Any) -> Any:
        old = attributes(x)
        new = {name: self(value) for name, value in old.items()}
        changed = {name: value for name, value in new.items() if value is not old[name]}
        made = _copy(x) if changed else x
        for name, value in changed.items():
            object.__setattr__(made, name, value)  # works for frozen dataclasses; the copy is new
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
