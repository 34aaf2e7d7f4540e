"""A step of one or several optimizers of torch over some of their parameters."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Combined(Optimizer):
    """Several optimizers of torch as one; group k is that of `parts[of[k]]`."""

    def __init__(self, parts: Sequence[Optimizer], of: Sequence[int]) -> None:
        self.parts, self.of = list(parts), list(of)
        groups = [iter(part.param_groups) for part in parts]
        super().__init__([next(groups[k]) for k in of], {})
        self.defaults = parts[0].defaults
        for part in parts:
            part.state = self.state

    def each(self) -> Iterator[Optimizer]:
        """The optimizers, with the groups of this one."""
        pairs = list(zip(self.param_groups, self.of, strict=True))
        for k, part in enumerate(self.parts):
            part.param_groups = [group for group, of in pairs if of == k]
            yield part

    def step(self, closure: Any = None) -> None:
        """A step of each."""
        for part in self.each():
            even_out(part)
            part.step()


def step_over(optimizer: Optimizer, members: Sequence[list[nn.Parameter]]) -> None:
    """Torch's own step over `members`, the parameters to update of each group."""
    everyone = [group["params"] for group in optimizer.param_groups]
    try:
        for group, params in zip(optimizer.param_groups, members, strict=True):
            group["params"] = params
        even_out(optimizer)
        optimizer.step()
    finally:
        for group, params in zip(optimizer.param_groups, everyone, strict=True):
            group["params"] = params


def even_out(optimizer: Optimizer) -> None:
    """Create as zeros the momenta that a fused SGD is about to update and does not have yet.

    The kernel takes a list with all of them or none; which parameters have had a gradient
    differs.  (With dampening the first momentum is not the damped sum with zero: not fused.)
    """
    if not isinstance(optimizer, torch.optim.SGD) or not optimizer.defaults.get("fused"):
        return
    for group in optimizer.param_groups:
        for p in (p for p in group["params"] if group["momentum"] and p.grad is not None):
            state = optimizer.state[p]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(p)
