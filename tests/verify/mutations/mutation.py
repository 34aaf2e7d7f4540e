"""What a mutation is: a name, the plan it concerns, a patch, and what of a proof refuses it.

    drop(owner, name)               the function does nothing
    instead(owner, name, value)     another function or value
    around(owner, name, act)        act(real, *args)
    result(owner, name, act)        act(found, *args): another result
    arguments(owner, name, act)     act(*args): other arguments
    before(owner, name, act)        act(*args), then the function
    after(owner, name, act)         the function, then act(*args)
    skip(owner, name, when)         not called where when(*args)
    beside(owner, name, **values)   attributes of the first argument replaced during the call

`all_of` makes several changes, and `everywhere` one in all files that import the function.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest

Patch = pytest.MonkeyPatch
Change = Callable[[Patch], None]
Act = Callable[..., Any]
ROW = re.compile(r"(.+) \[(.+?)(?: of (\w+))?\](?: (.+))?")


@dataclass(frozen=True)
class Mutation:
    """A sabotage. `refused_by` is one of parity, bytes, memory, coverage and error. What a proof
    does not state is a fact of the engine (FACTS), or `tests`, which `make mutants` judges.
    """

    name: str
    plan: str
    model: str
    apply: Change
    refused_by: str

    @property
    def id(self) -> str:
        return f"{self.name} [{self.plan}]"


class Rows(dict[str, Change]):
    """Changes by "name [plan] part". A plan may end in a model, `tp2 of gpt`, else it is `layers`;
    without a part it is parity.
    """

    def around(self, on: str, owner: Any, name: str, part: str = "parity") -> Callable[[Act], Act]:
        """Add the function below, as what is put around another: its name is the mutation's."""

        def added(act: Act) -> Act:
            self[f"{act.__name__.replace('_', ' ')} [{on}] {part}"] = around(owner, name, act)
            return act

        return added


def mutations(rows: Rows) -> list[Mutation]:
    """The mutations of a table."""
    found = list[Mutation]()
    for row, change in rows.items():
        name, plan, model, part = cast("re.Match[str]", ROW.fullmatch(row)).groups()
        found.append(Mutation(name, plan, model or "layers", change, part or "parity"))
    return found


def nothing(*_: Any, **__: Any) -> None:
    """What a function does that was left out."""


def instead(owner: Any, name: str, value: Any) -> Change:
    return lambda patch: patch.setattr(owner, name, value)


def drop(owner: Any, name: str) -> Change:
    return instead(owner, name, nothing)


def around(owner: Any, name: str, act: Act) -> Change:
    def apply(patch: Patch) -> None:
        real = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: act(real, *args, **kwargs))

    return apply


def result(owner: Any, name: str, act: Act) -> Change:
    return around(owner, name, lambda real, *args, **how: act(real(*args, **how), *args))


def arguments(owner: Any, name: str, act: Act) -> Change:
    return around(owner, name, lambda real, *args, **how: real(*act(*args), **how))


def before(owner: Any, name: str, act: Act) -> Change:
    def call(real: Act, *args: Any, **how: Any) -> Any:
        act(*args)
        return real(*args, **how)

    return around(owner, name, call)


def after(owner: Any, name: str, act: Act) -> Change:
    def call(real: Act, *args: Any, **how: Any) -> Any:
        found = real(*args, **how)
        act(*args)
        return found

    return around(owner, name, call)


def skip(owner: Any, name: str, when: Act) -> Change:
    return around(owner, name, lambda real, *args: None if when(*args) else real(*args))


def beside(owner: Any, name: str, **values: Any) -> Change:
    def call(real: Act, instance: Any, *args: Any) -> Any:
        with replaced(instance, **values):
            return real(instance, *args)

    return around(owner, name, call)


def all_of(*changes: Change) -> Change:
    def apply(patch: Patch) -> None:
        for change in changes:
            change(patch)

    return apply


def everywhere(owner: Any, name: str, act: Act) -> Change:
    """`act(real, *args)` in the place of a function, in all files that import it."""

    def apply(patch: Patch) -> None:
        real = getattr(owner, name)
        for module in [m for n, m in sys.modules.items() if n.startswith("shardwise")]:
            if vars(module).get(name) is real:
                around(module, name, act)(patch)

    return apply


@contextmanager
def replaced(instance: Any, **values: Any) -> Iterator[None]:
    """Attributes of one object replaced for a while."""
    kept = {name: vars(instance)[name] for name in values.keys() & vars(instance).keys()}
    vars(instance).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(instance)[name]
        vars(instance).update(kept)
