"""The whole model back from a pipeline: every rank gets the layers of the others."""

from typing import Any

import torch
from torch import Tensor

from shardwise.comm.move import broadcast
from shardwise.comm.parameter import parameter_like
from shardwise.techniques.pipeline.stage_module import Staging


@torch.no_grad()
def restore(staged: Staging) -> None:
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
