"""Forward hooks on a user's module that are left out of its copies, and weak methods.

    copy.deepcopy(module), pickle, torch.save        every Hook becomes an Absent
    the copy's first forward                         the Absent removes itself

A hook's driver holds process groups, which can be neither copied nor pickled.  The module itself
can be copied if this rank has its full parameters; otherwise the driver raises an error.

Hooks on a parameter are invisible to Python's garbage collector.  A hook with a strong reference to
the object that owns the parameter would keep both alive forever, process groups included: `weakly`.

While one thread collects, `gc.collect()` returns at once in another, which would then count objects
that only cycles keep alive: `collect` waits, then collects.
"""

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Lock
from types import MethodType
from typing import Any, Final, Protocol
from weakref import ref

from shardwise.core.errors import InputError, bad

#: Attributes of nn.Module with forward hooks, and with their options under the same keys.
_TABLES = ("_forward_pre_hooks", "_forward_hooks")
_NOTES = (
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)

#: Attributes of modules and parameters with hooks that may change what is computed.
_KINDS = (*_TABLES, "_backward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks")


class Driver(Protocol):
    """The owner of hooks."""

    def require_copyable(self) -> None: ...


def no_copy(name: str) -> InputError:
    """The error for a copy of a sharded `name`."""
    return bad(
        f"a copy (copy.deepcopy, pickle, torch.save, AveragedModel) of a sharded {name}",
        "copies of modules whose full values are on every rank, and state dicts",
        "sw.full_state_dict(module_or_engine) on all ranks, for the values; or sw.unwrap(module) "
        "before the copy; for an average of weights the loop in docs/how-to/one-technique.md",
    )


def in_backward(what: str) -> InputError:
    """The error for an optimizer in the backward pass of `what`."""
    return bad(
        f"{what} with an optimizer that is applied in the backward pass "
        "(torch.distributed.optim._apply_optimizer_in_backward)",
        "such an optimizer under sw.DDP only, and one that steps after the backward pass elsewhere",
        "optim = torch.optim.SGD(module.parameters(), lr=0.1), and optim.step() in the loop",
    )


def outside_of_step(what: str, where: str = "outside of engine.step") -> InputError:
    """The error for a backward pass of `what`, which an engine trains, but by its step."""
    return bad(
        f"a backward pass of the model of an engine, a {what}, {where}: its gradients would be "
        "added to those of a step",
        "terms of the loss in loss=, without a backward(): engine.step differentiates them",
        "engine.step(batch); sw.full_state_dict(engine), loaded into a plain model, for gradients "
        "of your own",
    )


class Hook:
    """A forward hook that calls `act`; `driver` decides whether the module can be copied."""

    def __init__(self, driver: Driver, act: Callable[..., Any]) -> None:
        self.driver, self.act = driver, act

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.act(*args, **kwargs)

    def __reduce__(self) -> Any:
        self.driver.require_copyable()
        return Absent, ()


def others_after(p: Any) -> bool:
    """Whether the program has hooks, besides ours, after the accumulation of parameter `p`."""
    return len(p._post_accumulate_grad_hooks or ()) > 1


def program_hooks(owner: Any) -> list[str]:
    """The hooks that the program has on a module or a parameter: kind, function and its line."""
    found: list[str] = []
    for kind in _KINDS:
        hooks: dict[int, Any] = getattr(owner, kind, None) or {}
        for hook in hooks.values():
            function = getattr(hook, "func", hook)
            name = getattr(function, "__qualname__", type(function).__qualname__)
            line = getattr(getattr(function, "__code__", None), "co_firstlineno", "unknown")
            noted = hasattr(getattr(hook, "__self__", hook), "weakly_of")
            if not (noted or f"{function.__module__}".startswith("shardwise.")):
                found.append(f"{kind[1:-1]} {name} (line {line})")
    return found


def nothing(*_: object) -> None: ...


@contextmanager
def in_place_of(model: Any, copied: Any) -> Generator[None]:
    """Give the modules of `model` the attributes of their copies in `copied`, which runs.
    Hooks of the program that a copy calls may refer to the modules that were copied.
    """
    copies = dict[str, Any](copied.named_modules())
    pairs: list[tuple[Any, Any, Any]] = [
        (m, vars(m), vars(copies[n])) for n, m in model.named_modules() if n in copies
    ]
    try:
        for module, _, attributes in pairs:
            object.__setattr__(module, "__dict__", attributes)
        yield
    finally:
        for module, attributes, _ in pairs:
            object.__setattr__(module, "__dict__", attributes)


class Absent:
    """Takes the place of a hook in a copy of a module; removes itself at the first call."""

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> None:
        for name in _TABLES:
            table = getattr(module, name)
            for key in [key for key, hook in table.items() if isinstance(hook, Absent)]:
                del table[key]
                for note in _NOTES:
                    getattr(module, note, {}).pop(key, None)


# --- weak methods ---------------------------------------------------------------------------------


def weakly(method: Callable[..., None], *more: Any) -> Callable[..., None]:
    """A function that calls a bound method, and does nothing once its object is gone."""
    assert isinstance(method, MethodType)
    known, act = ref(method.__self__), method.__func__

    def call(*args: Any) -> None:
        own = known()
        if own is not None:
            act(own, *args, *more)

    call.weakly_of = known  # type: ignore[attr-defined]
    return call


def owner(function: Any) -> Any:
    """The object of the method behind a function made by `weakly`, or behind a method of an object
    with the same attribute; None for other functions.
    """
    return getattr(getattr(function, "__self__", function), "weakly_of", lambda: None)()


# --- garbage collection ---------------------------------------------------------------------------

COLLECTING: Final = Lock()


def collect() -> None:
    with COLLECTING:
        gc.collect()
