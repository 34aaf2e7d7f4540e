"""Buffers: those of rank 0 are copied to every data rank.

Every training forward begins with rank 0's buffers, as under DDP: all of them, in one message,
because no rank knows whether another has changed one.  A model without buffers sends nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwise.comm.move import broadcast
from shardwise.comm.world import Axis


class Buffers:
    """The buffers of one model on the data axes.

    Without `follow` they are rank 0's at first only.
    """

    def __init__(self, root: nn.Module, axes: Sequence[Axis], *, follow: bool = True) -> None:
        self.axes = [axis for axis in axes if axis.size > 1]
        self.holders = [m for m in root.modules() if m._buffers]
        self.follow = follow
        self._broadcast()

    def refresh(self) -> None:
        """Bring every rank's buffers in line: they are about to be used.  Called by all ranks."""
        if self.follow:
            self._broadcast()

    @torch.no_grad()
    def _broadcast(self) -> None:
        # looked up each time: a module may have put another in its place
        found = dict.fromkeys(b for m in self.holders for b in m._buffers.values() if b is not None)
        # the widest elements first: each begins in the message at a multiple of its size
        buffers = sorted((b for b in found if b.numel()), key=lambda b: -b.element_size())
        for axis in self.axes if buffers else []:
            together = torch.cat([b.detach().reshape(-1).view(torch.uint8) for b in buffers])
            broadcast(together, axis)
            if axis.rank:
                _spread(together, buffers)


def _spread(together: Tensor, buffers: Sequence[Tensor]) -> None:
    for b, part in zip(buffers, together.split([b.nbytes for b in buffers]), strict=True):
        # .data: a graph that has saved the buffer (an earlier forward) is not invalidated, as it
        # is not by the normalisation layer's own update
        b.data.copy_(part.view(b.dtype).view_as(b))
