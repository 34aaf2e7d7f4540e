"""this file is a table laid on the modules of a model, and what can be wrong with one of them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwise.core.errors import Problem
from shardwise.core.styles import ModuleShape, Style, general, parent
from shardwise.core.tensor_plan import Table, cuts
from shardwise.core.uneven import Cut

__all__ = ["Fault", "Laid", "told"]

_WHOLE = Style("whole")


@dataclass(frozen=True)
class Laid:
    """A table on a model. `styles` has the modules that are to stay whole, too."""

    table: Table
    modules: Mapping[str, ModuleShape]
    sp: bool
    ranks: int
    styles: Mapping[str, Style]

    def cut(self, name: str) -> Cut | None:
        """How the weight of a module is cut."""
        return cuts(self.style(name), self.modules[name], self.table, self.ranks)

    def style(self, name: str) -> Style:
        """The style of a module, "whole" where it has none."""
        return self.styles.get(name, _WHOLE)

    def named(self, name: str) -> Iterator[str]:
        """The modules with a style of this name, in the model's order."""
        return (key for key in self.modules if self.style(key).name == name)

    @cached_property
    def blocks(self) -> frozenset[str]:
        """The modules that have others with an entry in them."""
        found: set[str] = set()
        for name in self.styles:
            while name := parent(name):
                found.add(name)
        return frozenset(found)

    def inside(self, block: str) -> Iterator[str]:
        """The modules in `block` that have a style."""
        there = (name for name in self.styles if name.startswith(f"{block}."))
        return (name for name in there if self.style(name) != _WHOLE)

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self.modules:
            found.setdefault(parent(name), []).append(name)
        return found

    def bare(self, block: str) -> Iterator[str]:
        """The modules right below `block` that have parameters and no entry."""
        there = (name for name in self._children.get(block, []) if name not in self.styles)
        return (name for name in there if name and self.modules[name].parameters)

    def beside(self, name: str) -> Iterator[str]:
        """The modules right below the one that `name` is in, in the model's order."""
        return iter(self._children[parent(name)])


@dataclass(frozen=True)
class Fault:
    """What is wrong with one module; {name} in `instead` is its name for all layers."""

    name: str
    what: str
    allowed: str
    instead: str


def told(faults: Iterable[Fault]) -> Iterator[Problem]:
    """A problem for each kind of fault: modules of other layers that have it too are counted."""
    alike: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        alike.setdefault((general(fault.name), fault.what), []).append(fault)
    for (pattern, _), same in alike.items():
        first = same[0]
        more = f" (and {len(same) - 1} more like it)" if len(same) > 1 else ""
        instead = first.instead.replace("{name}", pattern)
        yield Problem(f"{first.name}{more}, {first.what}", first.allowed, instead)
