"""An elementwise optimizer whose states are numbers, a tuple, a list of tensors and counts."""

from typing import Any

import torch
from torch.optim import Optimizer


class Own(Optimizer):
    """The mean of the last two gradients, over the root of the number of steps."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.5, 0.1)):
        super().__init__(params, {"lr": lr, "betas": betas, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["seen"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["count"], state["past"], state["span"] = 0, [], (0, None)
                    state["ups"] = torch.zeros(p.shape, dtype=torch.int32)
                    state["weight"] = torch.ones(1)
                state["count"] += 1
                state["span"] = (state["count"], None)
                state["past"] = [*state["past"], p.grad.clone()][-2:]
                state["ups"] += (p.grad > 0).int()
                state["weight"] *= 0.9
                mean = sum(b * g for b, g in zip(group["betas"], state["past"], strict=False))
                move = (mean + 1e-3 * state["ups"]) * (1 + state["weight"].to(p))
                p.sub_(group["lr"] / state["span"][0] ** 0.5 * move)
