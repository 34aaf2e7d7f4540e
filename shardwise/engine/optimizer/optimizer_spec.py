"""An optimizer's specification: a class of torch.optim and its options, without parameters.

A class that is not known to update each element alone steps on whole tensors (elementwise.py).
Options are checked when the specification is made, by building the optimizer for a small matrix: an
unknown option or a negative rate raises there.
"""

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.core.errors import bad
from shardwise.core.tools.arguments import flag
from shardwise.engine.optimizer import elementwise
from shardwise.engine.optimizer.elementwise import ELEMENTWISE, NOT_IN_ENGINES, is_listed
from shardwise.engine.optimizer.optimizer_state import fits


@dataclass(frozen=True)
class OptimizerSpec:
    """A class of torch.optim and its options.

    `groups` maps patterns of parameter names ("*norm*", "*.bias") to their options, or to a
    specification of another class.  The first pattern that matches a name applies.  `rest` updates
    parameters that are no matrices, for a class that takes matrices only.

    `elementwise`: whether the class updates each element alone; None: whether it is known to.
    """

    kind: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    elementwise: bool | None = None
    rest: "OptimizerSpec | None" = None

    def __post_init__(self) -> None:
        """Build the optimizer once for a small parameter, so that wrong options raise here."""
        if not isinstance(self.kind, type) or not issubclass(self.kind, Optimizer):
            given = getattr(self.kind, "__name__", None) or repr(self.kind)[:60]
            allowed = "a subclass of torch.optim.Optimizer, with its options"
            raise bad(f"sw.Optim({given})", allowed, "sw.Optim(torch.optim.RMSprop, lr=1e-3)")
        if self.kind.__module__[:11] == "torch.optim" and self.kind.__name__ in NOT_IN_ENGINES:
            raise bad(
                f"optimizer torch.optim.{self.kind.__name__}, {NOT_IN_ENGINES[self.kind.__name__]}",
                f"another class, such as {', '.join(ELEMENTWISE)}, Adafactor, Muon",
                "sw.AdamW(lr=3e-4), or sw.DDP(module) in a loop of your own",
            )
        if not isinstance(self.groups, dict) or not all(
            isinstance(key, str) for key in self.groups
        ):
            raise bad(
                f"groups={repr(self.groups)[:60]}",
                "a dict from patterns of parameter names to options",
                f'sw.{_maker(self.kind)}lr=3e-4, groups={{"*.bias": {{"weight_decay": 0.0}}}})',
            )
        if self.elementwise is not None:
            flag("elementwise", self.elementwise)
        for name, spec, own in self.members:
            if spec is self:
                self._try(name, own)
            elif not isinstance(spec, OptimizerSpec) or spec.groups or spec.rest:
                raise bad(
                    f"the optimizer of the group {name!r}",
                    "a specification without groups of its own",
                    f'sw.{_maker(self.kind)}lr=3e-4, groups={{"*.bias": sw.AdamW(lr=3e-4)}})',
                )

    @property
    def members(self) -> "list[tuple[str, OptimizerSpec, dict[str, Any]]]":
        """The groups: the name, the specification of the class, and options of the group alone."""
        found: list[tuple[str, OptimizerSpec, dict[str, Any]]] = [("default", self, {})]
        for pattern, own in self.groups.items():
            found.append((pattern, self, own) if isinstance(own, dict) else (pattern, own, {}))
        return found if self.rest is None else [*found, ("rest", self.rest, {})]

    def number(self, name: str, dims: int) -> int:
        """The group of a parameter, by its name and its number of dims."""
        matching = (k for k, pattern in enumerate(self.groups, 1) if fnmatch(name, pattern))
        found = next(matching, 0)
        rest = self.rest is not None and dims != 2 and self.members[found][1] is self
        return len(self.groups) + 1 if rest else found

    @property
    def by_element(self) -> bool:
        return is_listed(self.kind) if self.elementwise is None else self.elementwise

    @property
    def by_unit(self) -> bool:
        """Whether the class may update some parameters and then others, instead of all at once."""
        return is_listed(self.kind) and self.by_element

    @property
    def together(self) -> bool:
        """Whether a step updates all parameters of a rank in one call: it may count its calls."""
        return not all(spec.by_unit for _, spec, _ in self.members)

    def is_whole(self, name: str, dims: int) -> bool:
        return not self.members[self.number(name, dims)][1].by_element

    def alone(self, group: int, p: nn.Parameter) -> Optimizer:
        _, spec, own = self.members[group]
        optimizer = spec.kind([{"params": [p], **own}], **spec.options)
        getattr(optimizer, "train", lambda: None)()
        return optimizer

    def _try(self, group: str, own: dict[str, Any]) -> None:
        probe = nn.Parameter(torch.zeros(2, 2, dtype=torch.float32, device="cpu"))
        options, parameters = self.options | own, inspect.signature(self.kind).parameters
        takes = {name: parameters[name].default for name in [*parameters][1:]}
        known = self.kind.__module__.startswith(("torch.optim", "shardwise."))
        unfit = [key for key, value in options.items() if not fits(value, takes.get(key))]
        try:
            if known and unfit:
                raise TypeError(f"{unfit[0]}={options[unfit[0]]!r} in place of {takes[unfit[0]]!r}")
            if known:  # the steps check what the constructor does not
                _steps(self.kind([probe], **self.fastest(own)), probe, 2)
            else:
                self.kind([{"params": [probe], **own}], **self.options)
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
            maker, why = f"sw.{_maker(self.kind)}", " ".join(str(error).split())
            where = f" in the group {group!r}" if own else ""
            listed = ", ".join(f"{key}={value!r}" for key, value in options.items())
            raise bad(
                f"{maker}{listed}){where}, which {self.kind.__name__} refuses ({why})",
                f"the options of {self.kind.__name__}: {', '.join(takes)}",
                f"{maker}lr=3e-4)",
            ) from error

    def require_fits(self, model: nn.Module) -> None:
        """Raise InputError for a parameter that the class of its group does not take."""
        trained = {n: p.dim() for n, p in model.named_parameters() if p.requires_grad}
        kinds = {(self.number(name, dims), dims): name for name, dims in trained.items()}
        for (group, dims), name in kinds.items():
            try:
                self.alone(group, nn.Parameter(torch.zeros([2] * dims, device="cpu")))
            except (TypeError, ValueError, RuntimeError) as error:
                kind = self.members[group][1].kind.__name__
                raise bad(
                    f"{kind} for {name}, which has {dims} dims ({' '.join(str(error).split())})",
                    f"parameters that {kind} takes, and another optimizer for the others",
                    "rest=sw.AdamW(lr=3e-4) for all that are no matrices, or "
                    f'groups={{"{name}": sw.AdamW(lr=3e-4)}}',
                ) from error

    def first_state(
        self, group: int, sizes: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        probe = nn.Parameter(torch.zeros(tuple(sizes), dtype=dtype, device="cpu"))
        _steps(optimizer := self.alone(group, probe), probe, 1)
        return optimizer.state.get(probe, {})

    def warn_unmatched(self, names: Sequence[str]) -> None:
        """Warn of patterns that match no parameter; one specification may serve several models."""
        for pattern in self.groups:
            if not any(fnmatch(name, pattern) for name in names):
                warnings.warn(
                    f'The optimizer\'s group "{pattern}" matches no parameter of this model, so '
                    "its options are not used.",
                    stacklevel=3,
                )

    def build(self, members: Iterable[tuple[int, nn.Parameter]]) -> Optimizer:
        """Build the optimizer for parameters and their groups, fused if torch supports it.

        Group 0 is "default", then come one group for each pattern, empty if this rank has none of
        its parameters, and the rest.
        """
        groups: list[dict[str, Any]] = [
            {"params": [], **own, "name": name} for name, _, own in self.members
        ]
        for number, p in members:
            groups[number]["params"].append(p)
        specs = [spec for _, spec, _ in self.members]
        kinds = list({id(spec): spec for spec in specs}.values())
        of = [next(k for k, kind in enumerate(kinds) if kind is spec) for spec in specs]
        parts = [
            kind.kind([g for g, k in zip(groups, of, strict=True) if k == n], **kind.fastest({}))
            for n, kind in enumerate(kinds)
        ]
        for part in parts:
            if isinstance(part, torch.optim.SGD):
                part.register_step_pre_hook(even_out)
        return parts[0] if len(parts) == 1 else Combined(parts, of)

    def fastest(self, own: dict[str, Any]) -> dict[str, Any]:
        """The options and those of a group, with torch's fused kernels where it has them."""
        options = self.options | own
        chosen = {"fused", "foreach", "differentiable"} & options.keys()
        fusable = "fused" in inspect.signature(self.kind).parameters and not chosen
        return options | ({"fused": True} if fusable else {})


def _steps(optimizer: Optimizer, p: nn.Parameter, number: int) -> None:
    p.grad = torch.zeros_like(p)
    with torch.device("cpu"):
        for _ in range(number):
            optimizer.step()


def _maker(kind: type[Optimizer]) -> str:
    name = kind.__name__
    own = name in ("AdamW", "Adam", "SGD", "Lion", "Adafactor", "Muon")
    return f"{name}(" if own else f"Optim({name}, "


def Optim(  # noqa: N802
    kind: type[Optimizer],
    groups: dict[str, Any] | None = None,
    *,
    elementwise: bool | None = None,
    rest: OptimizerSpec | None = None,
    **options: object,
) -> OptimizerSpec:
    """Any class of optimizer with its options: `Optim(torch.optim.RMSprop, lr=1e-3)`.

    A class that is not known to update each element alone gets whole tensors; `elementwise=True`
    says that it needs none.  `rest` updates parameters that are no matrices.

    Raises:
        InputError: LBFGS and SparseAdam, no optimizer, or options that the class does not accept.
    """
    return OptimizerSpec(kind, options, groups or {}, elementwise, rest)


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


class MuonOptions(TypedDict, total=False):
    """The options of torch's Muon."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None


def AdamW(  # noqa: N802
    groups: dict[str, Any] | None = None, **options: Unpack[AdamOptions]
) -> OptimizerSpec:
    """`torch.optim.AdamW` with its own options (Loshchilov and Hutter, arXiv 1711.05101)."""
    return OptimizerSpec(torch.optim.AdamW, {**options}, groups or {})


def Adam(  # noqa: N802
    groups: dict[str, Any] | None = None, **options: Unpack[AdamOptions]
) -> OptimizerSpec:
    """`torch.optim.Adam` with its own options (Kingma and Ba, arXiv 1412.6980)."""
    return OptimizerSpec(torch.optim.Adam, {**options}, groups or {})


def SGD(  # noqa: N802
    groups: dict[str, Any] | None = None, **options: Unpack[SGDOptions]
) -> OptimizerSpec:
    """`torch.optim.SGD` with its own options."""
    return OptimizerSpec(torch.optim.SGD, {**options}, groups or {})


def Lion(  # noqa: N802
    groups: dict[str, Any] | None = None, **options: Unpack[LionOptions]
) -> OptimizerSpec:
    """Lion: lr, betas, weight_decay (Chen et al., arXiv 2302.06675)."""
    return OptimizerSpec(elementwise.Lion, {**options}, groups or {})


def Adafactor(  # noqa: N802
    groups: dict[str, Any] | None = None, **options: Unpack[AdafactorOptions]
) -> OptimizerSpec:
    """`torch.optim.Adafactor` with its own options (Shazeer and Stern, arXiv 1804.04235).

    It keeps a mean of each row and each column, and divides by norms of whole matrices.
    """
    return OptimizerSpec(torch.optim.Adafactor, {**options}, groups or {})


def Muon(  # noqa: N802
    groups: dict[str, Any] | None = None,
    *,
    rest: OptimizerSpec | None = None,
    **options: Unpack[MuonOptions],
) -> OptimizerSpec:
    """`torch.optim.Muon` for matrices with its own options (arXiv 2502.16982).

    `rest` updates parameters that are no matrices: `sw.AdamW()` by default.  Embeddings and the
    head are matrices too; `groups={"head.*": sw.AdamW(lr=3e-4)}` gives them to AdamW.
    """
    return OptimizerSpec(torch.optim.Muon, {**options}, groups or {}, rest=rest or AdamW())


class Combined(Optimizer):
    """Several optimizers of torch as one; group k is that of `parts[of[k]]`."""

    def __init__(self, parts: Sequence[Optimizer], of: Sequence[int]) -> None:
        self.parts, self.of = list(parts), list(of)
        groups = [iter(part.param_groups) for part in parts]
        super().__init__([next(groups[k]) for k in of], {})
        self.defaults = parts[0].defaults
        for part in parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:
        pairs = list(zip(self.param_groups, self.of, strict=True))
        for k, part in enumerate(self.parts):
            part.param_groups = [group for group, of in pairs if of == k]
            part.step()


def even_out(optimizer: Optimizer, *_: object) -> None:
    """Create as zeros the momenta that a fused SGD is about to update and does not have yet.

    The kernel takes a list with all of them or none, and parameters differ in whether they have had
    a gradient.  With dampening the first momentum is not the damped sum with zero: not fused.
    """
    for group in optimizer.param_groups:
        group["fused"] = is_fused(group)
        for p in group["params"] if group["fused"] and group["momentum"] else ():
            if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def is_fused(group: Mapping[str, Any]) -> bool:
    return bool(group.get("fused")) and not group.get("dampening")
