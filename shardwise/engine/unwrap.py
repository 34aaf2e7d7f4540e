"""`sw.unwrap`: turns a wrapped module back into a plain one, with whole parameters."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.move import broadcast
from shardwise.core.errors import bad
from shardwise.engine import validate
from shardwise.engine.pipe import Piped
from shardwise.engine.shard import driver_of, drivers, flats_of
from shardwise.engine.stage_module import Staging
from shardwise.parallel.data.flat_parameter import Flat


def unwrap(module: nn.Module) -> nn.Module:
    """Undo `sw.DDP`, `sw.FSDP` or `sw.Pipe`, in place; called by all ranks.  Returns the module.

    Every parameter has its own shape, memory and whole value again, every buffer is rank 0's, and
    nothing of Shardwise is left on the module: one process can train, copy or pickle it, and it
    can be wrapped again.  Parameters stay the objects that they were, so an optimizer goes on;
    one that keeps state of pieces must be made anew.  Gradients stay where they were whole
    (`sw.DDP`), else they are dropped.

    Of a pipe, a rank's own stages stay the objects that they were, gradients included.  Layers of
    other ranks are copies that `sw.Pipe` made, with today's parameters and buffers; the optimizer
    must be made anew, since it has never seen their parameters.

    Raises:
        InputError: the module is not wrapped, or an engine's model.
    """
    validate.module(module, "sw.unwrap")
    data, piped = driver_of(module), pipe_of(module)
    if piped is not None:
        _restore(piped.staged)
        del module.forward
        return module
    if data is None:
        inside = [name for name, part in module.named_modules() if name and drivers(part)]
        what = f"a {type(module).__name__} that is not wrapped" + (
            f", but has a part that is ({inside[0]})" if inside else ""
        )
        raise bad(what, "the module that was wrapped", "sw.unwrap(sw.DDP(module))")
    if not data.pace.by_hand:
        raise bad(
            f"sw.unwrap of a {type(module).__name__} that is an engine's model",
            "a module under sw.DDP, sw.FSDP or sw.Pipe",
            "sw.full_state_dict(engine), and load_state_dict of what it gives in a module made "
            "anew",
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
        raise validate.wrapped(module)


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


@torch.no_grad()
def _restore(staged: Staging) -> None:
    """Put the layers of other ranks, with their values, in the places of their stand-ins."""
    layers, axis, device = staged.stages.layers, staged.axis, staged.stages.device
    own = {number: p for stage in layers.own.values() for number, p in stage.items()}

    def value(like: Tensor, stages: tuple[int, ...], ours: Tensor | None) -> Tensor:
        whole = torch.empty(like.shape, dtype=like.dtype, device=device)
        if ours is not None:
            whole.copy_(ours)
        broadcast(whole.view(-1).view(torch.uint8), axis, staged.owners(stages)[0])
        return whole

    for number, (_, stages, p) in enumerate(layers.parameters):
        ours = own.get(number)
        whole = value(p, stages, ours)
        if ours is None:
            own[number] = nn.Parameter(whole, p.requires_grad)
    for _, stages, (table, key), ours in layers.buffers:
        whole = value(table[key], stages, None if ours is None else ours[key])
        table[key] = whole
    for of in layers.standing:
        if of.real is not None:
            continue
        for module in of.twin.modules():
            _fill(module._parameters, own, layers.numbers)
        for name in layers.found[of.name].names:
            parent, _, key = name.rpartition(".")
            layers.model.get_submodule(parent)._modules[key] = of.twin
    for (table, key), p in layers.lent:
        table[key] = own[layers.numbers[id(p)]]


def _fill(table: dict[str, Any], own: dict[int, Tensor], numbers: dict[int, int]) -> None:
    """Put real parameters in place of those on meta."""
    for key, p in table.items():
        if p is not None:
            table[key] = own[numbers[id(p)]]
