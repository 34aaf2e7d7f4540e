"""`sw.unwrap`: turns a wrapped module back into a plain one, with full parameters."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.move import broadcast
from shardwise.comm.parameter import parameter_like
from shardwise.comm.transport import Lease
from shardwise.core.errors import bad
from shardwise.engine.checks import validate
from shardwise.techniques.data.apply import driver_of, drivers, flats_of
from shardwise.techniques.data.flat.flat_parameter import Flat
from shardwise.techniques.data.inference import normal_mode
from shardwise.techniques.pipeline.stage_module import Staging
from shardwise.wrap.data_parallel import DataParallel
from shardwise.wrap.pipe import Piped


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
    if isinstance(module, DataParallel):
        return module.module
    data, piped = driver_of(module), pipe_of(module)
    if piped is not None:
        piped.structure.require_unchanged()  # other ranks would put the old part back
        _restore(piped.staged)
        piped.options.remove()
        assert isinstance(piped.world.links, Lease)
        piped.world.links.remove()
        del module.forward
        return module
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


def pipe_of(module: nn.Module) -> Piped | None:
    """The object that sw.Pipe put in place of the module's forward; None for any other module."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, Piped) else None


def no_pipe(module: nn.Module) -> None:
    """Raise InputError if `module` or a part of it is wrapped by sw.Pipe or sw.DataParallel."""
    if any(pipe_of(p) is not None or isinstance(p, DataParallel) for p in module.modules()):
        raise validate.already_wrapped(module)


@torch.no_grad()
def _release(flat: Flat) -> None:
    """Give each parameter its own memory and its full value."""
    flat.unshard_in_own_dtype()
    for p in flat.params:
        grad = p.grad
        p.grad = None  # torch compares its shape with that of the data
        p.data = p.data.clone()
        if grad is not None and not flat.split:
            p.grad = grad.to(p.device, copy=True)


@torch.no_grad()
def _restore(staged: Staging) -> None:
    """Replace the placeholders of other ranks' layers by the layers, with their values."""
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
            own[number] = parameter_like(p, whole)
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
    """Replace parameters on meta by real ones."""
    for key, p in table.items():
        if p is not None:
            table[key] = own[numbers[id(p)]]
