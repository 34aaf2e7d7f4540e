"""Which optimizers update each element alone, and which plans refuse the others.

A piece of a matrix has two dims too, so a class that computes from whole tensors would take it for
a matrix and compute a wrong update, without any error.

    listed here, or `elementwise=True`      steps on the pieces of this rank
    WHOLE, or `elementwise=False`           steps on whole tensors (owners.py), each without others
    any other class                         only where each rank updates all parameters

Classes that are not listed may count their steps, so they step once on all parameters of a rank.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.errors import bad
from shardwise.core.layouts.param_layout import Layout
from shardwise.core.mesh import EXPERTS, PIPELINE, TENSOR
from shardwise.core.plan.plan import Plan

if TYPE_CHECKING:
    from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec


#: torch.optim classes that update each element independently, so that they work on shards.
ELEMENTWISE: Final = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax"),
    *("ASGD", "Rprop"),
)
#: Classes of torch.optim that update each tensor alone, and need it whole.
WHOLE: Final = ("Muon", "Adafactor")
#: Why other classes of torch.optim have no place in an engine.
NOT_IN_ENGINES: Final = {
    "LBFGS": "which computes the loss several times in a step",
    "SparseAdam": "which takes sparse gradients: an engine sums dense ones",
}


def is_listed(kind: type) -> bool:
    ours = kind.__module__.startswith("shardwise.")
    return ours or (kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE)


def updates_elements(kind: type, said: bool | None = None) -> bool | None:
    """Whether a class updates each element alone: as a program has `said`, or None if not known."""
    if said is not None or is_listed(kind):
        return said is not False
    return False if kind.__module__.startswith("torch.optim") and kind.__name__ in WHOLE else None


def require_possible(spec: "OptimizerSpec", model: nn.Module, plan: Plan) -> None:
    """Raise InputError for an optimizer that the model's parameters or the plan rule out."""
    spec.require_fits(model)
    unlisted = [group for _, group, _ in spec.members if not group.by_unit]
    if not unlisted:
        return
    name, offload = unlisted[0].kind.__name__, plan.offloaded
    disk = plan.states.moves().offload == "disk"
    if disk or (offload is not None and offload.undelayed is not None):
        where = "on a disk, which updates chunks" if disk else "beside the next step"
        raise bad(
            f"{name} with offload:{plan.offload}: the update is made {where}",
            f"one of {', '.join(ELEMENTWISE)}, Lion",
            "sw.AdamW(lr=3e-4), or offload:optim",
        )
    sharded = any(each.states.sharded and each.data_size > 1 for each in plan.of_all_layers)
    whole = [group for group in unlisted if not group.by_element]
    if offload is not None and whole and sharded:
        raise bad(
            f"{whole[0].kind.__name__} with offload:{plan.offload} under '{plan}': it needs whole "
            "tensors, and their pieces are in the memory of several hosts",
            "the plan without offload, or an optimizer that updates each element alone",
            "sw.AdamW(lr=3e-4)",
        )
    divided = sharded or any(plan.size_of(axis) > 1 for axis in (PIPELINE, TENSOR, EXPERTS))
    for group in unlisted if divided else ():
        if updates_elements(group.kind, group.elementwise) is None:
            name = group.kind.__name__
            raise bad(
                f"{name} under '{plan}', whose ranks update different parameters: it is not known "
                "whether it updates each of them alone",
                f"elementwise=True if {name} updates each element alone, elementwise=False if each "
                "tensor; for a class that combines tensors a plan whose ranks all update all",
                f"sw.Optim({name}, elementwise=False), or 'dp{plan.size}'",
            )


def require_whole(spec: "OptimizerSpec", layouts: Iterable[tuple[str, int, Layout]]) -> None:
    """Raise InputError if an axis cuts a parameter that its optimizer needs whole.

    `layouts` are the name, the number of dims and the layout of each parameter.
    """
    for name, dims, layout in layouts:
        axis = next((axis for axis, on in layout.axes if on.cut is not None), None)
        if axis is None or not spec.is_whole(name, dims):
            continue
        kind = spec.members[spec.number(name, dims)][1].kind.__name__
        raise bad(
            f"{kind} for {name}, of which each rank of the axis {axis} has a part; {kind} computes "
            "from whole tensors",
            f"a plan without {axis}, an optimizer that updates each element alone, for all "
            "parameters or for a group of them; elementwise=True if this one does",
            f'sw.AdamW(lr=3e-4), or groups={{"{name}": sw.AdamW(lr=3e-4)}}',
        )


# --- Lion -----------------------------------------------------------------------------------------


class Lion(Optimizer):
    """The sign of a mean of gradients (Chen et al., arXiv 2302.06675, algorithm 2), for torch.

        p = p - lr (sign(beta1 m + (1 - beta1) g) + weight_decay p)
        m = beta2 m + (1 - beta2) g

    It has one state tensor; Adam has two. Raises ValueError for options that are out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        first, second = betas
        if not lr >= 0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ValueError(f"Invalid betas: {betas}")
        if not weight_decay >= 0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            lr, (first, second), decay = group["lr"], group["betas"], group["weight_decay"]
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                mean = state["exp_avg"]
                p.mul_(1 - lr * decay)
                p.sub_(mean.lerp(p.grad, 1 - first).sign_().mul_(lr))
                mean.lerp_(p.grad, 1 - second)
