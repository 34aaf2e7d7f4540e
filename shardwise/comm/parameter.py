"""Parameters in place of others: of the same class, with the same attributes and hooks."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.tools.tree import leaves


def parameter_like(p: nn.Parameter, data: Tensor) -> nn.Parameter:
    made: Any = torch.Tensor._make_subclass(type(p), data.detach(), p.requires_grad)
    made.__dict__.update(p.__dict__)
    return made


def meta_parameters(model: nn.Module) -> dict[int, Any]:
    """The memo with which copy.deepcopy puts parameters on meta, tied and frozen as before."""
    found = ((p, torch.empty_like(p, device="meta")) for p in model.parameters())
    return {id(p): parameter_like(p, empty) for p, empty in found}


def attributes(model: nn.Module) -> list[Tensor]:
    """The tensors in attributes of modules, such as the weight that weight_norm's hook sets."""
    return leaves([vars(module) for module in model.modules()], Tensor)


def become(p: nn.Parameter, data: Tensor) -> None:
    """Give `p` other values, also on another device; the object and its hooks stay.
    A tensor's device changes only as a whole, and with it the tables in which autograd finds hooks.
    """
    on_grad, after_grad = p._backward_hooks, p._post_accumulate_grad_hooks
    # torch's own function refuses weak references, as nn.LSTM has to its weights; they stay right
    torch._C._swap_tensor_impl(p, parameter_like(p, data))
    if on_grad:
        p._backward_hooks = on_grad
    if after_grad:
        p._post_accumulate_grad_hooks = after_grad
