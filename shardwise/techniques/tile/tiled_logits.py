"""Logits of a tiled layer, which are not computed before they are used, and their cross-entropy.

    logits = head(x)                              nothing is computed
    cross_entropy(logits.flatten(0, 1), targets)  tile by tile, as below
    logits.argmax(-1), logits / 2, print(logits)  computes all of them: a plain tensor

    tile k      l = x Wk^T [N, Vk]     s_k = log sum_j exp(l_j)     t_k = l at the target, or 0
    loss        S = log sum_k exp(s_k)     S - sum_k t_k            of each position
    backward    l again; the gradient of l_j is exp(l_j - s_k) ds_k + [j is the target] dt_k

A tile keeps x and s_k for the backward pass, so that logits of one tile exist at a time, at the
price of one more product. It is the loss of vocabulary-parallel ranks (Megatron-LM, arXiv
1909.08053, section 3), one after another; sums have 32 bits or more. Label smoothing needs the sum
of a tile's logits too, m_k.

N  positions    V  vocabulary, Vk of it in tile k    D  features of the input
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.comm.torch_links import once
from shardwise.core.errors import bad
from shardwise.kernels.cross_entropy import (
    blocks,
    known_classes,
    loss_dtype,
    reduced,
    require_loss,
    under_autocast,
)
from shardwise.kernels.logits import Logits


class Tiles:
    """The columns of a tiled layer for its input `x` [..., D]; `computed` once they were joined."""

    def __init__(self, x: Tensor, tiles: Sequence[Any], dtype: torch.dtype | None = None) -> None:
        self.x, self.tiles, self.computed = x, tiles, False
        self.dtype = dtype or x.dtype
        self.whole: int = tiles[-1].stop
        self.version = _version(x)

    def copy(self, dtype: torch.dtype | None) -> "Tiles":
        return Tiles(self.x, self.tiles, dtype or self.dtype)

    def join(self, local: Tensor) -> Tensor:
        self.computed = True
        return torch.cat(self._of_each(local), -1).to(self.dtype)

    def take(self, _: Tensor) -> None:
        """Joined columns are the memory of the logits."""

    def loss(
        self,
        local: Tensor,
        targets: Tensor,
        /,
        *,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        reduction: str,
    ) -> Tensor:
        """The cross-entropy, a tile at a time."""
        full = local.new_empty(0, dtype=self.dtype).expand(*local.shape[:-1], 0)
        require_loss(full, targets, label_smoothing, z_loss, reduction)
        classes, s = targets.reshape(-1).long(), label_smoothing
        ignored = classes == ignore_index
        classes = known_classes(classes, ignored, self.whole)
        x = local.reshape(len(classes), local.shape[-1])
        found = zip(*self._of_each(x, classes, self.dtype, s > 0), strict=True)
        sums, picked, *totals = (torch.stack(values) for values in found)
        log_sum = sums.logsumexp(0)
        losses = log_sum - picked.sum(0)
        if s:
            losses = (1 - s) * losses + s * (log_sum - totals[0].sum(0) / self.whole)
        if z_loss:
            losses = losses + z_loss * log_sum**2
        loss = reduced(losses.masked_fill(ignored, 0), ignored, reduction)
        return loss.to(loss_dtype(full)).view(targets.shape if reduction == "none" else ())

    def _of_each(self, *given: Any) -> list[Any]:
        """The results of the tiles, in the types that their layer was called with."""
        if _version(self.x) != self.version:
            raise bad(
                "the input of a tiled layer, changed in place before its logits were used",
                "changes after the loss: logits of tiles are computed when they are used",
                "a copy, as in head(hidden.clone()), or a plan without tile for this layer",
            )
        if not under_autocast(self.x):
            return [tile(*given) for tile in self.tiles]
        with torch.autocast(self.x.device.type, enabled=False):
            return [tile(*given) for tile in self.tiles]


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def tiled_logits(x: Tensor, tiles: Sequence[Any]) -> Logits:
    """The logits [..., V] of `tiles` for x [..., D]; nothing is computed."""
    trained = any(p.requires_grad for tile in tiles for p in tile.own.values())
    x = x.contiguous()  # as logits are, so that their views and copies are those of x
    return Logits.later(x, Tiles(x, tiles), x.dtype, trained=trained or x.requires_grad)


class TileSums(torch.autograd.Function):
    """Of logits x weight^T + bias in `dtype`: log-sum-exp, logits at the targets, and sums; [N].

    x [N, D], weight [Vk, D], bias [Vk]; `column` [N] is the target's: where it is not in the tile,
    the second is 0. The third is there with `totals`. Keeps x, the weight and the log-sum-exp, and
    computes the logits again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        column: Tensor,
        dtype: torch.dtype,
        totals: bool,
    ) -> tuple[Tensor, ...]:
        """The numbers of each position, in blocks of rows."""
        logits = F.linear(x, weight, bias)
        wide = torch.promote_types(dtype, torch.float32)
        found = [x.new_empty(len(x), dtype=wide) for _ in range(2 + totals)]
        place, inside = _places(column, len(weight))
        for rows in blocks(logits):
            part = logits[rows].to(dtype).to(wide)
            found[0][rows] = part.logsumexp(-1)
            found[1][rows] = part.gather(1, place[rows]).squeeze(1).masked_fill(~inside[rows], 0.0)
            if totals:
                found[2][rows] = part.sum(-1)
        ctx.save_for_backward(x, weight, bias, column, found[0])
        ctx.dtype = dtype
        return tuple(found)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias."""
        x, weight, bias, column, sums = ctx.saved_tensors
        of_sums, of_picked, *of_totals = (grad.unsqueeze(1) for grad in grads)
        grad = F.linear(x, weight, bias)
        place, inside = _places(column, len(weight))
        of_picked = of_picked.masked_fill(~inside.unsqueeze(1), 0.0)
        for rows in blocks(grad):
            part = grad[rows].to(ctx.dtype).to(sums.dtype)
            part.sub_(sums[rows].unsqueeze(1)).exp_().mul_(of_sums[rows])
            part.scatter_add_(1, place[rows], of_picked[rows])
            for each in of_totals:
                part.add_(each[rows])
            grad[rows] = part
        into_x, into_weight, into_bias, *_ = ctx.needs_input_grad
        return (
            grad @ weight if into_x else None,
            grad.T @ x if into_weight else None,
            grad.sum(0) if into_bias else None,
            None,
            None,
            None,
        )


def _places(column: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The targets [N, 1] as columns of a tile, 0 for those elsewhere; whether they are in it."""
    inside = (column >= 0) & (column < columns)
    return column.masked_fill(~inside, 0).unsqueeze(1), inside
