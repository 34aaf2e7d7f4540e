"""this file is how a model's buffers stay those of rank 0 on every data rank.

    running statistics   (batch norm and its kin) after every training forward, as DDP does
    all others           in the step after some rank has found one of its own changed

Running statistics are known by their module, the others by torch's version counters: that one
has changed is a fact the ranks agree on together with the other facts of a step, because ranks
that disagreed on what to broadcast would wait for each other for ever.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import broadcast
from shardwise.comm.world import Axis


class Buffers:
    """The buffers of one model on the data axes."""

    def __init__(self, root: nn.Module, axes: Sequence[Axis]) -> None:
        self.axes = list(axes)
        holders = [m for m in root.modules() if any(b is not None for b in m._buffers.values())]
        self.norms = [m for m in holders if m._buffers.get("running_mean") is not None]
        self.others = [m for m in holders if m._buffers.get("running_mean") is None]
        self.trained, self.stale = False, False
        self.versions: list[tuple[int, int]] = []
        self._broadcast(_of(self.norms))
        self._broadcast(_of(self.others))
        self._note()

    def forward_begins(self) -> None:
        """Bring every rank's buffers in line before a training forward."""
        if self.trained:
            self._broadcast(_of([m for m in self.norms if m.training]))
        self.trained = True
        if self.stale:
            self._broadcast(_of(self.others))
            self.stale = False
            self._note()

    def refresh(self) -> None:
        """Bring running statistics in line now: somebody is about to use them."""
        if self.trained:
            self._broadcast(_of(self.norms))

    def loaded(self) -> None:
        """Every rank has been given the same buffers from outside."""
        self.trained = True
        self._note()

    def changed(self) -> list[float]:
        """One number, 1 where this rank has changed a buffer that is no running statistic."""
        return [float(self._seen() != self.versions)] if self.others else []

    def heard(self, flags: Sequence[bool]) -> None:
        """Take note of whether any rank has."""
        self.stale = any(flags)

    def _seen(self) -> list[tuple[int, int]]:
        return [(id(b), b._version) for b in _of(self.others)]

    def _note(self) -> None:
        self.versions = self._seen()

    def _broadcast(self, buffers: Sequence[Tensor]) -> None:
        for axis in self.axes:
            for dtype in dict.fromkeys(b.dtype for b in buffers):
                _broadcast_together([b for b in buffers if b.dtype == dtype], axis)


def _of(modules: Sequence[nn.Module]) -> list[Tensor]:
    return list(dict.fromkeys(b for m in modules for b in m._buffers.values() if b is not None))


@torch.no_grad()
def _broadcast_together(tensors: Sequence[Tensor], axis: Axis) -> None:
    if axis.size == 1 or not tensors:
        return
    together = torch.cat([t.detach().reshape(-1) for t in tensors])
    broadcast(together, axis)
    for t, part in zip(tensors, together.split([t.numel() for t in tensors]), strict=True):
        # .data: a graph that has saved the buffer (an earlier forward) is not invalidated, as it
        # is not by the normalisation layer's own update
        t.data.copy_(part.view_as(t))
