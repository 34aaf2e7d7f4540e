"""`sw.unwrap`: turns a wrapped module back into a plain one, with whole parameters."""

import torch
from torch import nn

from shardwise.core.errors import bad
from shardwise.engine import given
from shardwise.engine.pipe import Piped
from shardwise.engine.shard import driver_of, drivers, flats_of
from shardwise.parallel.flat import Flat


def unwrap(module: nn.Module) -> nn.Module:
    """Undo `sw.DDP` or `sw.FSDP`, in place; called by all ranks.  Returns the module.

    Every parameter has its own shape, memory and whole value again, every buffer is rank 0's, and
    nothing of Shardwise is left on the module: one process can train, copy or pickle it, and it
    can be wrapped again.  Parameters stay the objects that they were, so an optimizer goes on;
    one that keeps state of pieces must be made anew.  Gradients stay where they were whole
    (`sw.DDP`), else they are dropped.

    Raises:
        InputError: the module is not wrapped, or a pipe or an engine's model.
    """
    given.module(module, "sw.unwrap")
    data = driver_of(module)
    if data is None and pipe_of(module) is None:
        inside = [name for name, part in module.named_modules() if name and drivers(part)]
        what = f"a {type(module).__name__} that is not wrapped" + (
            f", but has a part that is ({inside[0]})" if inside else ""
        )
        raise bad(what, "the module that was wrapped", "sw.unwrap(sw.DDP(module))")
    if data is None or not data.pace.by_hand:
        kind = "a pipe, of which each rank has stages" if data is None else "an engine's model"
        raise bad(
            f"sw.unwrap of a {type(module).__name__} that is {kind}",
            "a module under sw.DDP or sw.FSDP",
            "sw.full_state_dict(...), and load_state_dict of what it gives in a module made anew",
        )
    data.sums.finish()
    for handle in data.handles:
        handle.remove()
    data.facts.buffers.refresh()
    for flat in flats_of(data.units.order):
        _release(flat)
    return module


def pipe_of(module: nn.Module) -> Piped | None:
    """What sw.Pipe has put in place of the module's forward; None for any other module."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, Piped) else None


def no_pipe(module: nn.Module) -> None:
    """Raise InputError where `module`, or a part of it, is a pipe, whose layers lie elsewhere."""
    if any(pipe_of(part) is not None for part in module.modules()):
        raise given.wrapped(module)


@torch.no_grad()
def _release(flat: Flat) -> None:
    """Give each parameter its own memory and whole value."""
    flat.gather()
    for p in flat.params:
        grad = p.grad
        p.grad = None  # torch compares its shape with that of the data
        p.data = p.data.clone()
        if grad is not None and not flat.split:
            p.grad = grad.clone()
