"""Hooks on a user's module that do not travel with copies of it.

    copy.deepcopy(module), pickle, torch.save        every Hook becomes an Absent
    the copy's first forward                         the Absent removes itself

What drives a module holds process groups, which can be neither copied nor pickled.  The values of
its parameters can, unless this rank has only a part of them: then the driver refuses the copy.
"""

from collections.abc import Callable
from typing import Any, Protocol

from shardwise.core.errors import InputError, bad

#: Where nn.Module keeps its forward hooks, and what it notes of each by the same number.
_TABLES = ("_forward_pre_hooks", "_forward_hooks")
_NOTES = (
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)


class Driver(Protocol):
    """What drives the modules that its hooks are on."""

    def require_copyable(self) -> None:
        """Raise InputError if a copy of the module would not have all of its values."""
        ...


def no_copy(name: str) -> InputError:
    """The error for a copy of a `name` of whose values each rank has a part."""
    return bad(
        f"a copy (copy.deepcopy, pickle, torch.save) of a {name} of whose values each rank holds "
        "a part",
        "copies of modules that every rank holds whole, and state dicts",
        "sw.full_state_dict(module_or_engine) on all ranks, for the values; before the copy "
        "sw.unwrap(module), under sw.FSDP",
    )


def in_backward(what: str) -> InputError:
    """The error for an optimizer in the backward pass of `what`."""
    return bad(
        f"{what} with an optimizer that is applied in the backward pass "
        "(torch.distributed.optim._apply_optimizer_in_backward)",
        "that under sw.DDP, and elsewhere an optimizer that steps after the backward pass",
        "optim = torch.optim.SGD(module.parameters(), lr=0.1), and optim.step() in the loop",
    )


class Hook:
    """A forward hook of `driver`, which calls `act`."""

    def __init__(self, driver: Driver, act: Callable[..., Any]) -> None:
        self.driver, self.act = driver, act

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.act(*args, **kwargs)

    def __reduce__(self) -> Any:
        self.driver.require_copyable()
        return Absent, ()


def nothing(*_: object) -> None:
    """What a hook does that only stands for its driver."""


class Absent:
    """What a copy of a module has in place of a hook, until it is called for the first time."""

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> None:
        for name in _TABLES:
            table = getattr(module, name)
            for key in [key for key, hook in table.items() if isinstance(hook, Absent)]:
                del table[key]
                for note in _NOTES:
                    getattr(module, note, {}).pop(key, None)
