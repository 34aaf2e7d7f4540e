"""Lion: the sign of a mean of gradients (Chen et al., arXiv 2302.06675, algorithm 2).

    p = p - lr (sign(beta1 m + (1 - beta1) g) + weight_decay p)
    m = beta2 m + (1 - beta2) g

The update is elementwise, so it works on shards. It has one state tensor; Adam has two.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer


class Lion(Optimizer):
    """Lion for torch. Raises ValueError for options that are out of range."""

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
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
        return loss
