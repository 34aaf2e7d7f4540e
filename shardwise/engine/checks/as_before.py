"""Undoes the side effects of calls that the program did not ask for: traces and comparisons.

Restored are the states of random generators (Python's, NumPy's, and those that functions hold;
unchanged.py restores torch's own), variables that functions close over or read from their modules
and classes, and the lists, dicts, sets, tensors and objects of the program in them. Caches of
functools are cleared.
"""

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from functools import _lru_cache_wrapper, partial
from types import FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.agreement.doubts import installed, layers_of, read_by
from shardwise.core.tools.tree import PLAIN

#: The most items of a container that is searched, objects in all, and elements of tensors in all.
_MOST_ITEMS: Final = 4096
_MOST_OBJECTS: Final = 2**14
_MOST_ELEMENTS: Final = 2**24
_CONTAINERS: Final = list | dict | set | deque
#: The attributes that every module has.
_OF_MODULES: Final = {*vars(nn.Module())}


@contextmanager
def as_before(
    functions: Iterable[Any], *models: nn.Module, seed: int | None = None
) -> Iterator[None]:
    """Restore at the end what `functions` and the forwards of `models` hold. Attributes of the
    models are not restored, since the calls run on copies. `seed` seeds Python's and NumPy's
    generators.
    """
    with ExitStack() as stack:
        modules = [module for model in models for module in model.modules()]
        held = _Held(stack, {*map(id, modules)})
        held.note(random)
        if (numpy := sys.modules.get("numpy")) is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        for function in functions:
            held.note(function)
        for kind in {*map(type, modules)}:
            held.note(kind.forward, kind)
        if seed is not None:
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed)
        yield


class _Held:
    """Registers on `stack` how to restore each object that is found; `seen` are ids to skip."""

    def __init__(self, stack: ExitStack, seen: set[int]) -> None:
        self.stack, self.seen = stack, seen
        self.kept = list[Any]()  # so that no other object gets the id of one that was seen
        self.elements = 0  # of the tensors that are copied

    def note(self, x: Any, owner: type | None = None) -> None:
        """Register an object and what it holds; `owner`: the class whose forward a function is."""
        if isinstance(x, PLAIN) or id(x) in self.seen or len(self.kept) == _MOST_OBJECTS:
            return
        self.seen.add(id(x))
        self.kept.append(x)
        if isinstance(x, _lru_cache_wrapper):
            self.stack.callback(x.cache_clear)
        if (generator := _generator(x)) is not None:
            self.stack.callback(*generator)
        elif isinstance(x, Tensor):
            self._tensor(x)
        elif isinstance(x, tuple | _CONTAINERS):
            self._container(x)
        elif callable(x) and not isinstance(x, type | nn.Module):
            for each in layers_of(x):
                self._function(each, owner)
        elif not (isinstance(x, type | ModuleType) or _foreign(type(x))):
            self._attributes(x)

    def _tensor(self, x: Tensor) -> None:
        fits = self.elements + x.numel() <= _MOST_ELEMENTS
        if fits and not isinstance(x, nn.Parameter) and not x.is_meta:
            self.elements += x.numel()
            self.stack.callback(_written, x, x._version, x.detach().clone())

    def _container(self, x: Any) -> None:
        if len(x) <= _MOST_ITEMS:
            if not isinstance(x, tuple):
                self.stack.callback(_refilled, x, copy(x))
            for each in [*(x.values() if isinstance(x, dict) else x)]:
                self.note(each)

    def _function(self, x: Any, owner: type | None) -> None:
        self.note(getattr(x, "__self__", None))
        if isinstance(x, partial):
            self.note((x.args, x.keywords))
        if not hasattr(x, "__code__") and not _foreign(type(x)):
            self._attributes(x)
            x, owner = type(x).__call__, type(x)
        if isinstance(x, FunctionType) and not installed(x):
            for cell in x.__closure__ or ():
                with suppress(ValueError):  # it has no value yet
                    self.stack.callback(setattr, cell, "cell_contents", cell.cell_contents)
                    self.note(cell.cell_contents)
            for path, value in read_by(x, owner).items():
                of, _, name = path.rpartition(".")
                # a default or a closed-over variable may have the name of a global
                if not of and name in x.__globals__ and x.__globals__[name] is value:
                    self.stack.callback(x.__globals__.__setitem__, name, value)
                self.note(value)
        for name, value in [*vars(owner).items()] if owner else ():
            if not (callable(value) or hasattr(value, "__get__") or name.startswith("__")):
                self.stack.callback(setattr, owner, name, value)
                self.note(value)

    def _attributes(self, x: Any) -> None:
        """Register the attributes of an object, without those that every module has."""
        modules = [*x.modules()] if isinstance(x, nn.Module) else []
        self.seen |= {id(module) for module in modules}
        tables = [table for m in modules for table in (vars(m), m._buffers)]
        for table in tables or [getattr(x, "__dict__", {})]:
            mine = {name: value for name, value in table.items() if name not in _OF_MODULES}
            self.stack.callback(_renamed, table, mine)
            for value in mine.values():
                self.note(value)


def _written(x: Tensor, version: int, before: Tensor) -> None:
    if x._version != version:
        x.data.copy_(before)


def _generator(x: Any) -> tuple[Any, ...] | None:
    """The call that restores a random generator to its present state; None for other objects."""
    if isinstance(x, torch.Generator):
        return x.set_state, x.get_state()
    if isinstance(x, random.Random) or x is random:
        return x.setstate, x.getstate()
    if type(x).__module__.startswith("numpy.random") and hasattr(x, "bit_generator"):
        return setattr, x.bit_generator, "state", x.bit_generator.state
    return None


def _renamed(table: dict[str, Any], before: dict[str, Any]) -> None:
    for name in [name for name in table if name not in _OF_MODULES and name not in before]:
        del table[name]
    table.update(before)


def _foreign(kind: type) -> bool:
    """Whether a class belongs to Python, a library, or this package."""
    module = sys.modules.get(kind.__module__)
    package = kind.__module__.partition(".")[0]
    path = getattr(module, "__file__", None) or ""
    return "-packages" in path or package in ("shardwise", *sys.stdlib_module_names)


def _refilled(x: Any, before: Any) -> None:
    x.clear()
    x.update(before) if isinstance(x, dict | set) else x.extend(before)
