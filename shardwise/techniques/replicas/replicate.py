"""Replicas of a module: one for each device, for the length of one forward and backward pass.

    replicate(module, [d0, d1, d2])     module itself | copy on d1 | copy on d2
                                             ^              |            |
                            backward:        +-- gradients -+------------+   summed

Replica 0 is the module.  A copy's parameters are the results of a differentiable copy, so that its
gradients are added to those of the module's parameters.  Its buffers are copies without a gradient.
"""

from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.core.errors import bad
from shardwise.core.tools.tree import mapped
from shardwise.techniques.replicas.devices import Devices, as_devices

_TABLES = ("_parameters", "_buffers", "_modules")


def replicate(module: nn.Module, devices: Devices) -> list[nn.Module]:
    """One replica of `module` for each device; the first is `module` itself.

    Shared parameters and modules stay shared inside each replica.  References to them in lists,
    tuples and dicts of attributes, and in bound methods, point to the replica's own.  What a
    forward pass changes persists in replica 0; in the other replicas it is lost with them.

    A hook is called with the replica as its module.  A closure that refers to the original module
    is not changed: it acts on replica 0.

    Raises:
        InputError: wrong devices; a parameter or buffer that is not on the first device.
    """
    first, *rest = as_devices(devices)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.device != first:
            given = f"{name} of the module on {tensor.device}, with {first} as the first device"
            raise bad(
                given, "a module whose tensors are all on the first device", f'.to("{first}")'
            )
    return [module, *(_replica(module, device) for device in rest)]


def _replica(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of `module` and all modules in it, with differentiable copies of its parameters."""
    copies: dict[int, Tensor] = {}
    for p in module.parameters():
        copies[id(p)] = cast("Tensor", _Replicate.apply(p, device))
    for b in module.buffers():
        copies[id(b)] = b.detach().to(device, copy=True)
    parts = {id(part): type(part).__new__(type(part)) for part in module.modules()}

    def own(x: Any) -> Any:
        """What stands for `x` in the replica."""
        if isinstance(x, Tensor):
            return copies[id(x)] if id(x) in copies else x.to(device, copy=True)
        if isinstance(x, MethodType):
            part = parts.get(id(x.__self__))
            return x if part is None else MethodType(x.__func__, part)
        return parts.get(id(x), x)

    kinds = (Tensor, nn.Module, MethodType)
    for old in module.modules():
        table = parts[id(old)].__dict__
        table.update({key: mapped(own, value, kinds) for key, value in vars(old).items()})
        table.update({key: dict(table[key]) for key in _TABLES})  # changed without the module's
    return parts[id(module)]


class _Replicate(torch.autograd.Function):
    """A copy on another device; its gradient, which may be sparse, is copied back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device) -> Tensor:
        ctx.source = x.device
        return x.to(device, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0].to(ctx.source), None
