"""Which optimizers update each element alone, and which plans refuse the others.

A piece of a matrix has two dims too, so a class that computes from whole tensors would take it for
a matrix and compute a wrong update, without any error.

    listed here, or `elementwise=True`      steps on the pieces of this rank
    any other class                         steps on whole tensors (owners.py)

Classes that are not listed may count their steps, so they step once on all parameters of a rank.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.errors import bad
from shardwise.core.layouts.param_layout import Layout
from shardwise.core.mesh import EXPERTS, PIPELINE, TENSOR

if TYPE_CHECKING:
    from shardwise.core.plan.plan import Plan
    from shardwise.engine.optimizer.optimizer_spec import OptimizerSpec


#: torch.optim classes that update each element independently, so that they work on shards.
ELEMENTWISE: Final = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax"),
    *("ASGD", "Rprop"),
)
#: Why other classes of torch.optim have no place in an engine.
NOT_IN_ENGINES: Final = {
    "LBFGS": "which computes the loss several times in a step",
    "SparseAdam": "which takes sparse gradients: an engine sums dense ones",
}
#: The steps after which a class that combines its parameters has shown it.
_STEPS: Final = 4


def is_listed(kind: type) -> bool:
    ours = kind.__module__.startswith("shardwise.")
    return ours or (kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE)


def require_possible(spec: "OptimizerSpec", model: nn.Module, plan: "Plan") -> None:
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
        if combines(group):
            raise bad(
                f"{group.kind.__name__} under '{plan}': its update of a parameter depends on the "
                "others, and ranks update different ones",
                "an optimizer whose update of a parameter depends on that parameter alone, or a "
                "plan whose ranks all update everything",
                f"sw.AdamW(lr=3e-4), or 'dp{plan.size}'",
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


def combines(spec: "OptimizerSpec") -> bool:
    """Whether the update of a parameter depends on another one, as by a norm of all gradients.

    It trains a parameter beside another one and alone.  A class that cannot be tried is trusted.
    """
    found: list[nn.Parameter] = []
    for others in (1, 0):
        with suppress(Exception), torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.default_generator.manual_seed(0)
            found.append(_trained(spec, others))
    return len(found) == 2 and not torch.allclose(*found, rtol=1e-4, atol=1e-7)


def _trained(spec: "OptimizerSpec", others: int) -> nn.Parameter:
    values = torch.linspace(-1.0, 2.0, 12, dtype=torch.float32, device="cpu").view(4, 3)
    params = [nn.Parameter(values * (1 + 9 * k)) for k in range(1 + others)]
    options: Mapping[str, object] = {"lr": 0.01} if "lr" in spec.options else {}
    optimizer: Optimizer = spec.kind([{"params": params, **options}], **spec.options)
    getattr(optimizer, "train", lambda: None)()
    for step in range(_STEPS):
        for k, p in enumerate(params):
            p.grad = (values + step).cos() * (1 + 99 * k)
        optimizer.step()
    return params[0]


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
