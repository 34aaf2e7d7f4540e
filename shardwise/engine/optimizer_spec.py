"""this file is the recipe of an optimizer: a class of torch.optim and its options, tried at once.

A recipe is made before there are parameters, and of a class that treats every element alike. What
the class refuses (an option it does not have, a rate below 0) is refused when the recipe is made,
by trying it on a parameter of two elements.
"""

import inspect
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.errors import bad
from shardwise.engine.elementwise import ELEMENTWISE, needs_whole


@dataclass(frozen=True)
class Recipe:
    """A class of torch.optim and its options, before there are parameters to give it.

    groups maps patterns of parameter names ("*norm*", "*.bias") to options of their own; the first
    pattern that fits wins.
    """

    kind: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Try the options on a parameter of two elements, so that torch refuses them here."""
        if not isinstance(self.kind, type) or not issubclass(self.kind, Optimizer):
            given = getattr(self.kind, "__name__", None) or repr(self.kind)[:60]
            raise bad(f"sw.Optim({given})", _OPTIMIZERS, "sw.Optim(torch.optim.RMSprop, lr=1e-3)")
        named = isinstance(self.groups, dict) and all(map(_is_options, self.groups.values()))
        if not named:
            raise bad(
                f"groups={repr(self.groups)[:60]}",
                "options by patterns of parameter names; the parameters themselves are the plan's",
                f'sw.{_maker(self.kind)}lr=3e-4, groups={{"*.bias": {{"weight_decay": 0.0}}}})',
            )
        for own in ({}, *self.groups.values()):
            self._rate(self.options | own)
            self._try(own)

    def _rate(self, options: dict[str, Any]) -> None:
        """Raise InputError for a rate that torch takes and that trains nothing."""
        rate = options.get("lr")
        if isinstance(rate, bool) or (isinstance(rate, float) and math.isinf(rate)):
            said = ", ".join(f"{key}={value!r}" for key, value in options.items())
            instead = f"sw.{_maker(self.kind)}lr=3e-4)"
            raise bad(f"sw.{_maker(self.kind)}{said})", "a rate that is a finite number", instead)

    def _try(self, own: dict[str, Any]) -> None:
        """Raise InputError where the class refuses its options, or those of a group over them."""
        probe = nn.Parameter(torch.zeros(2, device="cpu"))
        try:
            if self.kind.__module__.startswith("torch.optim"):
                self.kind([probe], **(self.options | own))  # which looks at the values
            else:
                self.kind([{"params": [probe], **own}], **self.options)
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
            takes = list(inspect.signature(self.kind).parameters)[1:]
            said = ", ".join(f"{key}={value!r}" for key, value in (self.options | own).items())
            why = " ".join(str(error).split())
            raise bad(
                f"sw.{_maker(self.kind)}{said}), which {self.kind.__name__} refuses ({why})",
                f"the options of {self.kind.__name__}: {', '.join(takes)}",
                f"sw.{_maker(self.kind)}{_near(self.options | own, takes)})",
            ) from error

    def warn_unmatched(self, names: Sequence[str]) -> None:
        """Warn of each group pattern that matches none of a model's parameters.

        Not an error: one recipe may serve models of which only one has such parameters.
        """
        for pattern in self.groups:
            if not any(fnmatch(name, pattern) for name in names):
                close = get_close_matches(pattern, names, n=1, cutoff=0.0)
                nearest = f"; the nearest name is {close[0]}" if close else ""
                warnings.warn(
                    f'The optimizer\'s group "{pattern}" matches no parameter of this model, so '
                    f"its options are not used{nearest}.",
                    stacklevel=3,
                )

    def build(self, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
        """The optimizer over `named`, fused where torch has it.

        Group 0 is "default"; a group follows for each pattern, also where this rank has none of it.
        """
        options = dict(self.options)
        fusable = "fused" in inspect.signature(self.kind).parameters
        damped = any(o.get("dampening") for o in (options, *self.groups.values()))  # see _even_out
        if fusable and not damped and not {"fused", "foreach", "differentiable"} & options.keys():
            options["fused"] = True
        members: dict[str, list[tuple[str, nn.Parameter]]] = {
            "": [],
            **{g: [] for g in self.groups},
        }
        for name, p in named:
            pattern = next((g for g in self.groups if fnmatch(name, g)), "")
            members[pattern].append((name, p))
        groups = [
            {"params": [p for _, p in pairs], **self.groups.get(pattern, {})}
            | {"name": pattern or "default", "param_names": [name for name, _ in pairs]}
            for pattern, pairs in members.items()
        ]
        return self.kind(groups, **options)


_OPTIMIZERS = "a class of torch.optim, or one of your own made like them"


def _is_options(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _maker(kind: type[Optimizer]) -> str:
    """How a recipe of that class begins."""
    name = kind.__name__
    return f"{name}(" if name in ("AdamW", "Adam", "SGD") else f"Optim({name}, "


def _near(options: dict[str, Any], takes: Sequence[str]) -> str:
    """The option that was most likely meant by one there is not; else a rate alone."""
    unknown = next((key for key in options if key not in takes), "")
    close = get_close_matches(unknown, takes, n=1, cutoff=0.6) if unknown else []
    return f"{close[0]}={options[unknown]!r}" if close else "lr=3e-4"


def Optim(  # noqa: N802
    kind: type[Optimizer], groups: dict[str, dict[str, Any]] | None = None, **options: Any
) -> Recipe:
    """Any elementwise class of torch.optim with its options: `Optim(torch.optim.RMSprop, lr=1e-3)`.

    Raises:
        InputError: the class looks at more than one element at a time (Muon, LBFGS, Adafactor);
            it is none; it does not take these options.
    """
    if isinstance(kind, Optimizer):
        raise bad(
            f"sw.Optim of a {type(kind).__name__} that is made already",
            f"{_OPTIMIZERS}, with its options; parallelize makes it",
            f"sw.Optim(torch.optim.{type(kind).__name__}, lr={kind.defaults.get('lr', 3e-4)})",
        )
    if not isinstance(kind, type):
        return Recipe(kind, options, groups or {})  # which says so
    if needs_whole(kind):
        raise bad(
            f"optimizer torch.optim.{kind.__name__}, which needs whole tensors",
            f"a class that treats every element alike: {', '.join(ELEMENTWISE)}",
            "sw.AdamW(lr=3e-4)",
        )
    return Recipe(kind, options, groups or {})


def AdamW(groups: dict[str, dict[str, Any]] | None = None, **options: Any) -> Recipe:  # noqa: N802
    """`torch.optim.AdamW` with its own options (Loshchilov and Hutter, arXiv 1711.05101)."""
    return Recipe(torch.optim.AdamW, options, groups or {})


def Adam(groups: dict[str, dict[str, Any]] | None = None, **options: Any) -> Recipe:  # noqa: N802
    """`torch.optim.Adam` with its own options (Kingma and Ba, arXiv 1412.6980)."""
    return Recipe(torch.optim.Adam, options, groups or {})


def SGD(groups: dict[str, dict[str, Any]] | None = None, **options: Any) -> Recipe:  # noqa: N802
    """`torch.optim.SGD` with its own options."""
    return Recipe(torch.optim.SGD, options, groups or {})
