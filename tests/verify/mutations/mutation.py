"""What a mutation is: a name, the plan it concerns, a patch, and what of a proof refuses it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    """A sabotage. `refused_by` is one of parity, bytes, memory, coverage and error.

    Others are facts of the engine that a proof does not state, but the tests (facts.py), and masks
    of dropout (engine/test_recompute.py).
    """

    name: str
    plan: str
    refused_by: str
    apply: Callable[[Patch], None]
    model: str = "layers"

    @property
    def id(self) -> str:
        """The test's id."""
        return f"{self.name} [{self.plan}]"


def nothing(*_: Any, **__: Any) -> None:
    """What a function does that was left out."""


def everywhere(patch: Patch, name: str, real: Any, instead: Any) -> None:
    """Put a function in the place of another in all files that import it."""
    for module in [m for n, m in sys.modules.items() if n.startswith("shardwise")]:
        if vars(module).get(name) is real:
            patch.setattr(module, name, instead)


def around(patch: Patch, owner: Any, name: str, act: Callable[..., Any]) -> None:
    """Put `act(real, *args)` in place of a function or method."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: act(real, *args, **kwargs))
