"""Partitioned activation checkpointing: the inputs of recomputed modules, split over tensor ranks.

    forward     x [B, T, D], the same on all n ranks ---> rank r keeps elements r N/n to (r+1) N/n
    backward    all-gather of the pieces ---> x ---> the module's forward again

Each rank keeps an n-th of x, in place of one of n equal copies, for one all-gather in backward.
If x is already a shard (sequence parallelism), it is kept unchanged and nothing is sent.
(P_a of Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 6.1.)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from shardwise.comm.move import move
from shardwise.comm.world import Axis
from shardwise.core.layout import I, S


class _Piece(NamedTuple):
    """This rank's elements of a tensor of this shape, padded to the same number on each rank."""

    mine: Tensor
    shape: torch.Size


class Inputs:
    """The arguments of a module: as given for its first forward, then put together for each other.

    Tensors that a gradient reaches are kept in pieces; others are kept whole, since several modules
    may share them.
    """

    def __init__(self, axis: Axis, given: Any) -> None:
        self.axis = axis
        self.given: Any = given
        self.kept: Any = None

    def take(self) -> Any:
        """The arguments."""
        given, self.given = self.given, None
        if given is None:
            return tree_map_only(_Piece, self._whole, self.kept, is_leaf=_is_piece)
        self.kept = tree_map_only(Tensor, self._piece, given)
        return given

    def _piece(self, x: Tensor) -> Any:
        if not x.requires_grad:
            return x
        flat = x.detach().reshape(-1)
        padded = functional.pad(flat, (0, -len(flat) % self.axis.size))
        return _Piece(move(padded, self.axis, I, S(0)), x.shape)

    def _whole(self, piece: _Piece) -> Tensor:
        flat = move(piece.mine, self.axis, S(0), I)
        return flat[: piece.shape.numel()].view(piece.shape).requires_grad_()


def _is_piece(x: Any) -> bool:
    return isinstance(x, _Piece)
