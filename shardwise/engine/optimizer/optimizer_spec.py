"""An optimizer's specification: a class of torch.optim and its options, without parameters.

A class of torch.optim must be elementwise, or Adafactor.  A class of another library is tried when
its plan is known (elementwise.py).  Options are checked when the specification is made, by building
the optimizer for a parameter of two elements: an unknown option or a negative rate raises there.
"""

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.core.errors import bad
from shardwise.core.tools.suggest import suggest
from shardwise.engine.optimizer import lion
from shardwise.engine.optimizer.elementwise import (
    ELEMENTWISE,
    needs_whole_tensors,
    updates_by_tensor,
)


@dataclass(frozen=True)
class OptimizerSpec:
    """A class of torch.optim and its options.

    `groups` maps patterns of parameter names ("*norm*", "*.bias") to their options.  The first
    pattern that matches a name applies.
    """

    kind: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Build the optimizer once for a small parameter, so that wrong options raise here."""
        if not isinstance(self.kind, type) or not issubclass(self.kind, Optimizer):
            given = getattr(self.kind, "__name__", None) or repr(self.kind)[:60]
            allowed = "a subclass of torch.optim.Optimizer, with its options"
            raise bad(f"sw.Optim({given})", allowed, "sw.Optim(torch.optim.RMSprop, lr=1e-3)")
        if not isinstance(self.groups, dict):
            raise bad(
                f"groups={repr(self.groups)[:60]}",
                "a dict from patterns of parameter names to options",
                f'sw.{_maker(self.kind)}lr=3e-4, groups={{"*.bias": {{"weight_decay": 0.0}}}})',
            )
        for own in ({}, *self.groups.values()):
            self._try(own)

    @property
    def by_group(self) -> list[dict[str, Any]]:
        """The options of each group."""
        return [self.options | own for own in ({}, *self.groups.values())]

    def _try(self, own: dict[str, Any]) -> None:
        """Raise InputError if the class refuses its options together with those of a group."""
        probe = nn.Parameter(torch.zeros(2, device="cpu"))
        try:
            if self.kind.__module__.startswith("torch.optim"):
                self.kind([probe], **(self.options | own))  # this form checks the values
            else:
                self.kind([{"params": [probe], **own}], **self.options)
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
            takes = list(inspect.signature(self.kind).parameters)[1:]
            options = self.options | own
            near = {key: suggest(key, takes, 0.5) for key in options.keys() - {*takes}}
            mended = ", ".join(f"{new}={options[key]!r}" for key, new in near.items() if new)
            said = ", ".join(f"{key}={value!r}" for key, value in options.items())
            why = " ".join(str(error).split())
            raise bad(
                f"sw.{_maker(self.kind)}{said}), which {self.kind.__name__} refuses ({why})",
                f"the options of {self.kind.__name__}: {', '.join(takes)}",
                f"sw.{_maker(self.kind)}{mended or 'lr=3e-4'})",
            ) from error

    def state_keys(self, group: int, dims: int) -> set[str]:
        """The keys that a tensor of `dims` dims in that group has in its state after a step."""
        own = ({}, *self.groups.values())[group]
        probe = nn.Parameter(torch.zeros([2] * dims, device="cpu"))
        optimizer = self.kind([{"params": [probe], **own}], **self.options)
        probe.grad = torch.zeros_like(probe)
        optimizer.step()
        return {*optimizer.state.get(probe, {})}

    def warn_unmatched(self, names: Sequence[str]) -> None:
        """Warn of each group pattern that matches no parameter.

        It is not an error, because one specification may serve several models.
        """
        for pattern in self.groups:
            if not any(fnmatch(name, pattern) for name in names):
                warnings.warn(
                    f'The optimizer\'s group "{pattern}" matches no parameter of this model, so '
                    "its options are not used.",
                    stacklevel=3,
                )

    def build(self, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
        """Build the optimizer for `named`, fused if torch supports it.

        Group 0 is "default", followed by one group for each pattern, empty if this rank has none of
        its parameters.
        """
        options = dict(self.options)
        fusable = "fused" in inspect.signature(self.kind).parameters
        damped = any(o.get("dampening") for o in (options, *self.groups.values()))  # see even_out
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


def written(kind: type[Optimizer]) -> str:
    """The class as a program writes it."""
    return (
        f"torch.optim.{kind.__name__}" if kind.__module__[:11] == "torch.optim" else kind.__name__
    )


def _maker(kind: type[Optimizer]) -> str:
    """The begin of the call that creates a specification of that class."""
    name = kind.__name__
    own = name in ("AdamW", "Adam", "SGD", "Lion", "Adafactor")
    return f"{name}(" if own else f"Optim({name}, "


def Optim(  # noqa: N802
    kind: type[Optimizer], groups: dict[str, dict[str, Any]] | None = None, **options: Any
) -> OptimizerSpec:
    """Any elementwise optimizer class with its options: `Optim(torch.optim.RMSprop, lr=1e-3)`.

    Raises:
        InputError: a class of torch.optim that is neither elementwise nor Adafactor (Muon,
            LBFGS), no optimizer, or options that the class does not accept.
    """
    if isinstance(kind, type) and needs_whole_tensors(kind) and not updates_by_tensor(kind):
        raise bad(
            f"optimizer {written(kind)}, which needs whole tensors",
            f"an elementwise class: {', '.join(ELEMENTWISE)}",
            "sw.AdamW(lr=3e-4)",
        )
    return OptimizerSpec(kind, options, groups or {})


class AdamOptions(TypedDict, total=False):
    """The options of torch's AdamW and Adam."""

    lr: float | Tensor
    weight_decay: float
    maximize: bool
    foreach: bool | None
    betas: tuple[float | Tensor, float | Tensor]
    eps: float
    amsgrad: bool
    capturable: bool
    differentiable: bool
    fused: bool | None


