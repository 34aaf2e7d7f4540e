"""The gradient of a packed weight of which several ranks hold one part in common.

queries, keys and values in one weight, 4 query heads and one key head on 2 ranks:

rank 0    q0 q1 | k | v        queries differ between the ranks; k and v are the same on both, and
rank 1    q2 q3 | k | v        each rank computes the part of their gradient from its own queries
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.comm.move import start
from shardwise.comm.world import Axis
from shardwise.core.layouts.layout import P, R


def sum_spans(dim: int, spans: Sequence[tuple[int, int]], line: Axis, grad: Tensor) -> Tensor:
    """Sum the spans (start, length) of `dim` that the ranks of `line` share; returns the gradient.

    Inside the spans `grad` is this rank's partial sum; outside it is complete.
    """
    sizes = [length for _, length in spans]
    parts = torch.cat([grad.narrow(dim, *span) for span in spans], dim).contiguous()
    start(parts.view(-1), line, P, R, parts.view(-1)).wait()
    whole = grad.clone()
    for span, part in zip(spans, parts.split(sizes, dim), strict=True):
        whole.narrow(dim, *span).copy_(part)
    return whole
