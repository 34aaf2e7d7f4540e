"""The root-mean-square norm as one autograd node.

    forward     y  = x r w                        r = (mean x^2 + eps)^(-1/2), for each row
    backward    gx = r (g w) - x (r^3 / D) sum(g w x)          gw = sum over the rows of g x r

w is the weight of D elements, g the gradient of y.  The tensor g x is computed once for both sums.
The node saves x and r; autograd also saves the normalised x.  It is used in fp32 and fp64 on CPUs:
torch has kernels of its own for GPUs, and rounds differently in 16 bits.  Figures are in
benchmarks/results/kernels.toml.  (Zhang & Sennrich, arXiv 1910.07467.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

#: Rows that are added in sequence.
BLOCK = 64

Norm = Callable[[Tensor, Tensor, float], Tensor]


def fused(device: torch.device) -> Norm | None:
    """The norm of x [..., *shape] with a weight [*shape] and eps; None to use torch's own."""
    return _RMSNorm.apply if device.type == "cpu" else None


def _sum(rows: Tensor, by: Tensor) -> Tensor:
    """The sum of rows [N, D] times by [N, 1], by blocks, which is as exact as torch's sum."""
    rest = len(rows) % BLOCK
    if not rest:
        return by.view(-1, 1, BLOCK).bmm(rows.view(-1, BLOCK, rows.shape[1])).sum((0, 1))
    return _sum(rows[:-rest], by[:-rest]).addmv_(rows[-rest:].t(), by[-rest:, 0])


def _is_batched(grad: Tensor) -> bool:
    """Whether `grad` is a batch of gradients (vmap)."""
    return torch._C._are_functorch_transforms_active() or is_legacy_batchedtensor(grad)


class _RMSNorm(torch.autograd.Function):
    """x [..., *shape] and a weight [*shape] to the shape of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The normalised dims are flattened to one."""
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        by, rows = weight.reshape(-1), x.reshape(-1, weight.numel())
        root = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        # eps + root^2 / D
        root = torch.rsub(root.square_(), eps, alpha=-1 / rows.shape[1]).rsqrt_()
        ctx.save_for_backward(x, weight, root)
        # not a view, as in fused_linear.py
        return torch.mul(rows, root).mul_(by).view(x.shape).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of `x` and of the weight."""
        if grad is None:
            return None, None, None
        x, weight, root = ctx.saved_tensors
        passed, trained, _ = ctx.needs_input_grad
        by, width = weight.reshape(-1), weight.numel()
        rows, grad = x.reshape(-1, width), grad.reshape(-1, width)
        both = grad * rows
        if torch.is_grad_enabled() or _is_batched(grad):  # differentiated again: nothing in place
            root = (rows.square().mean(1, keepdim=True) + ctx.eps).rsqrt()
            to_x = root * grad * by - rows * root**3 * (both * by).mean(1, keepdim=True)
            return to_x.view(x.shape), (both * root).sum(0).view(weight.shape), None
        to_weight = _sum(both, root).view(weight.shape) if trained else None
        if not passed:
            return None, to_weight, None
        share = both.mv(by).unsqueeze(1).mul_(root**3)
        to_x = torch.mul(grad, by, out=both).mul_(root).addcmul_(rows, share, value=-1 / width)
        return to_x.view(x.shape), to_weight, None
