"""The mean of a gradient over ranks, as a node of autograd: for `backward(create_graph=True)`.

Its value is the mean g = (1/n) sum_r g_r; its derivative goes to this rank's own g_r with weight 1.
All ranks compute the same function h of g, so rank r gets the gradient h'(g) dg_r.  Data
parallelism averages these over the ranks, which gives the gradient of h(g):

    (1/n) sum_r h'(g) dg_r = h'(g) dg
"""

from typing import Any

import torch
from torch import Tensor


def mean_with_graph(own: Tensor, mean: Tensor) -> Tensor:
    """The values of `mean` in memory of their own, with the graph of `own`, of the same shape."""
    with torch.enable_grad():
        return _Mean.apply(own, mean)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, mean: Tensor) -> Tensor:  # noqa: ARG004
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None
