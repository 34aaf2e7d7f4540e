"""The options of an optimizer's groups (rates, betas): of the specification, and changed since."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from shardwise.core.errors import bad

#: The keys of a group besides its options.
NAMING: Final = ("params", "param_names", "name")
#: Options that choose how torch computes, not what.
_HOW: Final = ("foreach", "fused", "capturable", "differentiable")

Groups = Sequence[dict[str, Any]]
Options = Mapping[str, Any]


def options(group: Options) -> dict[str, Any]:
    """The options of a group that say what it computes, as JSON holds them."""
    found = {k: _listed(value) for k, value in group.items() if k not in (*NAMING, *_HOW)}
    return {key: value for key, value in found.items() if _held(value)}


def put(group: dict[str, Any], saved: Options) -> None:
    """Set options of a group, tensors in place."""
    for key, value in saved.items():
        group[key] = _filled(group.get(key), value)


def _filled(old: Any, value: Any) -> Any:
    if isinstance(old, Tensor):
        return old.fill_(value)
    if isinstance(old, tuple) and isinstance(value, tuple) and len(old) == len(value):
        return tuple(map(_filled, old, value))
    return value


def take(group: dict[str, Any], saved: Options) -> None:
    """Set options of a group that JSON has kept: a list becomes a tuple again."""
    put(group, {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})


def changed(groups: Groups, specs: Sequence[Options]) -> dict[str, dict[str, Any]]:
    """By group and option, values that differ from the spec: [the spec's value, this one]."""
    found: dict[str, dict[str, Any]] = {}
    for group, spec in zip(groups, specs, strict=True):
        now = options(group)
        pairs = {k: [spec.get(k), v] for k, v in now.items() if spec.get(k) != v}
        found |= {group["name"]: pairs} if pairs else {}
    return found


def take_changed(
    groups: Groups, specs: Sequence[Options], saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore the values that `changed` returned, unless this spec has another first value.

    So a schedule continues, and a specification with another rate begins with that rate.
    """
    for group, spec in zip(groups, specs, strict=True):
        pairs = saved.get(group["name"], {}).items()
        take(group, {k: now for k, (was, now) in pairs if _listed(spec.get(k)) == was})


def compared(group: Options, called: str) -> dict[str, Any]:
    """The options that all data ranks must have alike, each by its name and `called`.

    Tensors on a GPU are left out: to read them would wait for it.
    """
    found: dict[str, Any] = {}
    for key, value in ((k, v) for k, v in group.items() if k not in (*NAMING, *_HOW)):
        on_host = not isinstance(value, Tensor) or (value.dim() == 0 and value.device.type == "cpu")
        listed = _listed(value) if on_host else None
        if isinstance(listed, bool) or _numeric(listed):
            found[f"{key} of {called}"] = listed
    return found


def require_finite_rates(groups: Groups) -> None:
    """Raise InputError for a learning rate, of a scheduler or a program, that is not finite."""
    for group in groups:
        lr = group["lr"]
        if not isinstance(lr, int | float | Tensor) or not math.isfinite(lr):
            raise bad(
                f"a learning rate of {lr!r} in the group {group['name']!r} of engine.optimizer",
                "a finite number",
                "engine.set_lr(3e-4), or a scheduler whose rates are finite",
            )


def _listed(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    return [_listed(x) for x in value] if isinstance(value, tuple | list) else value


def _held(value: Any) -> bool:
    """Whether JSON holds the value."""
    if isinstance(value, list):
        return all(map(_held, value))
    return value is None or isinstance(value, int | float | str)


def _numeric(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_numeric, value))
    return isinstance(value, int | float) and not isinstance(value, bool)
