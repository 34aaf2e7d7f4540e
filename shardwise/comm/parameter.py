"""Parameters in place of others: of the same class, with the same attributes and hooks."""

from typing import Any

import torch
from torch import Tensor, nn


def parameter_like(p: nn.Parameter, data: Tensor) -> nn.Parameter:
    made: Any = torch.Tensor._make_subclass(type(p), data.detach(), p.requires_grad)
    made.__dict__.update(p.__dict__)
    return made


def become(p: nn.Parameter, data: Tensor) -> None:
    """Give `p` other values, also on another device; the object and its hooks stay.
    A tensor's device changes only as a whole, and with it the tables in which autograd finds hooks.
    """
    on_grad, after_grad = p._backward_hooks, p._post_accumulate_grad_hooks
    torch.utils.swap_tensors(p, parameter_like(p, data))
    if on_grad:
        p._backward_hooks = on_grad
    if after_grad:
        p._post_accumulate_grad_hooks = after_grad
