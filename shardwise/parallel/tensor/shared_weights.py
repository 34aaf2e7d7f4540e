"""The gradient of a weight of which several ranks hold a part in common.

queries, keys and values in one weight, 4 query heads and one key head on 2 ranks:

rank 0    q0 q1 | k | v        q is each rank's own; of k and v both hold the same, and each
rank 1    q2 q3 | k | v        makes the gradient that its own queries send there
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.comm.move import start
from shardwise.comm.world import Axis
from shardwise.core.layout import P, R


def sum_spans(dim: int, spans: Sequence[tuple[int, int]], line: Axis, grad: Tensor) -> Tensor:
    """The gradient of a weight whose spans (start, length) of `dim` the ranks of `line` share.

    There `grad` is this rank's part of a sum, which is taken; elsewhere it is as it should be.
    """
    sizes = [length for _, length in spans]
    parts = torch.cat([grad.narrow(dim, *span) for span in spans], dim).contiguous()
    start(parts.view(-1), line, P, R, parts.view(-1)).wait()
    whole = grad.clone()
    for span, part in zip(spans, parts.split(sizes, dim), strict=True):
        whole.narrow(dim, *span).copy_(part)
    return whole
