"""A linear layer in tiles: blocks of rows of its weight, used one after another.

    W [F, D] = | W0 |     y = | x W0^T | x W1^T | x W2^T |      each tile is a module, and a unit of
               | W1 |                                           its own: it is gathered for its call
               | W2 |                                           and freed before the next but one

    forward     gather 0 | use 0, gather 1 | free 0, use 1, gather 2 | free 1, use 2
    backward    use 2, gather 1 | free and reduce 2, use 1, gather 0 | free and reduce 1, use 0

So the device has two tiles of the weight at once, and the gradients of a few, but never all of
them. A layer of logits computes a cross-entropy tile by tile too (tiled_logits.py). (Memory-centric
tiling: Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, section 5.1.3.)

F  features of the output    D  features of the input    N  positions
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.comm.parameter import parameter_like
from shardwise.core.layouts.uneven import Cut
from shardwise.kernels.cross_entropy import under_autocast
from shardwise.techniques.tile.tiled_logits import TileSums, tiled_logits


class Tile(nn.Module):
    """The rows [start, stop) of a linear layer's weight and bias.

    Its parameters are `own`; they are not registered, so that a model's parameters stay what they
    are for the user.
    """

    def __init__(self, linear: nn.Linear, start: int, stop: int) -> None:
        super().__init__()
        self.start, self.stop = start, stop
        self.own: dict[str, nn.Parameter] = {}
        for name, p in linear.named_parameters(recurse=False):
            self.own[name] = parameter_like(p, p.data[start:stop])

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        totals: bool = False,
    ) -> Any:
        """The outputs of these rows for x [..., D]; with targets [N], what their loss needs."""
        weight, bias = self.own["weight"], self.own.get("bias")
        if targets is None:
            return functional.linear(x, weight, bias)
        return TileSums.apply(x, weight, bias, targets - self.start, dtype, totals)

    def extra_repr(self) -> str:
        """The rows."""
        return f"rows {self.start} to {self.stop}"


class TiledForward:
    """Replaces the forward of a linear layer; `logits`: its output may be logits of a loss."""

    def __init__(self, tiles: Sequence[Tile], *, logits: bool) -> None:
        self.tiles, self.logits = list(tiles), logits

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002  # as nn.Linear names it
        """From [..., D] to [..., F]."""
        if self.logits and not under_autocast(input):  # which chooses types where it computes
            return tiled_logits(input, self.tiles)
        return torch.cat([tile(input) for tile in self.tiles], -1)


def into_tiles(linear: nn.Linear, cut: Cut, *, logits: bool) -> list[Tile]:
    """Let `linear` compute tile by tile: `cut` has the rows of each. Its parameters stay."""
    found = [Tile(linear, *ranges[0]) for ranges in cut.ranges]
    linear.forward = TiledForward(found, logits=logits)
    linear.add_module("tiles", nn.ModuleList(found))
    return found
