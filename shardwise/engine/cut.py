"""Cuts the parameters of a model to their layouts: fill, broadcast, narrow.

What a rank of the pipeline does not hold is dropped with the layers of other stages
(techniques/pipeline/trace/placeholders.py).
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from shardwise.comm.move import broadcast, part
from shardwise.comm.world import Axis, World
from shardwise.core.layouts.param_layout import AxisLayout, Groups, Layout
from shardwise.techniques.data.flat.flat_parameter import Fill


def agree(tensors: Iterable[Tensor], axis: Axis, device: torch.device) -> None:
    """Broadcast the values of the axis's first rank, one tensor after another on `device`."""
    for t in tensors if axis.size > 1 else ():
        if not t.is_meta and t.numel():
            together = t.data.to(device).contiguous()
            broadcast(together, axis)
            t.data.copy_(together)


def cut_to(model: nn.Module, layouts: Mapping[str, AxisLayout], axis: Axis) -> None:
    """Keep this rank's part of each parameter, by the layouts on one axis."""
    params = dict(model.named_parameters())
    for name, on in layouts.items():
        p = params[name]
        if on.cut is None:
            continue
        if p.is_meta:
            shape = on.cut.shape(p.shape, axis.rank)
            p.data = torch.empty(shape, dtype=p.dtype, device="meta")
        else:
            p.data = part(p.data, on.cut, axis.rank)


def fill_part(
    fill: Fill, name: str, layout: Layout, here: Mapping[str, int], tensor: Tensor
) -> None:
    """Fill this rank's part of the parameter `name` with a function that fills all of it."""
    cuts = layout.cuts(here)
    whole = tensor.new_empty(layout.full_shape(tensor.shape)) if cuts else tensor
    fill(name, whole)
    for cut, rank in cuts:
        whole = part(whole, cut, rank)
    if cuts:
        tensor.copy_(whole)


def open_sums(world: World, axis: str, every: Iterable[Groups]) -> dict[Groups, Axis]:
    """The axis over which each of these groups of ranks of `axis` sums; called by all ranks."""
    ranks = range(world.axis(axis).size)
    found: dict[Groups, Axis] = {}
    for groups in sorted({*every}):
        inside = {rank for group in groups for rank in group}
        alone = [(rank,) for rank in ranks if rank not in inside]
        found[groups] = world.within(axis, [*groups, *alone])
    return found
