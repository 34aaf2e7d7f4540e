"""Copies the buffers of rank 0 to every data rank.

Every step begins with rank 0's buffers, as under DDP: all of them, in messages that fit a slot of
the pool (comm/gloo/pool.py), because no rank knows whether another has changed one. The further
microbatches of a step go on with each rank's own, so a program can count in a buffer and sum it
before the update. A model without buffers sends nothing.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from shardwise.comm.move import broadcast
from shardwise.comm.unchanged import renew_buffers
from shardwise.comm.world import Axis


class Buffers:
    """The buffers of one model; without `follow`, rank 0's are copied only at the start."""

    def __init__(self, root: nn.Module, axes: Sequence[Axis], *, follow: bool = True) -> None:
        self.axes = [axis for axis in axes if axis.size > 1]
        self.holders = [m for m in root.modules() if m._buffers]
        self.follow = follow
        self._broadcast()

    def refresh(self) -> None:
        """Copy rank 0's buffers to every rank before a step. All ranks call it."""
        if self.follow:
            self._broadcast()

    @torch.no_grad()
    def lend(self) -> list[tuple[Tensor, Tensor]]:
        """Copy rank 0's buffers to every rank for an evaluation. Returns this rank's buffers that
        had other values, each with its own value, which the caller restores afterwards.
        """
        receives = self.follow and any(axis.rank for axis in self.axes)
        before = [(b, b.detach().clone()) for b in self._all()] if receives else []
        self.refresh()
        return [(b, own) for b, own in before if not torch.equal(b, own)]

    def _all(self) -> list[Tensor]:
        # looked up each time: a module may have put another in its place
        renew_buffers(self.holders)
        found = dict.fromkeys(b for m in self.holders for b in m._buffers.values() if b is not None)
        for b in found:
            if 0 in b.stride() and not b.is_contiguous():  # expanded: its elements share memory
                b.data = b.data.contiguous()
        return [b for b in found if b.numel()]

    @torch.no_grad()
    def _broadcast(self) -> None:
        buffers = self._all()
        for axis in self.axes if buffers else []:
            for cuts in _pieces([b.nbytes for b in buffers], axis.pool.most_bytes):
                _broadcast([(buffers[i], start, stop) for i, start, stop in cuts], axis)


def _pieces(sizes: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Messages of at most `most` bytes, each a list of (buffer, begin, end) in bytes."""
    piece, free = list[tuple[int, int, int]](), most
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + free)
            piece.append((index, start, stop))
            start, free = stop, free - (stop - start)
            if not free:
                yield piece
                piece, free = [], most
    if piece:
        yield piece


def _broadcast(piece: Sequence[tuple[Tensor, int, int]], axis: Axis) -> None:
    nbytes = sum(stop - start for _, start, stop in piece)
    together = axis.pool.slot(nbytes, piece[0][0].device).tensor((nbytes,), torch.uint8)
    parts = together.split([stop - start for _, start, stop in piece])
    for (b, start, stop), part in zip(piece, parts, strict=True):
        part.copy_(b.detach().reshape(-1).view(torch.uint8)[start:stop])
    broadcast(together, axis)
    for (b, start, stop), part in zip(piece, parts, strict=True):
        if axis.rank:
            # .data: a graph that has saved the buffer (an earlier forward) is not invalidated, as
            # it is not by the normalisation layer's own update
            flat = b.data.reshape(-1)
            flat.view(torch.uint8)[start:stop].copy_(part)
            if not b.is_contiguous():
                b.data.copy_(flat.view_as(b))
