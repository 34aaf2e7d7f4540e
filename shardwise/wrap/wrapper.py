"""What stands on a module in place of hooks: `sw.Pipe`'s forward, and `sw.DataParallel`."""

from abc import ABC, abstractmethod

import torch
from torch import nn

from shardwise.comm.world import Axis
from shardwise.core.tools.structure import uncompiled
from shardwise.engine.checks import validate


class Wrapper(ABC):
    """The owner of a wrapped module, found by `wrapper_of`."""

    #: The axis over which the module's layers are distributed; None if this rank has all of them.
    axis: Axis | None
    device: torch.device

    @abstractmethod
    def unwrap(self) -> nn.Module:
        """The plain module, with full parameters.  All ranks call it."""

    @abstractmethod
    def counted_elsewhere(self) -> set[nn.Parameter]:
        """The parameters here whose gradients another rank of the axis counts."""


def wrapper_of(module: nn.Module) -> Wrapper | None:
    """The wrapper of the module itself, not of a module inside it; None for any other module."""
    module = uncompiled(module)
    forward = module if isinstance(module, Wrapper) else vars(module).get("forward")
    return forward if isinstance(forward, Wrapper) else None


def no_wrapper(module: nn.Module) -> None:
    """Raise InputError if `module` or a part of it has a wrapper."""
    if any(wrapper_of(part) is not None for part in module.modules()):
        raise validate.already_wrapped(module)
