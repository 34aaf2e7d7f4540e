"""The cross-entropy of logits, sharded over the vocabulary or not.

    rank 0     x[:, 0..3]  ---+ largest  +---+ sum of exp       +--> loss     I
    rank 1     x[:, 4..7]  ---+ logit    +---+ target's logit   +--> loss     I
                                max             sum
    backward   (softmax - target) of the local columns: nothing is sent       S(-1)

The logits are never gathered.  For N positions, the ranks reduce N numbers and then 2N (3N with
label smoothing, for the sum of logits), whatever the size of the vocabulary.  With M the largest
logit of a position, Z the sum of exp(x - M), V the vocabulary size, s the smoothing and z the
weight of the z-loss,

    loss = (1 - s) (log Z + M - x[target])  +  s (log Z + M - mean x)  +  z (log Z + M)^2
    grad = (1 + 2 z (log Z + M)) softmax  -  (1 - s) onehot  -  s / V
"""

from collections.abc import Iterator
from typing import Any, Final, TypedDict

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

from shardwise.comm.move import all_reduce
from shardwise.comm.torch_links import once
from shardwise.comm.world import Axis
from shardwise.core.errors import bad
from shardwise.core.layouts.uneven import Cut, even
from shardwise.core.tools.arguments import is_number


class LossOptions(TypedDict):
    """The options of `cross_entropy`."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str


#: Their defaults.
OPTIONS: Final[dict[str, Any]] = {
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "reduction": "mean",
}
#: 16-bit logits are converted to fp32 in blocks of this many elements, which fit into the cache.
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
    """Cross-entropy in nats of `logits` [..., V] and `targets` [...], the indices of the classes.

    The vocabulary is always the last dim (torch's function expects the classes in dim 1 of three or
    more dims).  Plain logits give the same bits as torch's cross_entropy.  Sharded logits, as a
    tensor-parallel model returns them, are not gathered; the loss is equal on all ranks, and each
    rank computes the gradient of its shard.  Sums are computed in fp32 or wider; the loss has the
    dtype of the logits (fp32 under autocast).

    Positions whose target is `ignore_index` are ignored.  `label_smoothing` in [0, 1] spreads that
    share of the target over all classes (arXiv 1512.00567, section 7).  `z_loss` is the weight of
    the squared log sum exp of the logits, which keeps them from drifting (PaLM, arXiv 2204.02311,
    section 5: 1e-4).  `reduction` is "mean" over the positions that are not ignored (NaN if there
    are none), "sum", or "none" for the loss [...] of each position, 0 for ignored ones.
    (Vocabulary-parallel: Megatron-LM, arXiv 1909.08053, section 3.)

    Raises:
        InputError: the shapes do not match, targets are not integers, a smoothing is outside
            [0, 1], a z-loss is negative, the reduction is unknown.
        IndexError: a target is outside the vocabulary.
    """
    options = (ignore_index, label_smoothing, z_loss, reduction)
    if has_torch_function_unary(logits):  # sharded logits (kernels/logits.py), or a function mode
        words: dict[str, Any] = dict(zip(OPTIONS, options, strict=True))
        return handle_torch_function(cross_entropy, (logits,), logits, targets, **words)
    if z_loss:
        columns = even(0, logits.shape[-1], 1)
        return sharded_cross_entropy(logits, (Axis("none"), columns), targets, *options)
    require_loss(logits, targets, label_smoothing, z_loss, reduction)
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
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> Tensor:
    """The loss of this rank's shard `x` [..., v]."""
    require_loss(x, targets, label_smoothing, z_loss, reduction)
    x, classes = x.reshape(targets.numel(), x.shape[-1]), targets.reshape(-1).long()
    ignored = classes == ignore_index
    classes = known_classes(classes, ignored, sharding[1].whole)
    losses = _Losses.apply(x, classes, ignored, sharding, label_smoothing, z_loss)
    loss = reduced(losses, ignored, reduction).to(loss_dtype(x))
    return loss.view(targets.shape) if reduction == "none" else loss