class SGDOptions(TypedDict, total=False):
    """The options of torch's SGD."""

    lr: float | Tensor
    weight_decay: float
    maximize: bool
    foreach: bool | None
    momentum: float
    dampening: float
    nesterov: bool
    differentiable: bool
    fused: bool | None


class LionOptions(TypedDict, total=False):
    """The options of Lion."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float


class AdafactorOptions(TypedDict, total=False):
    """The options of torch's Adafactor."""

    lr: float | Tensor
    weight_decay: float
    maximize: bool
    foreach: bool | None
    beta2_decay: float
    eps: tuple[float | None, float]
    d: float


def AdamW(  # noqa: N802
    groups: dict[str, dict[str, Any]] | None = None, **options: Unpack[AdamOptions]
) -> OptimizerSpec:
    """`torch.optim.AdamW` with its own options (Loshchilov and Hutter, arXiv 1711.05101)."""
    return OptimizerSpec(torch.optim.AdamW, {**options}, groups or {})


def Adam(  # noqa: N802
    groups: dict[str, dict[str, Any]] | None = None, **options: Unpack[AdamOptions]
) -> OptimizerSpec:
    """`torch.optim.Adam` with its own options (Kingma and Ba, arXiv 1412.6980)."""
    return OptimizerSpec(torch.optim.Adam, {**options}, groups or {})


def SGD(  # noqa: N802
    groups: dict[str, dict[str, Any]] | None = None, **options: Unpack[SGDOptions]
) -> OptimizerSpec:
    """`torch.optim.SGD` with its own options."""
    return OptimizerSpec(torch.optim.SGD, {**options}, groups or {})


def Lion(  # noqa: N802
    groups: dict[str, dict[str, Any]] | None = None, **options: Unpack[LionOptions]
) -> OptimizerSpec:
    """Lion: lr, betas, weight_decay (Chen et al., arXiv 2302.06675)."""
    return OptimizerSpec(lion.Lion, {**options}, groups or {})


def Adafactor(  # noqa: N802
    groups: dict[str, dict[str, Any]] | None = None, **options: Unpack[AdafactorOptions]
) -> OptimizerSpec:
    """`torch.optim.Adafactor` with its own options (Shazeer and Stern, arXiv 1804.04235).

    It keeps a mean of each row and each column, and divides by norms of whole matrices, so plans
    whose ranks update parts of parameters (zero1 to zero3, tp) are refused.
    """
    return OptimizerSpec(torch.optim.Adafactor, {**options}, groups or {})
