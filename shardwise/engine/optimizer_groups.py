"""The options of an optimizer's groups (rates, betas): the recipe's, and what has changed since."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from shardwise.core.errors import bad

#: What a group has besides its options.
NAMING: Final = ("params", "param_names", "name")

Groups = Sequence[dict[str, Any]]
Options = Mapping[str, Any]


def options(group: Options) -> dict[str, Any]:
    """The options of a group that are numbers or tuples of them, as JSON holds them."""
    found = {key: _listed(value) for key, value in group.items() if key not in NAMING}
    return {key: value for key, value in found.items() if _numeric(value)}


def take(group: dict[str, Any], saved: Options) -> None:
    """Set options of a group: a tensor in place, a list as the tuple that it was."""
    for key, value in saved.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def changed(groups: Groups, recipes: Sequence[Options]) -> dict[str, dict[str, Any]]:
    """By group and option what differs from the recipe, as [the recipe's value, this one]."""
    found: dict[str, dict[str, Any]] = {}
    for group, recipe in zip(groups, recipes, strict=True):
        now = options(group)
        pairs = {k: [recipe.get(k), v] for k, v in now.items() if recipe.get(k) != v}
        found |= {group["name"]: pairs} if pairs else {}
    return found


def take_changed(
    groups: Groups, recipes: Sequence[Options], saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Take back what `changed` gave, where this recipe has the value that was changed then.

    So a schedule goes on where it was, and a recipe with another rate begins with that one.
    """
    for group, recipe in zip(groups, recipes, strict=True):
        pairs = saved.get(group["name"], {}).items()
        take(group, {k: now for k, (was, now) in pairs if _listed(recipe.get(k)) == was})


def require_finite_rates(groups: Groups) -> None:
    """Raise InputError for a learning rate, of a scheduler or a program, that is no number."""
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


def _numeric(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_numeric, value))
    return isinstance(value, int | float) and not isinstance(value, bool)