def require_loss(
    x: Tensor, targets: Tensor, label_smoothing: float, z_loss: float, reduction: str
) -> None:
    """Raise InputError for what `cross_entropy` refuses."""
    if x.shape[:-1] != targets.shape:
        raise bad(
            f"logits of shape {tuple(x.shape)} with targets of shape {tuple(targets.shape)}",
            "logits [..., V] with targets [...], the vocabulary last",
            "cross_entropy(logits.transpose(1, -1), targets) if the vocabulary is dim 1",
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise bad(
            f"targets of dtype {targets.dtype}",
            "the index of a class for each position",
            "torch.nn.functional.cross_entropy for probabilities",
        )
    if not is_number(label_smoothing) or not 0 <= label_smoothing <= 1:
        raise bad(f"label_smoothing={label_smoothing!r}", "0 to 1", "label_smoothing=0.1")
    if not is_number(z_loss) or not z_loss >= 0:
        raise bad(f"z_loss={z_loss!r}", "0 or more", "z_loss=1e-4")
    if reduction not in ("mean", "sum", "none"):
        raise bad(f"reduction={reduction!r}", "mean, sum or none", 'reduction="mean"')


def reduced(losses: Tensor, ignored: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (losses.numel() - ignored.sum()) if reduction == "mean" else total


def loss_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the loss that torch computes from such logits."""
    return torch.promote_types(x.dtype, torch.float32) if under_autocast(x) else x.dtype


def under_autocast(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


class _Losses(torch.autograd.Function):
    """The loss [N] of each position, from this rank's columns x [N, v].
    Saved for the backward pass: the softmax over the local columns (for 16-bit logits, the logits),
    and for each position [N, 1] the factor between it and the softmax over all columns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        classes: Tensor,
        ignored: Tensor,
        sharding: tuple[Axis, Cut],
        s: float,
        z_loss: float,
    ) -> Tensor:
        """The letters are as in the formulas above; all values of a position are [N, 1]."""
        (axis, cut), columns = sharding, x.shape[1]
        ((start, _),) = cut.ranges[axis.rank]
        column = classes.unsqueeze(1) - start
        local = column.clamp(0, max(0, columns - 1))
        is_local = local == column if columns else column.new_zeros(column.shape, dtype=torch.bool)

        local_max, exps, saved = _local_softmax(x)
        largest = all_reduce(local_max.clone(), axis, "max")
        exps.mul_((local_max - largest).exp_())
        logit = x.gather(1, local) if columns else local_max
        sums = [exps, torch.where(is_local, logit - largest, 0)]
        if s:
            sums.append(x.sum(1, keepdim=True, dtype=local_max.dtype) - largest * columns)
        z, logit, *rest = all_reduce(torch.stack(sums), axis)

        log_z = z.log()
        losses, hit, share = log_z - logit, logit.exp() / z, exps.div_(z)
        if s:
            losses = (1 - s) * losses + s * (log_z - rest[0] / cut.whole)
        if z_loss:
            log_sum = largest + log_z
            losses += z_loss * log_sum**2
            slope = 1 + 2 * z_loss * log_sum
            hit, share = hit * slope, share * slope
        ctx.spread = s / cut.whole
        # if all local columns are -inf, their softmax is NaN, and their share is 0
        ctx.clear = bool(len(x)) and (not local_max.is_cpu or bool(local_max.min() == -torch.inf))
        ctx.save_for_backward(saved, local, is_local, ignored, share, hit.sub_(1 - s + ctx.spread))
        return losses.squeeze(1).masked_fill_(ignored, 0)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the local columns, from the saved tensors."""
        saved, local, is_local, ignored, share, hit = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0).unsqueeze(1)
        weight, out, narrow = grad * share, torch.empty_like(saved), saved.dtype != grad.dtype
        for rows in blocks(saved):
            p = saved[rows].to(grad.dtype).softmax(1) if narrow else saved[rows]
            part = torch.mul(p, weight[rows], out=p if narrow else out[rows])
            if ctx.clear:
                part.masked_fill_(weight[rows] == 0, 0)
            if ctx.spread:
                part.sub_(grad[rows] * ctx.spread)
            if narrow:
                out[rows] = part
        if saved.shape[1]:  # the target separately: p - 1 is inexact if p is almost 1
            exact = torch.where(is_local, (grad * hit).to(out.dtype), out.gather(1, local))
            out.scatter_(1, local, exact)
        return out, *(None,) * 5


def _local_softmax(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For columns x [N, v]: the largest logit M, the sum of exp(x - M), and the tensor to save.
    The softmax is one pass of a fused kernel, and its largest value is 1 / sum: cheaper than exp.
    """
    wide, saved = torch.promote_types(x.dtype, torch.float32), x
    if not x.shape[1]:
        zeros = x.new_zeros((len(x), 1), dtype=wide)
        return zeros - torch.inf, zeros, saved
    largest = x.new_empty((len(x), 1), dtype=wide)
    peak = torch.empty_like(largest)
    for rows in blocks(x):
        part = x[rows].to(wide)
        torch.amax(part, 1, keepdim=True, out=largest[rows])
        p = part.softmax(1)
        torch.amax(p, 1, keepdim=True, out=peak[rows])
        saved = p if x.dtype == wide else x
    # the softmax of a row of -inf is NaN; its sum is 0
    return largest, peak.reciprocal_().nan_to_num_(0), saved


def blocks(x: Tensor) -> Iterator[slice]:
    """All rows at once, or blocks of rows for logits that are converted to fp32."""
    rows = max(1, len(x))
    if x.element_size() < 4:
        elements = BLOCK_ELEMENTS if x.device.type == "cpu" else 2**8 * BLOCK_ELEMENTS
        rows = max(1, elements // max(1, x.shape[1]))
    return (slice(first, first + rows) for first in range(0, len(x), rows))


def known_classes(targets: Tensor, ignored: Tensor, whole: int) -> Tensor:
    """The targets, 0 where ignored.  Raises for one that no rank holds, whose logit would be 0."""
    classes = targets.masked_fill(ignored, 0)
    if classes.device.type == "cpu" and len(classes):
        least, most = classes.aminmax()
        if least < 0 or most >= whole:
            raise IndexError(f"Target {int(least if least < 0 else most)} is out of bounds.")
    elif classes.device.type != "meta":
        good = ((classes >= 0) & (classes < whole)).all()
        # does not synchronise with the device
        torch.ops.aten._assert_async.msg(good, f"a target outside the vocabulary of {whole}")
    return classes
