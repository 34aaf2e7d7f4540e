"""`sw.unwrap`: turns a wrapped module back into a plain one, with full parameters."""

from abc import ABC, abstractmethod

import torch
from torch import nn

from shardwise.comm.transport import Lease
from shardwise.comm.unchanged import normal_mode
from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.tools.structure import uncompiled
from shardwise.engine.checks import validate
from shardwise.flat.flat_parameter import Flat
from shardwise.techniques.data.apply import driver_of, drivers, flats_of


@normal_mode()
def unwrap(module: nn.Module) -> nn.Module:
    """Undo `sw.DDP`, `sw.FSDP` or `sw.Pipe` in place, and return the module.  All ranks call it.

    Every parameter gets back its shape, its own memory and its full value; buffers are rank 0's.
    Nothing of Shardwise stays on the module: one process can train, copy or pickle it, and it can
    be wrapped again.  Process groups that the wrapping opened are closed, unless something else
    uses them.  Parameters keep their identity, so an optimizer still works, except one with sharded
    state, which must be rebuilt.  Gradients stay if they were unsharded (`sw.DDP`), else they are
    dropped.

    After `sw.Pipe`, a rank's own stages are the original modules, with gradients.  Layers of other
    ranks are copies with current parameters and buffers.  Rebuild the optimizer: it has not seen
    their parameters.

    Raises:
        InputError: the module is not wrapped, or belongs to an engine.
    """
    validate.module(module, "sw.unwrap")
    data, wrapper = driver_of(module), wrapper_of(module)
    if wrapper is not None:
        return wrapper.unwrap()
    if data is None:
        inside = [name for name, part in module.named_modules() if name and drivers(part)]
        given = f"sw.unwrap of a {type(module).__name__} that is not wrapped"
        if inside:
            instead = f'sw.unwrap(module.get_submodule("{inside[0]}"))'
            raise bad(f"{given}, but has a part that is ({inside[0]})", _WRAPPED, instead)
        raise bad(given, _WRAPPED, "the module itself; there is nothing to undo")
    if not data.pace.by_hand:
        raise bad(
            f"sw.unwrap of a {type(module).__name__} that belongs to an engine",
            _WRAPPED,
            "new_module.load_state_dict(sw.full_state_dict(engine)) on rank 0",
        )
    data.finish_sums()
    data.between_passes()
    leases = [handle for handle in data.handles if isinstance(handle, Lease)]
    for handle in [*data.handles, *data.on_grads.begins]:
        if not isinstance(handle, Lease):
            handle.remove()
    data.consensus.buffers.refresh()
    for flat in flats_of(data.units.order):
        _release(flat)
    for lease in leases:  # after the last message
        lease.remove()
    return module


_WRAPPED = "the module that was passed to sw.DDP, sw.FSDP or sw.Pipe"


@torch.no_grad()
def _release(flat: Flat) -> None:
    flat.unshard_in_own_dtype()
    for p in flat.params:
        grad = p.grad
        p.grad = None  # torch compares its shape with that of the data
        p.data = p.data.clone()
        if grad is not None and not flat.split:
            p.grad = grad.to(p.device, copy=True)


# --- stand-ins for hooks --------------------------------------------------------------------------


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
    if any(wrapper_of(part) is not None for part in module.modules()):
        raise validate.already_wrapped(module)
