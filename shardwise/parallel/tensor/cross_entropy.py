"""The cross-entropy of logits, whole or cut over the vocabulary.

    rank 0     x[:, 0..3]  ---+ largest  +---+ sum of exp       +--> loss     I
    rank 1     x[:, 4..7]  ---+ logit    +---+ target's logit   +--> loss     I
                                max             sum
    back       (softmax - target) of one's own columns: nothing is sent       S(-1)

The logits are never gathered.  Of N positions, N numbers are reduced and then 2N (3N with label
smoothing, for the sum of logits), whatever the vocabulary.  With M the largest logit of a position,
Z the sum of exp(x - M), V the vocabulary, s the smoothing and z the weight of the z-loss,

    loss = (1 - s) (log Z + M - x[target])  +  s (log Z + M - mean x)  +  z (log Z + M)^2
    grad = (1 + 2 z (log Z + M)) softmax  -  (1 - s) onehot  -  s / V

(Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3; label smoothing: Szegedy et al., arXiv
1512.00567, section 7; z-loss: Chowdhery et al., "PaLM", arXiv 2204.02311, section 5.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

from shardwise.comm.move import all_reduce
from shardwise.comm.once import once
from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.uneven import Cut, even

OPTIONS = ("ignore_index", "label_smoothing", "z_loss", "reduction")
#: 16-bit logits are widened by blocks of rows of so many elements, which stay in the cache.
BLOCK_ELEMENTS = 2**18


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy in nats of `logits` [..., V] and the words `targets` [...] that were to come.

    The vocabulary is always the last dim (torch's own takes classes to be dim 1 of three or more).
    Plain logits give what torch's cross_entropy gives, bit for bit.  Logits that are cut over the
    vocabulary, as a tensor-parallel model returns them, are not gathered; the loss is the same on
    all ranks, and the gradient is that of each rank's own columns.  Sums are taken in fp32 at
    least; the loss has the dtype of the logits (fp32 under autocast).

    Positions whose target is `ignore_index` count for nothing.  `label_smoothing` in [0, 1] spreads
    that share of the target over all words (arXiv 1512.00567, section 7).  `z_loss` is the weight
    of the square of log sum exp of the logits, which keeps them from drifting (PaLM, arXiv
    2204.02311, section 5: 1e-4).  `reduction` is "mean" over the counted positions (NaN where there
    are none), "sum", or "none" for a loss [...] for each, 0 where ignored.  (Vocabulary-parallel:
    Megatron-LM, arXiv 1909.08053, section 3.)

    Raises:
        InputError: shapes that do not belong together, targets that are not whole numbers, a
            smoothing outside [0, 1], a negative z-loss, an unknown reduction.
        IndexError: a target that is no word of the vocabulary.
    """
    options = (ignore_index, label_smoothing, z_loss, reduction)
    if has_torch_function_unary(logits):  # sharded logits (logits.py), or a function mode
        words: dict[str, Any] = dict(zip(OPTIONS, options, strict=True))
        return handle_torch_function(cross_entropy, (logits,), logits, targets, **words)
    if z_loss:
        columns = even(0, logits.shape[-1], 1)
        return sharded_cross_entropy(logits, (Axis("none"), columns), targets, *options)[0]
    _refuse(logits, targets, label_smoothing, z_loss, reduction)
    loss = F.cross_entropy(
        logits.reshape(targets.numel(), logits.shape[-1]),
        targets.reshape(-1).long(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    return loss.view(targets.shape) if reduction == "none" else loss


def sharded_cross_entropy(
    x: Tensor,
    sharding: tuple[Axis, Cut],
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> tuple[Tensor, int]:
    """The loss of logits of which `x` [..., v] are this rank's columns by `sharding`.

    Also returns the bytes of an element in which the sums over the ranks are taken.
    """
    _refuse(x, targets, label_smoothing, z_loss, reduction)
    x, wanted = x.reshape(targets.numel(), x.shape[-1]), targets.reshape(-1).long()
    ignored = wanted == ignore_index
    axis, cut = sharding
    terms = _Terms(axis, cut, label_smoothing, z_loss)
    losses = _Losses.apply(x, _words(wanted, ignored, cut.whole), ignored, terms)
    loss = _reduced(losses, ignored, reduction).to(_told_in(x))
    return loss.view(targets.shape) if reduction == "none" else loss, losses.element_size()


def _refuse(
    x: Tensor, targets: Tensor, label_smoothing: float, z_loss: float, reduction: str
) -> None:
    if x.shape[:-1] != targets.shape:
        raise bad(
            f"logits of shape {tuple(x.shape)} with targets of shape {tuple(targets.shape)}",
            "logits [..., V] with targets [...], the vocabulary last",
            "cross_entropy(logits.transpose(1, -1), targets) where the vocabulary is dim 1",
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise bad(
            f"targets of dtype {targets.dtype}",
            "the number of a word for each position",
            "torch.nn.functional.cross_entropy for probabilities",
        )
    if not 0 <= label_smoothing <= 1:
        raise bad(f"label_smoothing={label_smoothing}", "0 to 1", "label_smoothing=0.1")
    if not z_loss >= 0:
        raise bad(f"z_loss={z_loss}", "0 or more", "z_loss=1e-4")
    if reduction not in ("mean", "sum", "none"):
        raise bad(f"reduction={reduction!r}", "mean, sum or none", 'reduction="mean"')


def _reduced(losses: Tensor, ignored: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (len(losses) - ignored.sum()) if reduction == "mean" else total


def _told_in(x: Tensor) -> torch.dtype:
    """The dtype in which torch gives the loss of such logits."""
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return torch.promote_types(x.dtype, torch.float32) if autocast else x.dtype


@dataclass(frozen=True)
class _Terms:
    axis: Axis
    cut: Cut
    smoothing: float
    z: float


class _Losses(torch.autograd.Function):
    """The loss [N] of each position, from this rank's columns x [N, v].

    Kept for the backward pass: the softmax over the own columns (of 16-bit logits, the logits), and
    for each position [N, 1] what makes it the whole softmax.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, words: Tensor, ignored: Tensor, terms: _Terms) -> Tensor:
        """The letters are those of the formulas above; all values of a position are [N, 1]."""
        axis, columns, s = terms.axis, x.shape[1], terms.smoothing
        ((start, _),) = terms.cut.ranges[axis.rank]
        far = words.unsqueeze(1) - start
        here = far.clamp(0, max(0, columns - 1))
        mine = here == far if columns else far.new_zeros(far.shape, dtype=torch.bool)

        own, exps, kept = _own_softmax(x)
        largest = all_reduce(own.clone(), axis, "max")
        exps.mul_((own - largest).exp_())
        logit = x.gather(1, here) if columns else own
        sums = [exps, torch.where(mine, logit - largest, 0)]
        if s:
            sums.append(x.sum(1, keepdim=True, dtype=own.dtype) - largest * columns)
        z, logit, *rest = all_reduce(torch.stack(sums), axis)

        log_z = z.log()
        losses, hit, share = log_z - logit, logit.exp() / z, exps.div_(z)
        if s:
            losses = (1 - s) * losses + s * (log_z - rest[0] / terms.cut.whole)
        if terms.z:
            log_sum = largest + log_z
            losses += terms.z * log_sum**2
            slope = 1 + 2 * terms.z * log_sum
            hit, share = hit * slope, share * slope
        ctx.spread = s / terms.cut.whole
        # where all own columns are -inf, their softmax is NaN, and nothing of the whole
        ctx.clear = not own.is_cpu or bool(own.min() == -torch.inf) if len(own) else False
        ctx.save_for_backward(kept, here, mine, ignored, share, hit.sub_(1 - s + ctx.spread))
        return losses.squeeze(1).masked_fill_(ignored, 0)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Every rank computes the gradient of its own columns from what it has kept."""
        kept, here, mine, ignored, share, hit = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0).unsqueeze(1)
        weight, out, narrow = grad * share, torch.empty_like(kept), kept.dtype != grad.dtype
        for rows in _blocks(kept):
            p = kept[rows].to(grad.dtype).softmax(1) if narrow else kept[rows]
            part = torch.mul(p, weight[rows], out=p if narrow else out[rows])
            if ctx.clear:
                part.masked_fill_(weight[rows] == 0, 0)
            if ctx.spread:
                part.sub_(grad[rows] * ctx.spread)
            if narrow:
                out[rows] = part
        if kept.shape[1]:  # the target apart: p - 1 would be inexact where p is almost 1
            exact = torch.where(mine, (grad * hit).to(out.dtype), out.gather(1, here))
            out.scatter_(1, here, exact)
        return out, None, None, None


def _own_softmax(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of columns x [N, v]: the largest logit M, the sum of exp(x - M), and what is to be kept.

    The softmax is one pass of a fused kernel, and its largest value is 1 / sum: together they are
    cheaper than exp alone.
    """
    wide, kept = torch.promote_types(x.dtype, torch.float32), x
    if not x.shape[1]:
        nothing = x.new_zeros((len(x), 1), dtype=wide)
        return nothing - torch.inf, nothing, kept
    largest = x.new_empty((len(x), 1), dtype=wide)
    peak = torch.empty_like(largest)
    for rows in _blocks(x):
        part = x[rows].to(wide)
        torch.amax(part, 1, keepdim=True, out=largest[rows])
        p = part.softmax(1)
        torch.amax(p, 1, keepdim=True, out=peak[rows])
        kept = p if x.dtype == wide else x
    # the softmax of a row of -inf is NaN, and so is what depends on any other NaN
    return largest, peak.reciprocal_().nan_to_num_(0), kept


def _blocks(x: Tensor) -> Iterator[slice]:
    """All rows at once; by blocks where they are widened on the way."""
    rows = max(1, len(x))
    if x.element_size() < 4:
        elements = BLOCK_ELEMENTS if x.device.type == "cpu" else 2**8 * BLOCK_ELEMENTS
        rows = max(1, elements // max(1, x.shape[1]))
    return (slice(first, first + rows) for first in range(0, len(x), rows))


def _words(targets: Tensor, ignored: Tensor, whole: int) -> Tensor:
    """The targets, 0 where ignored.  One that no rank holds would be a silent logit of 0."""
    words = targets.masked_fill(ignored, 0)
    if words.device.type == "cpu" and len(words):
        least, most = words.aminmax()
        if least < 0 or most >= whole:
            raise IndexError(f"Target {int(least if least < 0 else most)} is out of bounds.")
    elif words.device.type != "meta":
        good = ((words >= 0) & (words < whole)).all()
        # checked without waiting for it
        torch.ops.aten._assert_async.msg(good, f"a target outside the vocabulary of {whole}")
    return words
