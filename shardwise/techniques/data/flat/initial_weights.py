"""Initial weights of a flat parameter: filled by name, or copied from rank 0."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shardwise.comm.move import broadcast
from shardwise.comm.parameter import become
from shardwise.comm.world import Axis

#: Called with a parameter's full name and the tensor to write its initial weights to.
Fill = Callable[[str, Tensor], None]


@torch.no_grad()
def initialize(
    full: Tensor,
    params: Sequence[tuple[str, nn.Parameter]],
    views: Sequence[Tensor],
    fill: Fill | None,
    axes: Sequence[Axis],
) -> None:
    """Write the weights of `params` to `views`, parts of `full`, the same on all data ranks.

    Parameters on the meta device are filled by name, and become real. If any has data, rank 0 of
    each of `axes` sends all of `full` to the others.
    """
    given = [not p.is_meta for _, p in params]
    for (name, p), view in zip(params, views, strict=True):
        if not p.is_meta:
            view.copy_(p.detach())
            continue
        if fill is not None:
            fill(name, view)
        # not with a view of full: autograd would count every write to full as one to the parameter
        become(p, torch.empty(0, dtype=full.dtype, device=full.device))
    for axis in axes if any(given) else ():
        broadcast(full, axis)
